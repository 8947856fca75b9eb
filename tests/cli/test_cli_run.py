"""The command run: layouts, dtypes, damaged inputs, outputs that cannot be written, and the engine."""

import errno
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from command_line import BFLOAT16, LAYOUT_SHAPES, arrays, complaint, error_of, lines, save

from cupy_sdpa.__main__ import main
from cupy_sdpa._cli.helpers import engine, machine, npz
from cupy_sdpa.layout import from_julia
from cupy_sdpa.problem.tensor_spec import numpy_dtype


def saved(path):
    """The arrays of a file."""
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory, and lines of 100 columns: pytest-xdist sets COLUMNS."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("layout", LAYOUT_SHAPES)
def test_run_in_every_layout(layout, order, capsys):
    """The result has the layout of the inputs, for inputs in C and Fortran order."""
    given = arrays()
    turned = {name: np.asarray(from_julia(array, layout), order=order) for name, array in given.items()}
    np.savez("in.npz", **turned)
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", layout, "--stats", "--causal", "--engine", "numpy"]) == 0
    result = saved("out.npz")
    axes, stats_axes = LAYOUT_SHAPES[layout]
    out = np.einsum(f"{axes}->dhsb", result["out"])  # without the table of the command
    stats = np.einsum(f"{stats_axes}->shb", result["stats"])
    assert error_of(out, stats, given, causal=True) <= 1
    _, engine_line, wrote = lines(capsys)
    assert "numpy (requested by --engine numpy), in float32" in engine_line
    assert "out.npz" in wrote


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_run_keeps_the_dtype_of_the_file(dtype):
    """The result has the dtype of the file; bfloat16 is two-byte void, as numpy writes it."""
    given = arrays(numpy_dtype(dtype))
    save(given)
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy", "--scale", "0.5"]) == 0
    result = saved("out.npz")
    assert result.keys() == {"out"}
    out = result["out"]
    assert out.dtype == ("V2" if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        out = out.view(BFLOAT16)
    assert error_of(out, None, given, scale=0.5) <= 1


@pytest.mark.parametrize("stored", ["float32", "float64", ">f4", "float16"])
def test_run_computes_in_another_dtype(stored, capsys):
    """--dtype is the dtype of the computation; the result has the dtype of the file."""
    given = arrays(stored)
    save(given)
    assert main(["run", "in.npz", "-o", "out.npz", "--dtype", "bfloat16", "--engine", "numpy"]) == 0
    out = saved("out.npz")["out"]
    assert out.dtype == np.dtype(stored).newbyteorder("=")
    assert np.array_equal(out, out.astype(BFLOAT16).astype(out.dtype))
    assert error_of(out, None, {name: array.astype(BFLOAT16) for name, array in given.items()}) <= 1
    assert "in bfloat16" in lines(capsys)[1]


def test_run_onto_its_own_input(capsys):
    """An output path that is the input, also through a link, is refused; the input is unchanged."""
    save(arrays())
    Path("link.npz").symlink_to("in.npz")
    for name in ("in.npz", "./in.npz", "link.npz"):
        assert main(["run", "in.npz", "-o", name]) == 2
        assert f"-o {Path(name)} is the input" in complaint(capsys)
    assert set(saved("in.npz").keys()) == {"q", "k", "v"}


def test_run_keeps_a_link(folder):
    """An output that is a symbolic link is written to its target."""
    save(arrays())
    (folder / "out.npz").symlink_to("elsewhere.npz")
    assert main(["run", "in.npz", "-o", "out.npz"]) == 0
    assert (folder / "out.npz").is_symlink()
    assert saved("elsewhere.npz").keys() == {"out"}


def test_run_without_keys(capsys):
    """Without keys the output is 0 and the log-sum-exp -inf."""
    given = arrays()
    save({"q": given["q"], "k": given["k"][:, :, :0], "v": given["v"][:, :, :0]})
    assert main(["run", "in.npz", "-o", "out.npz", "--stats"]) == 0
    result = saved("out.npz")
    assert not result["out"].any()
    assert np.isneginf(result["stats"]).all()


def written(name, content):
    """Write a file with these bytes."""
    Path(name).write_bytes(content)


def zipped(compression=zipfile.ZIP_STORED, **members):
    """The bytes of a zip with these npy members."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return archive.getvalue()


def npy(array):
    """The bytes of an array's npy file."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def damaged(change):
    """Write an npz with its bytes changed."""
    save(arrays())
    content = bytearray(Path("in.npz").read_bytes())
    written("in.npz", change(content))


def flipped(content):
    """The bytes with one changed in the data of q, which makes its checksum wrong."""
    content[content.index(b"PK", 4) - 10] ^= 1
    return content


def huge_header(content):
    """The bytes of an npy file with too little data for its header."""
    return content.replace(b"(8, 4, 5, 2)", b"(8, 4, 9, 9)")


def long_header():
    """The bytes of an npy file whose header has a megabyte."""
    return b"\x93NUMPY\x02\x00" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20)


