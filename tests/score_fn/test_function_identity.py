"""The identity of functions: it changes with everything that changes what a function computes, and with nothing else.

Every case of :data:`CHANGES` returns a function and a change. The change must have an effect on the result; then the identities
before and after must differ, or there must be none.
"""

import builtins
import collections
import functools
import itertools
import json
import math
import random
import re
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

import functions
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_sdpa import zoo
from cupy_sdpa.score_fn import identity as module
from cupy_sdpa.score_fn.identity import identity

CHANGES: dict = {}


def change(case):
    """Add a case: a function that returns a function and the change to apply."""
    CHANGES[case.__name__] = case
    return case


def defined(code, **variables):
    """The function ``f`` that code defines, and its globals."""
    namespace = {"np": np, "math": math, **variables}
    exec(code, namespace)
    return namespace["f"], namespace


def changed_cell(function, value, index=0):
    """A change that assigns a closure variable of a function."""

    def apply():
        function.__closure__[index].cell_contents = value

    return apply


def scaled(factor):
    """A function of one number."""
    return lambda x: x * factor


# Closures


@change
def closure_variable():
    function = scaled(2.0)
    return function, changed_cell(function, 3.0)


@change
def closure_variable_by_nonlocal():
    factor = 2.0

    def function(x):
        return x * factor

    def apply():
        nonlocal factor
        factor = 3.0

    return function, apply


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), (0.0, -0.0), (1.0, np.float64(1.0)), (np.float32(1), np.float64(1)), (np.int32(1), np.int64(1)),
        (np.int32(0), np.float32(0)),
        (math.nan, 0.0), (np.float32(0.0), np.float32(-0.0)), ("a", "b"), (None, 0), ((1, 2), (1, 2.0)), ([1], (1,)), ([1, [2]], [1, [3]]),
        ({"a": 1}, {"a": 2}), ({"a": 1, "b": 1}, {"b": 1, "a": 1}), ({1}, frozenset({1})), ((), ((),)), (((1,), 2), ((1, 2),)),
        (np.tanh, np.sinh), (abs, max), (math.sin, math.cos), (scaled(1.0), scaled(2.0)), (float, int), (np.float32, np.float16),
        (np.where, np.clip), (functools.partial(scaled(1.0)), scaled(1.0)), (1 << 70, 1 << 71), (np.inf, -np.inf), ((0.0,), (-0.0,)),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],  # an address differs between the processes that run the tests
)  # fmt: skip
def test_values_that_are_told_apart(one, other):
    """Equal numbers of different types and equal texts of different containers are different values."""
    first, second = scaled(one), scaled(other)
    assert None not in (identity(first), identity(second))
    assert identity(first) != identity(second)
    assert identity(first) == identity(scaled(one))
    assert hash(identity(first)) == hash(identity(scaled(one)))


def test_nan_is_equal_to_itself():
    """Otherwise every call with NaN would be a new one."""
    assert identity(scaled(float("nan"))) == identity(scaled(float("nan")))


@change
def closure_list_element():
    weights = [1.0, 2.0]
    return (lambda x: x * weights[1]), lambda: weights.__setitem__(1, 5.0)


@change
def closure_nested_dictionary():
    settings = {"a": {"b": [1.0]}}
    return (lambda x: x * settings["a"]["b"][0]), lambda: settings["a"]["b"].append(settings["a"]["b"].pop() + 1)


@change
def closure_of_a_nested_function():
    factor = 2.0

    def function(x):
        def inner(y):
            return (lambda z: z * factor)(y)

        return inner(x)

    return function, changed_cell(function, 3.0)


@change
def closure_of_a_comprehension():
    factor = 2.0

    def function(x):
        return [x * factor * n for n in range(3)]

    return function, changed_cell(function, 3.0)


@change
def closure_of_a_generator_expression():
    factor = 2.0

    def function(x):
        return sum(x * factor * n for n in range(3))

    return function, changed_cell(function, 3.0)


@change
def closure_variable_with_the_name_of_a_local_one():
    """The nested function's variable is a local one; the closure variable is only read outside."""
    factor = 2.0

    def outer(x):
        return x * factor

    def function(x):
        def inner():
            factor = outer(x)
            return (lambda: factor)()

        return inner()

    return function, changed_cell(outer, 3.0)


