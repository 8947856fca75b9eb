"""The table of cuDNN's constants is complete, and its script reproduces it."""

import importlib.util
from pathlib import Path

import pytest

from cupy_sdpa._cudnn import constants
from cupy_sdpa._cudnn.generate import header_version, parse, prefix, python_name, render
from cupy_sdpa.graph.nodes import POINTWISE
from cupy_sdpa.plans.lowering import DATA_TYPES

HEADER = """
/** @brief A thing. @since cuDNN 9.2.0 */
typedef enum {
    CUDNN_THING_ONE = 1, /**< One. @since cuDNN 9.0.0 */
    CUDNN_THING_TWO CUDNN_DEPRECATED_ENUM = 2 /* not CUDNN_THING_X */, /**< Two. @since cuDNN 9.4.1 */
    CUDNN_THING_THREE,
    CUDNN_THING_ALSO_ONE CUDNN_DEPRECATED_ENUM =
        CUDNN_THING_ONE, /**< @deprecated Use CUDNN_THING_ONE. @since cuDNN 9.0.0 */
    CUDNN_THING_NEG = -1, /**< @since cuDNN 9.0.0 */
    CUDNN_THING_COUNT,
} cudnnBackendThingName_t;
"""


def test_a_header_is_parsed_like_c():
    """Explicit, implicit, negative and aliased values; the version of a constant is that of its comment, else that of its
    enum's.
    """
    assert [tuple(entry) for entry in parse(HEADER)["cudnnBackendThingName_t"]] == [
        ("CUDNN_THING_ONE", 1, 90000),
        ("CUDNN_THING_TWO", 2, 90401),
        ("CUDNN_THING_THREE", 3, 90200),
        ("CUDNN_THING_ALSO_ONE", 1, 90000),
        ("CUDNN_THING_NEG", -1, 90000),
    ]
    assert python_name("cudnnBackendThingName_t") == "ThingName"
    assert "class ThingName(Constant)" in render(parse(HEADER), 90401)


def test_a_header_without_versions_raises():
    """Older headers have no versions of constants; the message names the header to use."""
    with pytest.raises(SystemExit, match=r"9\.27"):
        render(parse("typedef enum { CUDNN_A_B = 1 } cudnnA_t;"), 90000)


@pytest.mark.parametrize("name", [*sorted(POINTWISE), "sub", "exp", "log", "add", "div"])
def test_every_pointwise_mode_is_one_of_cudnns(name):
    """The names of the graph's pointwise modes are cuDNN's in lower case."""
    assert name.upper() in constants.PointwiseMode.__members__


def test_every_dtype_has_its_constant():
    """No two dtypes have the same constant."""
    assert len(set(DATA_TYPES.values())) == len(DATA_TYPES)


def test_versions_are_versions():
    """The version of every constant is between 9.0 and that of the header."""
    enums = [e for e in vars(constants).values() if isinstance(e, type) and issubclass(e, constants.Constant)]
    members = [m for e in enums for m in e]
    assert len(members) > 600
    assert all(90000 <= m.since <= constants.HEADER_VERSION for m in members)


@pytest.mark.cudnn
def test_the_table_agrees_with_the_installed_header():
    """The table and the installed header have the same constants with the same values."""
    spec = importlib.util.find_spec("nvidia.cudnn")
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    version = header_version((include / "cudnn_version.h").read_text())
    for c_enum, entries in parse((include / "cudnn_graph.h").read_text()).items():
        start = prefix([entry.name for entry in entries])
        ours = getattr(constants, python_name(c_enum)).__members__
        theirs = {entry.name.removeprefix(start): entry.value for entry in entries}
        for name, value in theirs.items():
            if name in ours:
                assert ours[name] == value, f"{c_enum} {name}"
            else:
                assert version > constants.HEADER_VERSION, f"{c_enum} {name}: regenerate the table"
        gone = {name for name, member in ours.items() if member.since <= version} - set(theirs)
        assert not gone, f"{c_enum}: not in the header of {version}: {gone}"