SMALL = np.zeros((8, 1, 2, 1), np.float32, order="F")
#: How to make a bad input, and a part of the error.
BAD_INPUTS = {
    "missing": (lambda: None, "No such file"),
    "folder": (lambda: Path("in.npz").mkdir(), "Is a directory"),
    "text": (lambda: written("in.npz", b"q k v\n"), "not an npz file"),
    "npy": (lambda: written("in.npz", npy(SMALL)), "not an npz file"),
    "empty_zip": (lambda: written("in.npz", zipped()), "no array q and no k and no v: it is empty"),
    "no_v": (lambda: np.savez("in.npz", q=SMALL, k=SMALL, w=SMALL), "no array v: it holds q, k, w"),
    "pickle": (lambda: np.savez("in.npz", q=SMALL, k=SMALL, v=np.array([{}, None])), "v in in.npz holds Python objects"),
    "fields": (lambda: np.savez("in.npz", q=SMALL, k=SMALL, v=np.zeros(3, "f4,f4")), "v has 1 dimensions"),
    "no_npy": (lambda: written("in.npz", zipped(q=b"?" * 99, k=b"", v=b"")), "array q in in.npz cannot be read"),
    "bad_header": (
        lambda: written("in.npz", zipped(q=npy(SMALL).replace(b"{", b"("), k=b"", v=b"")),
        "q in in.npz cannot be read",
    ),
    "truncated": (lambda: damaged(lambda content: content[:-40]), "in.npz is not an npz file, or is damaged"),
    "checksum": (lambda: damaged(flipped), "q in in.npz cannot be read: Bad CRC-32"),
    "too_short": (lambda: written("in.npz", zipped(q=huge_header(npy(arrays()["q"])), k=b"", v=b"")), "q in in.npz is damaged"),
    "rank": (lambda: np.savez("in.npz", q=SMALL[0], k=SMALL, v=SMALL), "q has 3 dimensions (1, 2, 1)"),
    "dtype": (lambda: np.savez("in.npz", q=SMALL.astype(int), k=SMALL, v=SMALL), "q is int64"),
    "longdouble": (lambda: save(dict.fromkeys("qkv", SMALL.astype(np.longdouble))), "convert with"),
    "mixed": (lambda: np.savez("in.npz", q=SMALL, k=SMALL.astype("f2"), v=SMALL), "k is float16 and q is float32"),
    "head_dim": (lambda: np.savez("in.npz", q=SMALL, k=SMALL[:4], v=SMALL), "head dims"),
    "pipe": (lambda: os.mkfifo("in.npz"), "cannot read in.npz: it is not a regular file"),
    "device": (lambda: Path("in.npz").symlink_to("/dev/zero"), "cannot read in.npz: it is not a regular file"),
    "bzip2": (
        lambda: written("in.npz", zipped(zipfile.ZIP_BZIP2, **dict.fromkeys("qkv", npy(SMALL)))),
        "the array q in in.npz has the zip compression 12, which numpy does not write",
    ),
    "long_header": (
        lambda: written("in.npz", zipped(zipfile.ZIP_DEFLATED, **dict.fromkeys("qkv", long_header()))),
        "got 65524",
    ),
    "bias": (lambda: np.savez("in.npz", q=SMALL, k=SMALL, v=SMALL, bias=SMALL, mask=SMALL), "in.npz has bias and mask, which"),
}