# Globals and builtins


@change
def global_number():
    function, names = defined("alpha = 2.0\ndef f(x): return x * alpha")
    return function, lambda: names.update(alpha=3.0)


@change
def global_of_a_nested_function():
    function, names = defined("alpha = 2.0\ndef f(x): return [y * alpha for y in (lambda: (x * alpha,))()]")
    return function, lambda: names.update(alpha=3.0)


@change
def global_function():
    function, names = defined("def g(x): return x\ndef f(x): return g(x)")
    return function, lambda: names.update(g=lambda x: 2 * x)


@change
def global_of_a_global_function():
    function, names = defined("alpha = 2.0\ndef g(x): return x * alpha\ndef f(x): return g(x)")
    return function, lambda: names.update(alpha=3.0)


@change
def global_that_hides_a_builtin():
    function, names = defined("def f(x): return abs(x)")
    return function, lambda: names.update(abs=lambda x: x - 1)


@change
def global_that_no_longer_hides_a_builtin():
    function, names = defined("abs = max\ndef f(x): return abs(x, -x, 100)")
    names["pow"] = min
    function, names = defined("def f(x): return pow(x, 3)", pow=min)
    return function, lambda: names.pop("pow")


@change
def builtin():
    function, names = defined("def f(x): return abs(x)", __builtins__=dict(vars(builtins)))
    return function, lambda: names["__builtins__"].update(abs=lambda x: x - 1)


@change
def global_module():
    function, names = defined("def f(x): return np.exp(x)")
    return function, lambda: names.update(np=math)


@change
def recursive_function():
    function, names = defined("alpha = 2.0\ndef f(x, n=3): return x if n == 0 else f(x * alpha, n - 1)")
    return function, lambda: names.update(alpha=3.0)


@change
def mutually_recursive_functions():
    function, names = defined(
        "def f(x, n=3): return x if n == 0 else g(x, n - 1)\ndef g(x, n): return x if n == 0 else f(alpha * x, n - 1)",
        alpha=2.0,
    )
    return function, lambda: names.update(alpha=3.0)


# Defaults, attributes and code of functions


@change
def default():
    def function(x, factor=2.0):
        return x * factor

    return function, lambda: setattr(function, "__defaults__", (3.0,))


@change
def keyword_default():
    def function(x, *, factor=2.0):
        return x * factor

    return function, lambda: setattr(function, "__kwdefaults__", {"factor": 3.0})


@change
def keyword_default_in_place():
    def function(x, *, factor=2.0):
        return x * factor

    return function, lambda: function.__kwdefaults__.update(factor=3.0)


@change
def mutable_default():
    def function(x, factors=[2.0]):  # noqa: B006
        return x * factors[0]

    return function, lambda: function.__defaults__[0].__setitem__(0, 3.0)


@change
def code():
    def function(x):
        return 2 * x

    return function, lambda: setattr(function, "__code__", (lambda x: 3 * x).__code__)


@change
def code_of_a_helper():
    def helper(x):
        return 2 * x

    return (lambda x: helper(x)), lambda: setattr(helper, "__code__", (lambda x: 3 * x).__code__)


@change
def default_of_a_helper():
    def helper(x, factor=2.0):
        return factor * x

    return (lambda x: helper(x)), lambda: setattr(helper, "__defaults__", (3.0,))


@change
def own_attribute():
    function, _ = defined("def f(x): return x * f.alpha\nf.alpha = 2.0")
    return function, lambda: setattr(function, "alpha", 3.0)


@change
def attribute_of_a_helper_with_another_name():
    def helper(x):
        return x

    helper.alpha = 2.0

    def function(x):
        same = helper
        return x * same.alpha

    return function, lambda: setattr(helper, "alpha", 3.0)


@change
def decorated_function():
    def decorated(function):
        @functools.wraps(function)
        def wrapper(*args):
            return 1 + function(*args)

        return wrapper

    inner = scaled(2.0)
    return decorated(inner), changed_cell(inner, 3.0)


@change
def partial_keywords():
    function = functools.partial(lambda x, factor: x * factor, factor=2.0)
    return function, lambda: function.keywords.update(factor=3.0)


