"""The identity of a score or mask function: two functions with equal identities compute the same.

A function is traced by calling it, so what it computes depends on its code and on every value that the code can reach. The
bytecode of each code object is analyzed once: which globals and closure variables it loads, and which attributes of them
(``cfg.alpha``, ``np.where``). At each call the present values are read and become parts of the identity:

- numbers, strings, None and NumPy scalars by type and bits: 1, 1.0 and True differ, and so do 0.0 and -0.0;
- tuples, lists, dictionaries and sets by their elements;
- Python functions by their code, defaults, attributes, and the values that they load, recursively;
- builtins and NumPy functions that depend on their arguments only, by identity;
- recorded functions (:mod:`.recorded`) by identity: equal ones are the same object;
- modules, classes and instances only by the attributes that the code loads from them.

Everything else has no identity: arrays, methods, callable objects, functions that import, store globals or closure variables,
or load an attribute in a way that the analysis cannot follow. Such functions are traced in every call.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
import operator
import struct
import sys
import types
from collections import namedtuple
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

#: The maximum number of parts of an identity; a function that loads more values has no identity.
MAX_PARTS = 256
#: The maximum number of analyzed code objects.
MAX_CODES = 4096


def identity(function: Any) -> Hashable | None:
    """Return a hashable value: as long as it is equal, the function computes the same, apart from side effects.

    None if the function may compute something else in a way that cannot be seen.

    >>> import numpy as np
    >>> def softcap(cap):
    ...     return lambda score, b, h, q_idx, kv_idx: cap * np.tanh(score / cap)
    >>> identity(softcap(2.0)) == identity(softcap(2.0)), identity(softcap(2.0)) == identity(softcap(2))
    (True, False)
    >>> identity(softcap(np.ones(1))) is None
    True
    """
    parts: list[Any] = []
    try:
        _identify(function, parts, ())
    except _UnknownError:
        return None
    return tuple(parts)


class _UnknownError(Exception):
    """A value has no identity."""


# The values that a function can reach

_MISSING, _RECURSIVE = object(), object()
#: Types whose values are compared by ``==``, together with the type.
_EXACT = frozenset({bool, int, str, bytes, type(None), type(...)})
_NUMPY_SCALARS = frozenset({np.bool_, *(np.dtype(code).type for code in "bhilqBHILQefd")})
_CONTAINERS = frozenset({tuple, list, dict, set, frozenset})
_FUNCTION, _PARTIAL, _MODULE = types.FunctionType, functools.partial, types.ModuleType
_float_bits = struct.Struct("d").pack

_BUILTINS = (
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "frozenset", "int", "isinstance", "iter",
    "len", "list", "map", "max", "min", "next", "pow", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum",
    "tuple", "zip",
)  # fmt: skip
_NUMPY_FUNCTIONS = ("arange", "array", "clip", "linspace", "prod", "round", "sum", "where")
#: Callable objects whose results depend on their arguments only.
_PURE: set[Any] = {
    *(getattr(builtins, name) for name in _BUILTINS),
    *(value for value in vars(builtins).values() if isinstance(value, type) and issubclass(value, Exception)),
    *(value for module in (math, operator) for value in vars(module).values() if type(value) is types.BuiltinFunctionType),
    *(value for value in vars(np).values() if type(value) is np.ufunc),
    *(getattr(np, name) for name in _NUMPY_FUNCTIONS),
    *_NUMPY_SCALARS,
    functools.reduce,
}
_PURE_TYPES = frozenset(type(value) for value in _PURE)
#: Types that :func:`_identify` reads completely, in contrast to modules, classes and other instances.
_IDENTIFIED = _EXACT | _NUMPY_SCALARS | _CONTAINERS | {float, _FUNCTION, _PARTIAL} | (_PURE_TYPES - {type})


def _identify(value: Any, parts: list[Any], functions: tuple[Any, ...]) -> None:
    """Append the parts of a value: first its type or another object without an equal, then numbers, texts and further values.

    The parts of a value are never a prefix of another value's parts, so different sequences of values have different parts.
    ``functions`` are those that are being identified, to end recursion. Raises _UnknownError if the value has no identity.
    """
    if len(parts) > MAX_PARTS:
        raise _UnknownError
    kind = type(value)
    if kind is _FUNCTION:
        _identify_function(value, parts, functions)
    elif kind is float:
        parts.append(kind)
        parts.append(value if value and value == value else _float_bits(value))
    elif kind in _EXACT:
        parts.append(kind)
        parts.append(value)
    elif kind in _PURE_TYPES and _is_pure(value):
        parts.append(value)
    elif kind in _NUMPY_SCALARS:
        parts.append(kind)
        parts.append(value.tobytes())
    elif kind in _CONTAINERS:
        parts.append(kind)
        parts.append(len(value))
        for element in value:
            _identify(element, parts, functions)
            if kind is dict:
                _identify(value[element], parts, functions)
    elif kind is _PARTIAL:
        parts.append(kind)
        for part in (value.func, value.args, value.keywords, value.__dict__):
            _identify(part, parts, functions)
    elif getattr(kind, "_is_its_identity", False):  # recorded functions
        parts.append(value)
    else:
        raise _UnknownError


def _is_pure(value: Any) -> bool:
    """True if a callable's results depend on its arguments only; SciPy's functions count once SciPy has been imported."""
    if value in _PURE:
        return True
    special = sys.modules.get("scipy.special")
    if type(value) is np.ufunc and special and getattr(special, value.__name__, None) is value:
        _PURE.add(value)
        return True
    return False


def _identify_function(function: Any, parts: list[Any], functions: tuple[Any, ...]) -> None:
    """Append the parts of a Python function, see :func:`_identify`."""
    if function in functions:
        parts.append(_RECURSIVE)
        parts.append(functions.index(function))
        return
    code = function.__code__
    reads = _analyzed.get(id(code)) or _analyze(code)
    if reads.unknown:
        raise _UnknownError
    parts.append(reads)
    functions = (*functions, function)
    if function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        _identify((function.__defaults__, function.__kwdefaults__, function.__dict__), parts, functions)
    else:
        parts.append(None)
    cells, variables, builtin = function.__closure__, function.__globals__, function.__builtins__
    for index, attributes in reads.cells:
        try:
            value = cells[index].cell_contents
        except ValueError:  # not assigned yet
            raise _UnknownError from None
        _identify(_loaded(value, attributes) if attributes else value, parts, functions)
    if reads.names and not type(variables) is type(builtin) is dict:
        raise _UnknownError
    for name, attributes in reads.names:
        value = variables.get(name, _MISSING)
        if value is _MISSING and (value := builtin.get(name, _MISSING)) is _MISSING:
            raise _UnknownError
        _identify(_loaded(value, attributes) if attributes else value, parts, functions)


def _loaded(value: Any, attributes: Sequence[str]) -> Any:
    """Return the value of ``value.a.b.c``; or an earlier value of the chain, if its parts determine its attributes."""
    for position, name in enumerate(attributes):
        kind = type(value)
        if kind is _MODULE:
            value = vars(value).get(name, _MISSING)
        elif kind in _IDENTIFIED or (kind is type and value in _PURE):
            if any(map(_escapes, attributes[position:])):
                raise _UnknownError
            return value
        else:
            value = _stored_attribute(value, name)
        if value is _MISSING:
            raise _UnknownError
    return value


def _stored_attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a class or of an instance that is stored, not computed; no code of the owner runs."""
    kind = type(owner)
    if kind is not type and kind.__getattribute__ not in _PLAIN_LOOKUPS:
        raise _UnknownError
    of_class = _MISSING
    for base in (owner if kind is type else kind).__mro__:
        if name in vars(base):
            of_class = vars(base)[name]
            break
    if type(of_class) in _FIELDS:
        return getattr(owner, name, _MISSING)
    if name.startswith("__") or hasattr(type(of_class), "__get__"):  # properties and methods
        raise _UnknownError
    return of_class if kind is type else getattr(owner, "__dict__", {}).get(name, of_class)