@pytest.mark.parametrize(("prepare", "said"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_run_refuses_a_bad_input(prepare, said, folder, capsys):
    """A bad input is an error of one line; an existing output is unchanged."""
    prepare()
    (folder / "out.npz").write_bytes(b"of before")
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]) == 2
    assert said in complaint(capsys)
    assert (folder / "out.npz").read_bytes() == b"of before"
    assert {path.name for path in folder.iterdir()} <= {"in.npz", "out.npz"}


def test_run_reads_members_without_a_suffix(folder):
    """Members without .npy, as some zip writers name them, are read, as numpy does."""
    given = arrays()
    with zipfile.ZipFile("in.npz", "w") as file:
        for name, array in given.items():
            file.writestr(name, npy(array))
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]) == 0
    save(given, path="usual.npz")
    assert main(["run", "usual.npz", "-o", "other.npz", "--engine", "numpy"]) == 0
    np.testing.assert_array_equal(saved("out.npz")["out"], saved("other.npz")["out"])


@pytest.mark.parametrize("layout", LAYOUT_SHAPES)
def test_run_says_how_the_arrays_were_read(layout, capsys):
    """One line has the shapes and the meaning of each axis, because arrays of another layout may fit too."""
    given = arrays()
    save(given, layout=layout)
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", layout, "--engine", "numpy"]) == 0
    said = " ".join(" ".join(lines(capsys)).split())
    shapes = {name: from_julia(array, layout).shape for name, array in given.items()}
    axes = ", ".join({"d": "head_dim", "h": "heads", "s": "seq", "b": "batch"}[letter] for letter in layout)
    assert f"read q {shapes['q']}, k {shapes['k']}, v {shapes['v']} as ({axes})" in said


def test_run_refuses_c_order_without_a_layout(capsys):
    """The message shows the shape; a named layout runs, also that of this package."""
    x = np.ones((2, 5, 3, 8), np.float32)
    np.savez("in.npz", q=x, k=x, v=x)
    run = ["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]
    assert main(run) == 2
    assert "q (2, 5, 3, 8) is in C order" in complaint(capsys)
    for layout in ("dhsb", "bshd"):
        assert main([*run, "--layout", layout]) == 0
        assert saved("out.npz")["out"].shape == x.shape


def test_run_says_once_what_has_one_shape(capsys):
    """Arrays of equal shape are listed together."""
    save({"q": SMALL, "k": SMALL, "v": SMALL})
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]) == 0
    assert f"q and k and v {SMALL.shape} as (head_dim, heads, seq, batch)" in " ".join(lines(capsys))


def test_run_shows_shapes_in_the_words_of_the_layout(capsys):
    """An error for another layout states that the shapes in it are converted."""
    save({"q": SMALL, "k": SMALL[:4], "v": SMALL}, layout="bshd")
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", "bshd"]) == 2
    assert "shapes are those after conversion from bshd to (head_dim, heads, seq, batch)" in complaint(capsys)


#: How to prevent the output, its path, and a part of the error.
BAD_OUTPUTS = {
    "no_folder": (lambda: None, "missing/out.npz", "No such file"),
    "is_folder": (lambda: Path("out.npz").mkdir(), "out.npz", "it is a folder"),
    "is_device": (lambda: None, os.devnull, "not a file"),
    "in_a_file": (lambda: written("file", b""), "file/out.npz", "Not a directory"),
    "long_name": (lambda: None, "n" * 300, "too long"),
}


@pytest.mark.parametrize(("prepare", "path", "said"), BAD_OUTPUTS.values(), ids=BAD_OUTPUTS)
def test_run_refuses_a_bad_output(prepare, path, said, folder, capsys):
    """An output that cannot be written is an error of one line; no file is left behind."""
    save(arrays())
    prepare()
    before = sorted(folder.rglob("*"))
    assert main(["run", "in.npz", "-o", path]) == 2
    assert said in complaint(capsys)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("protected", [".", "out.npz"])
def test_run_respects_write_protection(protected, folder, capsys):
    """A write-protected folder or output is not changed."""
    save(arrays())
    (folder / "out.npz").write_bytes(b"of before")
    mode = (folder / protected).stat().st_mode
    (folder / protected).chmod(0o500)
    try:
        assert main(["run", "in.npz", "-o", "out.npz"]) == 2
    finally:
        (folder / protected).chmod(mode)
    assert "cannot write out.npz" in complaint(capsys)
    assert (folder / "out.npz").read_bytes() == b"of before"