@change
def partial_function():
    inner = scaled(2.0)
    return functools.partial(inner), changed_cell(inner, 3.0)


@change
def globals_of_a_helper():
    """Through an attribute that is not seen."""
    function, names = defined("def g(): pass\ndef f(x):\n  h = g\n  return x * h.__globals__['alpha']", alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def globals_in_a_format():
    function, names = defined("def g(): pass\ndef f(x): return '{0.__globals__[alpha]}'.format(g)", alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def globals_in_the_format_of_str():
    function, names = defined("def g(): pass\ndef f(x): return str.format('{0.__globals__[alpha]}', g)", alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def globals_of_a_frame():
    function, names = defined("def f(x): return x * (x for y in ()).gi_frame.f_globals['alpha']", alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def globals_in_a_pattern():
    function, names = defined(
        "def g(): pass\ndef f(x):\n  match g:\n    case object(__globals__=found):\n      return found['alpha']", alpha=2.0
    )
    return function, lambda: names.update(alpha=3.0)


# Attributes of objects, classes and modules


@change
def attribute_of_an_object():
    config = types.SimpleNamespace(alpha=2.0)
    return (lambda x: x * config.alpha), lambda: setattr(config, "alpha", 3.0)


@change
def attribute_of_an_attribute():
    config = types.SimpleNamespace(model=types.SimpleNamespace(alpha=2.0))
    return (lambda x: x * config.model.alpha), lambda: setattr(config, "model", types.SimpleNamespace(alpha=3.0))


@dataclass
class Config:
    """Settings."""

    alpha: float = 2.0
    scale: float = 1.0


@change
def field_of_a_dataclass():
    config = Config()
    return (lambda x: x * config.alpha), lambda: setattr(config, "alpha", 3.0)


@change
def attribute_that_hides_that_of_the_class():
    class Settings:
        alpha = 2.0

    settings = Settings()
    return (lambda x: x * settings.alpha), lambda: setattr(settings, "alpha", 3.0)


@change
def attribute_of_the_class_of_an_object():
    class Settings:
        alpha = 2.0

    settings = type("Derived", (Settings,), {})()
    return (lambda x: x * settings.alpha), lambda: setattr(Settings, "alpha", 3.0)


@change
def attribute_of_a_class():
    class Settings:
        alpha = 2.0

    return (lambda x: x * Settings.alpha), lambda: setattr(Settings, "alpha", 3.0)


@change
def slot():
    class Settings:
        __slots__ = ("alpha",)

    settings = Settings()
    settings.alpha = 2.0
    return (lambda x: x * settings.alpha), lambda: setattr(settings, "alpha", 3.0)


@change
def property_of_an_object():
    class Settings:
        alpha = property(lambda self: values[0])

    settings, values = Settings(), [2.0]
    return (lambda x: x * settings.alpha), lambda: values.__setitem__(0, 3.0)


@change
def property_that_is_added():
    class Settings:
        pass

    settings = Settings()
    settings.alpha = 2.0
    return (lambda x: x * settings.alpha), lambda: setattr(Settings, "alpha", property(lambda self: 3.0))


@change
def computed_attribute():
    class Settings:
        def __getattr__(self, name):
            return values[0]

    settings, values = Settings(), [2.0]
    return (lambda x: x * settings.alpha), lambda: values.__setitem__(0, 3.0)


@change
def intercepted_attribute():
    class Settings:
        alpha = 2.0

        def __getattribute__(self, name):
            return values[0]

    settings, values = Settings(), [2.0]
    return (lambda x: x * settings.alpha), lambda: values.__setitem__(0, 3.0)


@change
def attribute_of_either_object():
    """The attribute belongs to the object that is loaded last, or to another one."""
    one, other = types.SimpleNamespace(alpha=2.0), types.SimpleNamespace(alpha=5.0)
    return (lambda x: x * (one if x > 0 else other).alpha), lambda: setattr(one, "alpha", 3.0)


@change
def attribute_of_a_local_variable():
    config = types.SimpleNamespace(alpha=2.0)

    def function(x):
        local = config
        return x * local.alpha

    return function, lambda: setattr(config, "alpha", 3.0)


@change
def attribute_of_an_element():
    configs = [types.SimpleNamespace(alpha=2.0)]
    return (lambda x: x * configs[0].alpha), lambda: setattr(configs[0], "alpha", 3.0)


OTHER_FRAME = types.SimpleNamespace(gi_frame=types.SimpleNamespace(f_globals={"alpha": 5.0}))


@change
def frame_of_either_object():
    """The attribute may belong to a generator, although it follows the load of another object."""
    code = "def f(x): return x * ((y for y in ()) if x > 0 else other).gi_frame.f_globals['alpha']"
    function, names = defined(code, other=OTHER_FRAME, alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def frame_after_very_many_names():
    """Operands above 255 need an additional instruction, which is then the target of the jump."""
    names = "; ".join(f"x.v{n}" for n in range(300))
    code = f"def f(x):\n  if x is None: {names}\n  return x * ((y for y in ()) if x > 0 else other).gi_frame.f_globals['alpha']"
    function, names = defined(code, other=OTHER_FRAME, alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def attribute_of_a_module():
    module = types.ModuleType("settings")
    module.alpha = 2.0
    return (lambda x: x * module.alpha), lambda: setattr(module, "alpha", 3.0)


@change
def function_of_a_module():
    module = types.ModuleType("own")
    module.exp = np.exp
    return (lambda x: module.exp(x)), lambda: setattr(module, "exp", lambda x: 2 * x)


@change
def module_in_a_package():
    package, module = types.ModuleType("package"), types.ModuleType("package.settings")
    package.settings, module.alpha = module, 2.0
    return (lambda x: x * package.settings.alpha), lambda: setattr(module, "alpha", 3.0)


@change
def computed_attribute_of_a_module():
    module = types.ModuleType("settings")
    values = [2.0]
    module.__getattr__ = lambda name: values[0]
    return (lambda x: x * module.alpha), lambda: values.__setitem__(0, 3.0)


@change
def module_in_a_local_variable():
    module = types.ModuleType("settings")
    module.alpha = 2.0

    def function(x):
        local = module
        return x * local.alpha

    return function, lambda: setattr(module, "alpha", 3.0)


@change
def module_as_a_default():
    module = types.ModuleType("settings")
    module.alpha = 2.0
    return (lambda x, settings=module: x * settings.alpha), lambda: setattr(module, "alpha", 3.0)


@change
def named_tuple():
    pair = collections.namedtuple("Pair", "alpha beta")
    function, names = defined("def f(x): return x * pair.alpha", pair=pair(2.0, 1.0))
    return function, lambda: names.update(pair=pair(3.0, 1.0))


# Objects that compute, and state


class Callable:
    """A callable object."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def method(self, x):
        """The same."""
        return x * self.factor


@change
def callable_object():
    function = Callable(2.0)
    return function, lambda: setattr(function, "factor", 3.0)


@change
def method():
    owner = Callable(2.0)
    return owner.method, lambda: setattr(owner, "factor", 3.0)


@change
def method_of_a_closure_variable():
    owner = Callable(2.0)
    return (lambda x: owner.method(x)), lambda: setattr(owner, "factor", 3.0)


@change
def method_of_a_class():
    class Factory:
        @staticmethod
        def make(x):
            return 2.0 * x

    return (lambda x: Factory.make(x)), lambda: setattr(Factory, "make", staticmethod(lambda x: 3.0 * x))


@change
def elements_of_an_array():
    table = np.array([2.0, 1.0])
    return (lambda x: x * table[0]), lambda: table.__setitem__(0, 3.0)


@change
def array_of_one_element():
    factor = np.array(2.0)
    return (lambda x: x * factor), lambda: factor.fill(3.0)


@change
def iterator():
    numbers = itertools.count()
    return (lambda x: x * next(numbers)), lambda: None


@change
def own_state():
    """The function itself changes a closure variable."""
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return x * count

    return function, lambda: None


@change
def global_state():
    function, _ = defined("def f(x):\n  global n\n  n += 1\n  return x * n", n=1)
    return function, lambda: None


@change
def random_number():
    return (lambda x: x * random.random()), lambda: None


@change
def numpys_random_number():
    return (lambda x: x * np.random.standard_normal()), lambda: None


@change
def clock():
    return (lambda x: x + time.perf_counter()), lambda: None


@change
def imported_in_the_function():
    module = types.ModuleType("settings_of_a_test")
    module.alpha = 2.0

    def function(x):
        import sys

        return x * sys.modules["x"].alpha if "x" in sys.modules else x * module.alpha

    return function, lambda: setattr(module, "alpha", 3.0)


@change
def looked_up_in_globals():
    function, names = defined("def f(x): return x * globals()['alpha']", alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def evaluated_text():
    function, names = defined("def f(x): return eval('x * alpha', globals(), {'x': x})", alpha=2.0)
    return function, lambda: names.update(alpha=3.0)


@change
def attribute_by_getattr():
    config = types.SimpleNamespace(alpha=2.0)
    return (lambda x: x * getattr(config, "al" + "pha")), lambda: setattr(config, "alpha", 3.0)


@change
def memorized_results():
    inner = scaled(2.0)
    cached = functools.cache(inner)

    def apply():
        cached.cache_clear()
        inner.__closure__[0].cell_contents = 3.0

    return cached, apply


@change
def vectorized_function():
    """Its type is that of NumPy's functions."""
    values = [2.0]
    function = np.frompyfunc(lambda x: values[0] * x, 1, 1)
    return (lambda x: function(x)), lambda: values.__setitem__(0, 3.0)


def outcome(function):
    """What a function returns for some numbers, as text; -0.0 and 0.0, 1 and 1.0 differ."""
    return [repr(function(x)) for x in (1.5, -2.0)]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_a_function_computes(name):
    """Another identity, or none; the original identity if the change did nothing yet."""
    function, apply = CHANGES[name]()
    before = identity(function)
    assert before == identity(function)
    computed = outcome(function)
    assert identity(function) == before, "calling the function changed its identity"
    apply()
    assert outcome(function) != computed, "the case has no effect"
    after = identity(function)
    assert before is None or after != before


#: The cases whose functions need not be traced again until they change.
IDENTIFIED = [
    "closure_variable", "closure_list_element", "closure_nested_dictionary", "closure_of_a_nested_function",
    "closure_of_a_comprehension", "closure_of_a_generator_expression", "global_number", "global_function",
    "global_that_hides_a_builtin", "recursive_function", "mutually_recursive_functions", "default", "keyword_default", "code",
    "own_attribute", "decorated_function", "partial_keywords", "attribute_of_an_object", "attribute_of_an_attribute",
    "field_of_a_dataclass", "attribute_of_the_class_of_an_object", "attribute_of_a_class", "slot", "attribute_of_a_module",
    "module_in_a_package", "named_tuple",
]  # fmt: skip


@pytest.mark.parametrize("name", IDENTIFIED)
def test_common_functions_have_an_identity(name):
    """Two functions that were created in the same way have the same identity, if their code is the same object."""
    function, _ = CHANGES[name]()
    assert identity(function) is not None
    if not hasattr(function, "__globals__") or function.__globals__ is globals():
        assert identity(CHANGES[name]()[0]) == identity(function)


def test_the_oracle_bites(monkeypatch):
    """An identity without the values of closure variables is found out by the cases above."""
    functions.without_closure_values(monkeypatch)
    for name in ("closure_variable", "closure_list_element", "attribute_of_an_object", "array_of_one_element"):
        with pytest.raises(AssertionError):
            test_a_change_of_what_a_function_computes(name)


NAMED = {f"{f.name}.{kind}": getattr(f, kind) for f in functions.ZOO for kind in ("score_mod", "mask_mod") if getattr(f, kind)}


@pytest.mark.parametrize("name", NAMED)
def test_the_zoo_has_identities(name):
    """Every function of the zoo."""
    assert identity(NAMED[name]) is not None


def test_functions_that_are_created_in_every_call():
    """Functions with equal parameters have equal identities, with other parameters they differ."""
    one = [zoo.softcap(2.0), zoo.natten(10, 10, 3), zoo.alibi_by_index(4), zoo.clipped(-1.0, 1.0), zoo.dilated(3, 4)]
    same = [zoo.softcap(2.0), zoo.natten(10, 10, 3), zoo.alibi_by_index(4), zoo.clipped(-1.0, 1.0), zoo.dilated(3, 4)]
    other = [zoo.softcap(2.5), zoo.natten(10, 10, 5), zoo.alibi_by_index(5), zoo.clipped(-1.0, 1), zoo.dilated(4, 3)]
    assert [identity(f) for f in one] == [identity(f) for f in same]
    assert len({identity(f) for f in [*one, *other]}) == 10


def test_functions_of_the_documentation_have_identities():
    """Every function of a page or a notebook that has the arguments of a score or mask function."""
    root = Path(__file__).parents[2]
    texts = [path.read_text(encoding="utf-8") for path in (root / "docs").glob("*.md")]
    for path in (root / "docs" / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = {}
    for text in texts:
        for code in re.findall(r"^def \w+\([^)]*kv_idx[^)]*\):\n(?: .*\n?)+", text, re.MULTILINE):
            exec(code, names := {"np": np})
            found |= {name: value for name, value in names.items() if isinstance(value, types.FunctionType)}
    assert {"closer", "of_one_document", "pull_back"} <= found.keys()
    assert None not in map(identity, found.values())


def test_arguments_may_be_used_in_any_way():
    """Attributes of traced values and arrays do not change."""
    assert identity(lambda s, b, h, i, j, table: s + table[h] * table.shape[0] * (table.dtype.kind == "f")) is not None


def test_functions_of_scipy_have_identities(monkeypatch):
    """They are NumPy ufuncs that depend on their arguments only; other ufuncs may not be."""
    function = np.frompyfunc(lambda x: x, 1, 1)
    special = types.SimpleNamespace(**{function.__name__: function})
    assert identity(scaled(function)) is None
    monkeypatch.setitem(sys.modules, "scipy.special", special)
    monkeypatch.setattr(module, "_PURE", set(module._PURE))
    assert identity(scaled(function)) is not None


def test_large_and_endless_values_have_no_identity():
    """A list of very many numbers, and a list that contains itself."""
    endless = []
    endless.append(endless)
    assert identity(scaled(list(range(1000)))) is None
    assert identity(scaled(endless)) is None
    assert identity(scaled(list(range(10)))) is not None


def test_a_variable_that_is_not_assigned_has_no_identity():
    """The function would raise an exception."""

    def make():
        def function():
            return later

        if function is None:
            later = 1
        return function

    assert identity(make()) is None
    assert identity(defined("def f(): return missing")[0]) is None


def test_the_number_of_analyzed_functions_is_bounded(monkeypatch):
    """Functions that are defined again and again do not fill memory, and old identities stay different from new ones."""
    monkeypatch.setattr(module, "MAX_CODES", 8)
    monkeypatch.setattr(module, "_analyzed", {})
    kept = {identity(defined("def f(x): return 2 * x")[0]) for _ in range(50)}
    assert len(kept) == 50
    assert len(module._analyzed) <= 8


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.floats(width=32).map(np.float32),
    st.integers(0, 9).map(np.int32),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=2)), max_leaves=8
)  # fmt: skip


def exact(value):
    """A text that tells all values apart."""
    if isinstance(value, float | np.floating):
        return f"{type(value)} {value.tobytes() if isinstance(value, np.generic) else np.float64(value).tobytes()}"
    if isinstance(value, list | tuple):
        return f"{type(value)} [{', '.join(map(exact, value))}]"
    if isinstance(value, dict):
        return f"dict {[(key, exact(inner)) for key, inner in value.items()]}"
    return f"{type(value)} {value!r}"


@given(VALUES, VALUES, VALUES)
def test_identities_are_equal_exactly_if_the_values_are(one, two, three):
    """Two closure variables and a default: no value can stand for another, alone or together with its neighbours."""

    def make(x, y, z):
        return lambda s, w=z: (x, y, s, w)

    given_values = (one, two, three), (two, one, three), (one, (two, three), None), (one, two, None)
    for a, b in itertools.combinations(given_values, 2):
        first, second = identity(make(*a)), identity(make(*b))
        assert None not in (first, second)
        assert (first == second) == (exact(a) == exact(b))