#: How instances look their attributes up, unless their class overrides it.
_PLAIN_LOOKUPS: tuple[Any, ...] = (object.__getattribute__, tuple.__getattribute__, types.SimpleNamespace.__getattribute__)
#: The descriptors of slots and of the fields of named tuples.
_FIELDS = (types.MemberDescriptorType, type(namedtuple("_Example", "field").field))  # type: ignore[attr-defined]


# The values that code loads

#: The opcodes that access names or cells and that the analysis follows.
_FOLLOWED = frozenset(
    {"LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLOSURE", "MAKE_CELL"}
)
#: The others, and opcodes that access attributes or namespaces without a name.
_REFUSED = frozenset(
    {
        "BEFORE_ASYNC_WITH", "BEFORE_WITH", "GET_AWAITABLE", "IMPORT_STAR", "LOAD_BUILD_CLASS", "LOAD_LOCALS", "LOAD_SPECIAL",
        "MATCH_CLASS", "PRINT_EXPR", "SETUP_ANNOTATIONS",
    }
    | {dis.opname[code] for code in (*dis.hasname, *dis.hasfree) if code < len(dis.opname)} - _FOLLOWED
)  # fmt: skip


class _Reads:
    """The values that a code object and its nested functions load. It keeps the code object alive, so its id is unique.

    Attributes:
        unknown: whether the code does something that the analysis does not follow.
        cells, names: the index of each closure variable, and the name of each global or builtin, with the attributes that are
            loaded from it.
    """

    __slots__ = ("cells", "code", "names", "unknown")

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        cells: dict[tuple[str, ...], None] = {}
        names: dict[tuple[str, ...], None] = {}
        self.unknown = not _collect(code, frozenset(code.co_freevars), cells, names)
        self.cells = tuple((code.co_freevars.index(name), attributes) for name, *attributes in cells)
        self.names = tuple((name, attributes) for name, *attributes in names)


