"""The command run: layouts, dtypes, damaged inputs, outputs that cannot be written, and the engine."""

import errno
import io
import os
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command_line import run

from cupy_sdpa import attention, reference

pytestmark = pytest.mark.usefixtures("folder")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: For each layout how to transpose (head_dim, heads, seq, batch), and (seq, heads, batch): without the table of the command.
LAYOUTS = {"dhsb": ("dhsb", "shb"), "bshd": ("bshd", "bsh"), "bhsd": ("bhsd", "bhs")}
RUN = "run in.npz -o out.npz --engine numpy"


def arrays(dtype=np.float32):
    """q, k and v, (head_dim, heads, seq, batch)."""
    rng = np.random.default_rng(0)
    shapes = {"q": (8, 4, 5, 2), "k": (8, 2, 7, 2), "v": (16, 2, 7, 2)}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype, order="F") for name, shape in shapes.items()}


def save(given, layout="dhsb", order="K"):
    """Write arrays to in.npz in a layout."""
    turn = ["dhsb".index(axis) for axis in layout]
    np.savez("in.npz", **{name: np.asarray(x.transpose(turn), order=order) for name, x in given.items()})


def saved(path="out.npz"):
    """The arrays of a file."""
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, order):
    """The result is the call's, in the layout of the inputs; one line has the shapes and the meaning of each axis."""
    given = arrays()
    save(given, layout, order)
    done = run(f"{RUN} --layout {layout} --stats --causal")
    assert done.status == 0
    out, stats = attention(*given.values(), causal=True, return_stats=True)
    axes, stats_axes = LAYOUTS[layout]
    np.testing.assert_array_equal(np.einsum(f"{axes}->dhsb", saved()["out"]), out)
    np.testing.assert_array_equal(np.einsum(f"{stats_axes}->shb", saved()["stats"]), stats)
    shapes = {name: tuple(x.shape["dhsb".index(axis)] for axis in axes) for name, x in given.items()}
    names = ", ".join({"d": "head_dim", "h": "heads", "s": "seq", "b": "batch"}[axis] for axis in layout)
    assert f"read q {shapes['q']}, k {shapes['k']}, v {shapes['v']} as ({names})" in done.text
    assert "numpy (requested by --engine numpy), in float32" in done.text
    assert "wrote out.npz" in done.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_cudnn(layout, engine):
    """cuDNN computes a bfloat16 file if it can; of other dtypes numpy, and the reason has the remedy."""
    if not engine.on_cudnn:
        return
    given = arrays(BFLOAT16)
    save(given, layout)
    assert "cuDNN (" in run(f"run in.npz -o out.npz --layout {layout} --stats").text
    out, stats = reference.attention(*given.values())
    axes, stats_axes = LAYOUTS[layout]
    found = saved()["out"].view(BFLOAT16).astype(np.float32)
    np.testing.assert_allclose(np.einsum(f"{axes}->dhsb", found), out, atol=3e-2)
    np.testing.assert_allclose(np.einsum(f"{stats_axes}->shb", saved()["stats"]), stats, atol=2e-3)
    save(arrays(), layout)
    printed = run(f"run in.npz -o out.npz --layout {layout}").text
    assert "numpy (cuDNN supports float16 and bfloat16, not float32; use --dtype bfloat16)" in printed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", ">f4"])
def test_the_dtype_of_the_file(dtype):
    """The result has the dtype of the file, bfloat16 is two-byte void, as numpy writes it; --dtype is that of the computation."""
    given = arrays(BFLOAT16 if dtype == "bfloat16" else dtype)
    save(given)
    assert run(f"{RUN} --scale 0.5").status == 0
    out = saved()["out"]
    assert out.dtype == ("V2" if dtype == "bfloat16" else np.dtype(dtype).newbyteorder("="))
    given = {name: np.asarray(x, x.dtype.newbyteorder("="), order="F") for name, x in given.items()}
    np.testing.assert_array_equal(out.view(given["q"].dtype), attention(*given.values(), scale=0.5))
    done = run(f"{RUN} --dtype bfloat16")
    assert "in bfloat16" in done.text
    wanted = attention(*(x.astype(BFLOAT16, order="F") for x in given.values()))
    np.testing.assert_array_equal(saved()["out"].view(given["q"].dtype).astype(np.float64), wanted.astype(np.float64))