FAILURES = {
    "disk_full": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "cannot write out.npz: No space left"),
    "memory": (MemoryError("Unable to allocate 9 TiB"), 2, "not enough memory: Unable to allocate 9 TiB"),
    "interrupt": (KeyboardInterrupt(), 130, "interrupted"),
}


@pytest.mark.parametrize(("failure", "status", "said"), FAILURES.values(), ids=FAILURES)
def test_run_leaves_nothing_half_written(failure, status, said, folder, monkeypatch, capsys):
    """If writing fails, an existing output is unchanged, and no temporary file is left."""

    def fail(file, **results):
        file.write(b"half")
        raise failure

    save(arrays())
    (folder / "out.npz").write_bytes(b"of before")
    monkeypatch.setattr(np, "savez", fail)
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]) == status
    assert complaint(capsys).startswith(said)
    assert (folder / "out.npz").read_bytes() == b"of before"
    assert sorted(path.name for path in folder.iterdir()) == ["in.npz", "out.npz"]


def test_run_asks_before_it_loads(monkeypatch, capsys):
    """A file too large for the memory is refused before its data are read."""
    load = npz.load
    save(arrays())
    needed = 4 * (8 * 4 * 5 * 2 + 8 * 2 * 7 * 2 + 16 * 2 * 7 * 2 + 16 * 4 * 5 * 2) + 4 * 16 * 2 * 7 * 2
    monkeypatch.setattr(npz, "load", lambda *_: pytest.fail("the data were read"))
    monkeypatch.setattr(machine, "memory_available", lambda: needed - 1)
    assert main(["run", "in.npz", "-o", "out.npz"]) == 2
    assert "GiB are available" in complaint(capsys)
    monkeypatch.setattr(npz, "load", load)
    monkeypatch.setattr(machine, "memory_available", lambda: needed)
    assert main(["run", "in.npz", "-o", "out.npz"]) == 0


def test_run_refuses_values_that_the_dtype_cannot_hold(capsys):
    """A conversion that would overflow is an error."""
    save({name: 1e6 * array for name, array in arrays().items()})
    assert main(["run", "in.npz", "-o", "out.npz", "--dtype", "float16", "--engine", "numpy"]) == 2
    assert complaint(capsys) == "q has values outside the range of float16: use another --dtype"


def test_run_refuses_a_scale_that_is_none(capsys):
    """An error of the package is printed as one line."""
    save(arrays())
    assert main(["run", "in.npz", "-o", "out.npz", "--scale", "nan"]) == 2
    assert "scale is nan" in complaint(capsys)


# the engine


def test_cudnn_where_it_cannot_run(monkeypatch, folder, capsys):
    """--engine cudnn prints everything that is missing, with the remedy, and writes no file."""
    monkeypatch.setattr(machine, "obstacles", lambda: ["no GPU: none", "CuPy is not installed: pip install x"])
    save(arrays())
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "cudnn"]) == 2
    assert complaint(capsys) == "--engine cudnn cannot run here: no GPU: none; CuPy is not installed: pip install x"
    assert [path.name for path in folder.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_dtype_that_cudnn_does_not_take(dtype, monkeypatch):
    """On a machine with a GPU, numpy computes dtypes that cuDNN does not support; the reason has the remedy."""
    monkeypatch.setattr(machine, "obstacles", list)
    on_gpu, why = engine.choose("auto", dtype)
    assert not on_gpu
    assert f"not {dtype}" in why
    assert "--dtype bfloat16" in why


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUT_SHAPES)
def test_run_on_the_gpu(layout, capsys):
    """On a GPU, cuDNN computes a bfloat16 file, in every layout."""
    given = arrays(BFLOAT16)
    save(given, layout=layout)
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", layout, "--stats"]) == 0
    assert any("cuDNN (" in line for line in lines(capsys))
    result = saved("out.npz")
    axes, stats_axes = LAYOUT_SHAPES[layout]
    stats = np.einsum(f"{stats_axes}->shb", result["stats"])
    out = result["out"].view(BFLOAT16).astype(np.float32)
    assert error_of(np.einsum(f"{axes}->dhsb", out), stats, given) <= 1