#: The analyzed code objects by id.
_analyzed: dict[int, _Reads] = {}


def _analyze(code: types.CodeType) -> _Reads:
    if len(_analyzed) >= MAX_CODES:
        _analyzed.clear()
    return _analyzed.setdefault(id(code), _Reads(code))


def _collect(
    code: types.CodeType, closure: frozenset[str], cells: dict[tuple[str, ...], None], names: dict[tuple[str, ...], None]
) -> bool:
    """Collect the chains ``name.a.b`` that code loads from closure variables (``cells``), and from globals and builtins.

    ``closure`` has the closure variables of the outermost function that are visible here. Returns False if the code does
    something that cannot be followed.
    """
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    chains: list[tuple[dict[tuple[str, ...], None], list[str]]] = []
    chain: list[str] | None = None  # of the value on top of the stack
    is_target = False
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        is_target |= instruction.is_jump_target  # then the value on top of the stack may be another one
        if operation == "EXTENDED_ARG":
            continue
        if operation in ("LOAD_ATTR", "LOAD_METHOD"):
            if chain is not None and not is_target:
                chain.append(name)
            elif _escapes(name):
                return False
            else:
                chain = None
        else:
            chain = None
            if operation == "LOAD_GLOBAL" or (operation == "LOAD_DEREF" and name in closure):
                chain = [name]
                chains.append((names if operation == "LOAD_GLOBAL" else cells, chain))
            elif operation in _REFUSED or (operation in ("STORE_DEREF", "DELETE_DEREF") and name in closure):
                return False
        is_target = False
    for found, chain in chains:
        found[tuple(chain)] = None
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return all(
        _collect(inner, closure & frozenset(inner.co_freevars) - frozenset(code.co_cellvars), cells, names) for inner in nested
    )


def _escapes(attribute: str) -> bool:
    """True if an attribute of a function, a generator or a string may lead to values that the analysis does not see."""
    return attribute.startswith("_") or "frame" in attribute or attribute in ("format", "format_map")
