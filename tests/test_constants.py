"""The table of cuDNN's constants is complete, and the command that makes it makes it again."""

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


def test_a_header_is_read_as_c_reads_it():
    """Values given, counted on, negative and aliased; versions from a constant's comment, else from its enum's."""
    assert [tuple(entry) for entry in parse(HEADER)["cudnnBackendThingName_t"]] == [
        ("CUDNN_THING_ONE", 1, 90000),
        ("CUDNN_THING_TWO", 2, 90401),
        ("CUDNN_THING_THREE", 3, 90200),
        ("CUDNN_THING_ALSO_ONE", 1, 90000),
        ("CUDNN_THING_NEG", -1, 90000),
    ]
    assert python_name("cudnnBackendThingName_t") == "ThingName"
    assert "class ThingName(Constant)" in render(parse(HEADER), 90401)


def test_a_header_without_versions_is_refused():
    """Older headers do not say when a constant came: the command says which header to use."""
    with pytest.raises(SystemExit, match=r"9\.27"):
        render(parse("typedef enum { CUDNN_A_B = 1 } cudnnA_t;"), 90000)


@pytest.mark.parametrize("name", [*sorted(POINTWISE), "sub", "exp", "log", "add", "div"])
def test_every_pointwise_mode_is_one_of_cudnns(name):
    """The graph's names of modes are cuDNN's, in lower case."""
    assert name.upper() in constants.PointwiseMode.__members__


def test_every_dtype_has_its_constant():
    """No two of our dtypes share one of cuDNN's."""
    assert len(set(DATA_TYPES.values())) == len(DATA_TYPES)


def test_versions_are_versions():
    """Every constant came with a cuDNN between 9.0 and the header that the table was made from."""
    enums = [e for e in vars(constants).values() if isinstance(e, type) and issubclass(e, constants.Constant)]
    members = [m for e in enums for m in e]
    assert len(members) > 600
    assert all(90000 <= m.since <= constants.HEADER_VERSION for m in members)


@pytest.mark.cudnn
def test_the_table_agrees_with_the_installed_header():
    """Every constant of the installed cuDNN's header is in the table with its value; none of ours is missing there."""
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
