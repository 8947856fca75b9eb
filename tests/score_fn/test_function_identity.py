"""The identity of functions: it changes with everything that changes what a function computes, and with nothing else.

Every row of the tables defines a function and a change. The change must have an effect on the result; then the identities
before and after must differ, or there must be none.
"""

import builtins
import collections
import functools
import itertools
import math
import random
import sys
import textwrap
import time
import types
from dataclasses import dataclass
from types import SimpleNamespace

import functions
import numpy as np
import pytest

from cupy_sdpa import zoo
from cupy_sdpa.core.score_fn import identity as module
from cupy_sdpa.core.score_fn.identity import identity


class Factor:
    """A callable object."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def method(self, x):
        """The same."""
        return x * self.factor


@dataclass
class Config:
    """Settings."""

    alpha: float = 2.0


def scaled(factor):
    """A function of one number."""
    return lambda x: x * factor


#: Statements that define ``f`` in a function, whose variables are closure variables, and the change.
CLOSURES = {
    "variable": ("factor = 2.0; f = lambda x: x * factor", "nonlocal factor; factor = 3.0"),
    "cell": ("f = scaled(2.0)", "f.__closure__[0].cell_contents = 3.0"),
    "list element": ("weights = [1.0, 2.0]; f = lambda x: x * weights[1]", "weights[1] = 5.0"),
    "nested dictionary": ("settings = {'a': {'b': [1.0]}}; f = lambda x: x * settings['a']['b'][0]",
    "settings['a']['b'][0] = 2.0"),
    "of a nested function": ("factor = 2.0\ndef f(x): return (lambda y: (lambda z: z * factor)(y))(x)",
    "nonlocal factor; factor = 3.0"),
    "of a comprehension": ("factor = 2.0; f = lambda x: [x * factor * n for n in range(3)]", "nonlocal factor; factor = 3.0"),
    "of a generator": ("factor = 2.0; f = lambda x: sum(x * factor * n for n in range(3))", "nonlocal factor; factor = 3.0"),
    # the nested function's variable is a local one; the closure variable is only read outside
    "name of a local variable": (
        "factor = 2.0\ndef outer(x): return x * factor\n"
        "def f(x):\n  def inner():\n    factor = outer(x)\n    return (lambda: factor)()\n  return inner()",
        "nonlocal factor; factor = 3.0"),
    # defaults, attributes and code of functions
    "default": ("def f(x, factor=2.0): return x * factor", "f.__defaults__ = (3.0,)"),
    "keyword default": ("def f(x, *, factor=2.0): return x * factor", "f.__kwdefaults__ = {'factor': 3.0}"),
    "keyword default in place": ("def f(x, *, factor=2.0): return x * factor", "f.__kwdefaults__['factor'] = 3.0"),
    "mutable default": ("def f(x, factors=[2.0]): return x * factors[0]", "f.__defaults__[0][0] = 3.0"),
    "code": ("def f(x): return 2 * x", "f.__code__ = (lambda x: 3 * x).__code__"),
    "code of a helper": ("def g(x): return 2 * x\nf = lambda x: g(x)", "g.__code__ = (lambda x: 3 * x).__code__"),
    "default of a helper": ("def g(x, factor=2.0): return factor * x\nf = lambda x: g(x)", "g.__defaults__ = (3.0,)"),
    "attribute of a helper with another name": (
        "def g(x): return x\ng.alpha = 2.0\ndef f(x):\n  same = g\n  return x * same.alpha", "g.alpha = 3.0"),
    "decorated function": (
        "g = scaled(2.0)\n@functools.wraps(g)\ndef f(*args): return 1 + g(*args)", "g.__closure__[0].cell_contents = 3.0"),
    "partial keywords": ("f = functools.partial(lambda x, factor: x * factor, factor=2.0)", "f.keywords['factor'] = 3.0"),
    "partial function": ("g = scaled(2.0); f = functools.partial(g)", "g.__closure__[0].cell_contents = 3.0"),
    # attributes of objects, classes and modules
    "attribute": ("config = SimpleNamespace(alpha=2.0); f = lambda x: x * config.alpha", "config.alpha = 3.0"),
    "attribute of an attribute": (
        "config = SimpleNamespace(model=SimpleNamespace(alpha=2.0)); f = lambda x: x * config.model.alpha",
        "config.model = SimpleNamespace(alpha=3.0)"),
    "field of a dataclass": ("config = Config(); f = lambda x: x * config.alpha", "config.alpha = 3.0"),
    "attribute that hides that of the class": (
        "class S: alpha = 2.0\ns = S(); f = lambda x: x * s.alpha", "s.alpha = 3.0"),
    "attribute of the class of an object": (
        "class S: alpha = 2.0\ns = type('Derived', (S,), {})(); f = lambda x: x * s.alpha", "S.alpha = 3.0"),
    "attribute of a class": ("class S: alpha = 2.0\nf = lambda x: x * S.alpha", "S.alpha = 3.0"),
    "slot": ("class S: __slots__ = ('alpha',)\ns = S(); s.alpha = 2.0; f = lambda x: x * s.alpha", "s.alpha = 3.0"),
    "property": (
        "values = [2.0]\nclass S: alpha = property(lambda self: values[0])\ns = S(); f = lambda x: x * s.alpha",
        "values[0] = 3.0"),
    "property that is added": (
        "class S: pass\ns = S(); s.alpha = 2.0; f = lambda x: x * s.alpha", "S.alpha = property(lambda self: 3.0)"),
    "computed attribute": (
        "values = [2.0]\nclass S:\n  def __getattr__(self, name): return values[0]\ns = S(); f = lambda x: x * s.alpha",
        "values[0] = 3.0"),
    "intercepted attribute": (
        "values = [2.0]\nclass S:\n  alpha = 2.0\n  def __getattribute__(self, name): return values[0]\n"
        "s = S(); f = lambda x: x * s.alpha", "values[0] = 3.0"),
    # the attribute belongs to the object that is loaded last, or to another one
    "attribute of either object": (
        "one, other = SimpleNamespace(alpha=2.0), SimpleNamespace(alpha=5.0); f = lambda x: x * (one if x > 0 else other).alpha",
        "one.alpha = 3.0"),
    "attribute of a local variable": (
        "config = SimpleNamespace(alpha=2.0)\ndef f(x):\n  local = config\n  return x * local.alpha", "config.alpha = 3.0"),
    "attribute of an element": (
        "configs = [SimpleNamespace(alpha=2.0)]; f = lambda x: x * configs[0].alpha", "configs[0].alpha = 3.0"),
    "attribute by getattr": (
        "config = SimpleNamespace(alpha=2.0); f = lambda x: x * getattr(config, 'al' + 'pha')", "config.alpha = 3.0"),
    "attribute of a module": ("m = types.ModuleType('m'); m.alpha = 2.0; f = lambda x: x * m.alpha", "m.alpha = 3.0"),
    "function of a module": ("m = types.ModuleType('m'); m.exp = np.exp; f = lambda x: m.exp(x)", "m.exp = lambda x: 2 * x"),
    "module in a package": (
        "p = types.ModuleType('p'); m = p.m = types.ModuleType('p.m'); m.alpha = 2.0; f = lambda x: x * p.m.alpha",
        "m.alpha = 3.0"),
    "computed attribute of a module": (
        "m, values = types.ModuleType('m'), [2.0]; m.__getattr__ = lambda name: values[0]; f = lambda x: x * m.alpha",
        "values[0] = 3.0"),
    "module in a local variable": (
        "m = types.ModuleType('m'); m.alpha = 2.0\ndef f(x):\n  local = m\n  return x * local.alpha", "m.alpha = 3.0"),
    "module as a default": ("m = types.ModuleType('m'); m.alpha = 2.0\ndef f(x, s=m): return x * s.alpha", "m.alpha = 3.0"),
    # objects that compute, and state
    "callable object": ("f = Factor(2.0)", "f.factor = 3.0"),
    "method": ("owner = Factor(2.0); f = owner.method", "owner.factor = 3.0"),
    "method of a closure variable": ("owner = Factor(2.0); f = lambda x: owner.method(x)", "owner.factor = 3.0"),
    "method of a class": (
        "class S: make = staticmethod(lambda x: 2.0 * x)\nf = lambda x: S.make(x)", "S.make = staticmethod(lambda x: 3.0 * x)"),
    "elements of an array": ("table = np.array([2.0, 1.0]); f = lambda x: x * table[0]", "table[0] = 3.0"),
    "array of one element": ("factor = np.array(2.0); f = lambda x: x * factor", "factor.fill(3.0)"),
    "iterator": ("numbers = itertools.count(); f = lambda x: x * next(numbers)", "pass"),
    "own state": ("count = 0\ndef f(x):\n  nonlocal count\n  count += 1\n  return x * count", "pass"),
    "random number": ("f = lambda x: x * random.random()", "pass"),
    "random number of NumPy": ("f = lambda x: x * np.random.standard_normal()", "pass"),
    "clock": ("f = lambda x: x + time.perf_counter()", "pass"),
    "import in the function": (
        "m = types.ModuleType('m'); m.alpha = 2.0\ndef f(x):\n  import sys\n"
        "  return x * sys.modules['x'].alpha if 'x' in sys.modules else x * m.alpha", "m.alpha = 3.0"),
    "memorized results": (
        "g = scaled(2.0); f = functools.cache(g)", "f.cache_clear(); g.__closure__[0].cell_contents = 3.0"),
    "vectorized function": (  # it has the type of NumPy's functions
        "values = [2.0]; g = np.frompyfunc(lambda x: values[0] * x, 1, 1); f = lambda x: g(x)", "values[0] = 3.0"),
}  # fmt: skip
#: Operands above 255 need an additional instruction, which is then the target of the jump.
MANY_NAMES = "; ".join(f"x.v{n}" for n in range(300))
#: A generator's frame, or the attribute of another object with this name.
EITHER_FRAME = "((y for y in ()) if x > 0 else other).gi_frame.f_globals['alpha']"
FRAMES = "other = SimpleNamespace(gi_frame=SimpleNamespace(f_globals={'alpha': 5.0}))\nalpha = 2.0"
#: The same with global variables.
GLOBALS = {
    "global number": ("alpha = 2.0\ndef f(x): return x * alpha", "alpha = 3.0"),
    "global of a nested function": ("alpha = 2.0\ndef f(x): return [y * alpha for y in (lambda: (x * alpha,))()]",
    "alpha = 3.0"),
    "global function": ("def g(x): return x\ndef f(x): return g(x)", "g = lambda x: 2 * x"),
    "global of a global function": ("alpha = 2.0\ndef g(x): return x * alpha\ndef f(x): return g(x)", "alpha = 3.0"),
    "global that hides a builtin": ("def f(x): return abs(x)", "abs = lambda x: x - 1"),
    "global that no longer hides a builtin": ("pow = min\ndef f(x): return pow(x, 3)", "del pow"),
    "builtin": ("__builtins__ = dict(vars(builtins))\ndef make():\n  exec('def f(x): return abs(x)', globals())\nmake()",
                "__builtins__['abs'] = lambda x: x - 1"),
    "global module": ("def f(x): return np.exp(x)", "np = math"),
    "recursive function": ("alpha = 2.0\ndef f(x, n=3): return x if n == 0 else f(x * alpha, n - 1)", "alpha = 3.0"),
    "mutually recursive functions": (
        "alpha = 2.0\ndef f(x, n=3): return x if n == 0 else g(x, n - 1)\n"
        "def g(x, n): return x if n == 0 else f(alpha * x, n - 1)", "alpha = 3.0"),
    "own attribute": ("def f(x): return x * f.alpha\nf.alpha = 2.0", "f.alpha = 3.0"),
    "named tuple": ("Pair = collections.namedtuple('Pair', 'alpha')\npair = Pair(2.0)\ndef f(x): return x * pair.alpha",
                    "pair = Pair(3.0)"),
    "global state": ("n = 1\ndef f(x):\n  global n\n  n += 1\n  return x * n", "pass"),
    # through an attribute that is not seen
    "globals of a helper": ("alpha = 2.0\ndef g(): pass\ndef f(x):\n  h = g\n  return x * h.__globals__['alpha']",
    "alpha = 3.0"),
    "globals in a format": ("alpha = 2.0\ndef g(): pass\ndef f(x): return '{0.__globals__[alpha]}'.format(g)", "alpha = 3.0"),
    "globals in the format of str": (
        "alpha = 2.0\ndef g(): pass\ndef f(x): return str.format('{0.__globals__[alpha]}', g)", "alpha = 3.0"),
    "globals of a frame": ("alpha = 2.0\ndef f(x): return x * (x for y in ()).gi_frame.f_globals['alpha']", "alpha = 3.0"),
    "globals in a pattern": (
        "alpha = 2.0\ndef g(): pass\ndef f(x):\n  match g:\n    case object(__globals__=found):\n      return found['alpha']",
        "alpha = 3.0"),
    "frame of either object": (f"{FRAMES}\ndef f(x): return x * {EITHER_FRAME}", "alpha = 3.0"),
    "frame after very many names": (
        f"{FRAMES}\ndef f(x):\n  if x is None: {MANY_NAMES}\n  return x * {EITHER_FRAME}", "alpha = 3.0"),
    "looked up in globals": ("alpha = 2.0\ndef f(x): return x * globals()['alpha']", "alpha = 3.0"),
    "evaluated text": ("alpha = 2.0\ndef f(x): return eval('x * alpha', globals(), {'x': x})", "alpha = 3.0"),
}  # fmt: skip


@functools.cache
def compiled(code):
    """Code is compiled once, so that functions that are created again have the same code object."""
    return compile(code, "row", "exec")


def made(name):
    """The function of a row, and its change."""
    known = (builtins, collections, functools, itertools, math, random, time, types)
    names = {x.__name__: x for x in (*known, SimpleNamespace, Config, Factor, scaled)} | {"np": np}
    if name in GLOBALS:
        setup, change = GLOBALS[name]
        exec(compiled(setup), names)
        return names["f"], lambda: exec(compiled(change), names)
    setup, change = CLOSURES[name]
    body = f"{setup}\ndef change():\n  {change}\nreturn f, change"
    exec(compiled(f"def make():\n{textwrap.indent(body, '  ')}"), names)
    return names["make"]()


def outcome(function):
    """What a function returns for some numbers, as text; -0.0 and 0.0, 1 and 1.0 differ."""
    return [repr(function(x)) for x in (1.5, -2.0)]


@pytest.mark.parametrize("name", [*CLOSURES, *GLOBALS])
def test_a_change_of_what_a_function_computes(name):
    """Another identity, or none; the original identity if the change did nothing yet."""
    function, apply = made(name)
    before = identity(function)
    assert before == identity(function)
    computed = outcome(function)
    assert identity(function) == before, "calling the function changed its identity"
    apply()
    assert outcome(function) != computed, "the row has no effect"
    after = identity(function)
    assert before is None or after != before


#: The rows whose functions need not be traced again until they change.
IDENTIFIED = [
    "variable", "list element", "nested dictionary", "of a nested function", "of a comprehension", "of a generator", "default",
    "keyword default", "code", "decorated function", "partial keywords", "attribute", "attribute of an attribute",
    "field of a dataclass", "attribute of the class of an object", "attribute of a class", "slot", "attribute of a module",
    "module in a package", "global number", "global function", "global that hides a builtin", "recursive function",
    "mutually recursive functions", "own attribute", "named tuple",
]  # fmt: skip


@pytest.mark.parametrize("name", IDENTIFIED)
def test_common_functions_have_an_identity(name):
    """It is the same for a function that was created in the same way, if it reads closure variables only."""
    function, _ = made(name)
    assert identity(function) is not None
    if name in ("variable", "list element", "nested dictionary", "of a comprehension", "default", "partial keywords"):
        assert identity(made(name)[0]) == identity(function)


NAMED = {f"{f.name}.{kind}": getattr(f, kind) for f in functions.ZOO for kind in ("score_mod", "mask_mod") if getattr(f, kind)}


def test_functions_of_the_zoo():
    """Each has an identity; functions that are created with equal parameters have equal identities."""
    assert [name for name, function in NAMED.items() if identity(function) is None] == []
    one = [zoo.softcap(2.0), zoo.natten(10, 10, 3), zoo.length_scaled(4), zoo.chunked(8), zoo.dilated(3, 4)]
    same = [zoo.softcap(2.0), zoo.natten(10, 10, 3), zoo.length_scaled(4), zoo.chunked(8), zoo.dilated(3, 4)]
    other = [zoo.softcap(2.5), zoo.natten(10, 10, 5), zoo.length_scaled(5), zoo.chunked(9), zoo.dilated(4, 3)]
    assert [identity(f) for f in one] == [identity(f) for f in same]
    assert len({identity(f) for f in [*one, *other]}) == 10


def test_arguments_may_be_used_in_any_way():
    """Attributes of traced values and arrays do not change."""
    assert identity(lambda s, b, h, i, j, table: s + table[h] * table.shape[0] * (table.dtype.kind == "f")) is not None


def test_functions_of_scipy_have_identities(monkeypatch):
    """They are NumPy ufuncs that depend on their arguments only; other ufuncs may not be."""
    function = np.frompyfunc(lambda x: x, 1, 1)
    assert identity(scaled(function)) is None
    monkeypatch.setitem(sys.modules, "scipy.special", SimpleNamespace(**{function.__name__: function}))
    assert identity(scaled(function)) is not None


def test_functions_without_an_identity():
    """Very many numbers, a list that contains itself, and a variable that is not assigned, where the function would raise."""
    endless = []
    endless.append(endless)

    def make():
        def function():
            return later

        if function is None:
            later = 1
        return function

    missing = made("global number")[0]
    del missing.__globals__["alpha"]
    for function in (scaled(list(range(1000))), scaled(endless), make(), missing):
        assert identity(function) is None
    assert identity(scaled(list(range(10)))) is not None


def test_the_number_of_analyzed_functions_is_bounded():
    """Functions that are defined again and again do not fill memory, and old identities stay different from new ones."""
    code, count = "def f(x): return 2 * x", module.MAX_CODES + 50
    kept = set()
    for _ in range(count):
        exec(code, names := {})
        kept.add(identity(names["f"]))
    assert len(kept) == count
    assert len(module._analyzed) <= module.MAX_CODES


#: Values of which some are equal numbers of different types, or equal texts of different containers.
VALUES: tuple[object, ...] = (
    None, True, 1, 1.0, 0, 0.0, -0.0, math.nan, math.inf, -math.inf, 1 << 70, 1 << 71, "1", "", "a", "b",
    np.float64(1.0), np.float32(1), np.float32(0.0), np.float32(-0.0), np.int32(0), np.int32(1), np.int64(1),
    [1], (1,), [[1]], [1, 1], (1, (1,)), [1, [2]], [1, [3]], (1, 2), (1, 2.0), (), ((),), ((1,), 2), ((1, 2),), (0.0,), (-0.0,),
    {}, {"1": 1}, {"1": [1]}, {"a": 1}, {"a": 2}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {1}, frozenset({1}),
    np.tanh, np.sinh, np.where, np.clip, abs, max, math.sin, math.cos, float, int, np.float16, np.float32, scaled(1.0), scaled(2.0),
    functools.partial(scaled(1.0)),
)  # fmt: skip


def test_identities_are_equal_exactly_if_the_values_are():
    """Two closure variables and a default: no value can stand for another, alone or together with its neighbours."""

    def made(x, y, z):
        return identity(lambda s, w=z: (x, y, s, w))

    for x in VALUES:
        assert identity(scaled(x)) == identity(scaled(x))
        assert hash(identity(scaled(x))) == hash(identity(scaled(x)))
    assert identity(scaled(math.nan)) == identity(scaled(float("nan")))
    kept = [made(x, y, z) for x, y in itertools.product(VALUES, repeat=2) for z in (None, x, (x, y))]
    assert None not in kept
    assert len({*kept}) == len(kept) - len(VALUES)  # z is None twice where x is