def test_the_input_is_not_overwritten():
    """An output path that is the input, also through a link, is refused."""
    save(arrays())
    Path("link.npz").symlink_to("in.npz")
    for name in ("in.npz", "./in.npz", "link.npz"):
        assert f"-o {Path(name)} is the input" in run(f"run in.npz -o {name}").complaint
    assert set(saved("in.npz")) == {"q", "k", "v"}


def test_a_link_is_kept(folder):
    """An output that is a symbolic link is written to its target."""
    save(arrays())
    Path("out.npz").symlink_to("elsewhere.npz")
    assert run(RUN).status == 0
    assert Path("out.npz").is_symlink()
    assert saved("elsewhere.npz").keys() == {"out"}


def test_no_keys():
    """Without keys the output is 0 and the log-sum-exp -inf."""
    given = arrays()
    save({name: x if name == "q" else x[:, :, :0] for name, x in given.items()})
    assert run(f"{RUN} --stats").status == 0
    assert not saved()["out"].any()
    assert np.isneginf(saved()["stats"]).all()


def zipped(compression=zipfile.ZIP_STORED, suffix=".npy", **members):
    """Write a zip with these members to in.npz."""
    with zipfile.ZipFile("in.npz", "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}{suffix}", content)


def npy(array):
    """The bytes of an array's npy file."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def test_members_without_a_suffix():
    """Members without .npy, as some zip writers name them, are read, as numpy does."""
    zipped(suffix="", **{name: npy(x) for name, x in arrays().items()})
    assert run(RUN).status == 0
    np.testing.assert_array_equal(saved()["out"], attention(*arrays().values()))


def damaged(change):
    """Write an npz with its bytes changed."""
    save(arrays())
    content = bytearray(Path("in.npz").read_bytes())
    Path("in.npz").write_bytes(change(content))


def flipped(content):
    """The bytes with one changed in the data of q, which makes its checksum wrong."""
    content[content.index(b"PK", 4) - 10] ^= 1
    return content


SMALL = np.zeros((8, 1, 2, 1), np.float32, order="F")
#: The bytes of an npy file whose header has a megabyte.
LONG_HEADER = b"\x93NUMPY\x02\x00" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20)


def small(**arrays):
    """Write three equal arrays, and others in their place."""
    np.savez("in.npz", **({"q": SMALL, "k": SMALL, "v": SMALL} | arrays))


#: How to make a bad input, and a part of the error.
BAD_INPUTS = {
    "missing": (lambda: None, "No such file"),
    "folder": (lambda: Path("in.npz").mkdir(), "Is a directory"),
    "text": (lambda: Path("in.npz").write_text("q k v\n"), "not an npz file"),
    "npy": (lambda: Path("in.npz").write_bytes(npy(SMALL)), "not an npz file"),
    "empty_zip": (zipped, "no array q and no k and no v: it is empty"),
    "no_v": (lambda: np.savez("in.npz", q=SMALL, k=SMALL, w=SMALL), "no array v: it holds q, k, w"),
    "pickle": (lambda: small(v=np.array([{}, None])), "v in in.npz holds Python objects"),
    "fields": (lambda: small(v=np.zeros(3, "f4,f4")), "v has 1 dimensions"),
    "no_npy": (lambda: zipped(q=b"?" * 99, k=b"", v=b""), "array q in in.npz cannot be read"),
    "bad_header": (lambda: zipped(q=npy(SMALL).replace(b"{", b"("), k=b"", v=b""), "q in in.npz cannot be read"),
    "truncated": (lambda: damaged(lambda content: content[:-40]), "in.npz is not an npz file, or is damaged"),
    "checksum": (lambda: damaged(flipped), "q in in.npz cannot be read: Bad CRC-32"),
    "too_short": (lambda: zipped(q=npy(SMALL).replace(b"(8, 1", b"(9, 9"), k=b"", v=b""), "q in in.npz is damaged"),
    "rank": (lambda: small(q=SMALL[0]), "q has 3 dimensions (1, 2, 1)"),
    "dtype": (lambda: small(q=SMALL.astype(int)), "q is int64"),
    "longdouble": (lambda: save(dict.fromkeys("qkv", SMALL.astype(np.longdouble))), "convert with"),
    "mixed": (lambda: small(k=SMALL.astype("f2")), "k is float16 and q is float32"),
    "head_dim": (lambda: small(k=SMALL[:4]), "head dims"),
    "pipe": (lambda: os.mkfifo("in.npz"), "cannot read in.npz: it is not a regular file"),
    "device": (lambda: Path("in.npz").symlink_to("/dev/zero"), "cannot read in.npz: it is not a regular file"),
    "bzip2": (
        lambda: zipped(zipfile.ZIP_BZIP2, **dict.fromkeys("qkv", npy(SMALL))),
        "the array q in in.npz has the zip compression 12, which numpy does not write",
    ),
    "long_header": (lambda: zipped(zipfile.ZIP_DEFLATED, **dict.fromkeys("qkv", LONG_HEADER)), "got 65524"),
    "bias": (lambda: small(bias=SMALL, mask=SMALL), "in.npz has bias and mask, which"),
    "c_order": (lambda: small(**dict.fromkeys("qkv", np.ones((2, 5, 3, 8), np.float32))), "q (2, 5, 3, 8) is in C order"),
}


@pytest.mark.parametrize(("prepare", "said"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_a_bad_input(prepare, said, folder):
    """A bad input is an error of one line; an existing output is unchanged."""
    prepare()
    (folder / "out.npz").write_bytes(b"of before")
    assert said in run(RUN).complaint
    assert (folder / "out.npz").read_bytes() == b"of before"
    assert {path.name for path in folder.iterdir()} <= {"in.npz", "out.npz"}


def test_errors_of_values():
    """Values that the dtype cannot hold, a scale that is none, and shapes in the words of another layout."""
    save({name: 1e6 * x for name, x in arrays().items()})
    assert run(f"{RUN} --dtype float16").complaint == "q has values outside the range of float16: use another --dtype"
    assert "scale is nan" in run(f"{RUN} --scale nan").complaint
    save({"q": SMALL, "k": SMALL[:4], "v": SMALL}, layout="bshd")
    said = "shapes are those after conversion from bshd to (head_dim, heads, seq, batch)"
    assert said in run(f"{RUN} --layout bshd").complaint
    small()
    assert f"q and k and v {SMALL.shape} as (head_dim, heads, seq, batch)" in run(RUN).text  # once what has one shape


#: How to prevent the output, its path, and a part of the error.
BAD_OUTPUTS = {
    "no_folder": (lambda: None, "missing/out.npz", "No such file"),
    "is_folder": (lambda: Path("out.npz").mkdir(), "out.npz", "it is a folder"),
    "is_device": (lambda: None, os.devnull, "not a file"),
    "in_a_file": (lambda: Path("file").touch(), "file/out.npz", "Not a directory"),
    "long_name": (lambda: None, "n" * 300, "too long"),
}


@pytest.mark.parametrize(("prepare", "path", "said"), BAD_OUTPUTS.values(), ids=BAD_OUTPUTS)
def test_a_bad_output(prepare, path, said, folder):
    """An output that cannot be written is an error of one line; no file is left behind."""
    save(arrays())
    prepare()
    before = sorted(folder.rglob("*"))
    assert said in run(f"run in.npz -o {path}").complaint
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("protected", [".", "out.npz"])
def test_write_protection(protected, folder):
    """A write-protected folder or output is not changed."""
    save(arrays())
    (folder / "out.npz").write_bytes(b"of before")
    mode = (folder / protected).stat().st_mode
    (folder / protected).chmod(0o500)
    try:
        assert "cannot write out.npz" in run(RUN).complaint
    finally:
        (folder / protected).chmod(mode)
    assert (folder / "out.npz").read_bytes() == b"of before"


FAILURES = {
    "disk_full": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "cannot write out.npz: No space left"),
    "memory": (MemoryError("Unable to allocate 9 TiB"), 2, "not enough memory: Unable to allocate 9 TiB"),
    "interrupt": (KeyboardInterrupt(), 130, "interrupted"),
}


@pytest.mark.parametrize(("failure", "status", "said"), FAILURES.values(), ids=FAILURES)
def test_nothing_is_left_half_written(failure, status, said, folder, monkeypatch):
    """If writing fails, an existing output is unchanged, and no temporary file is left."""

    def fail(file, **results):
        file.write(b"half")
        raise failure

    save(arrays())
    (folder / "out.npz").write_bytes(b"of before")
    monkeypatch.setattr(np, "savez", fail)
    done = run(RUN)
    assert done.status == status
    assert done.err.startswith(f"cupy_sdpa: {said}")
    assert done.err.count("\n") == 1
    assert (folder / "out.npz").read_bytes() == b"of before"
    assert sorted(path.name for path in folder.iterdir()) == ["in.npz", "out.npz"]
