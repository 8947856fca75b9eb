"""The command line: demo, run and info do what they promise, and fail in one clear line."""

import errno
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_sdpa import CudnnError, __version__, reference, store
from cupy_sdpa.__main__ import main
from cupy_sdpa._cli import demo, engine, machine, npz, text
from cupy_sdpa._cli import main as cli
from cupy_sdpa.layout import from_julia
from cupy_sdpa.problem.tensor_spec import numpy_dtype

ROOT = Path(__file__).parents[1]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def lines(capsys):
    """What a command has printed, line by line; it must not have complained."""
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def complaint(capsys):
    """The one line in which a command has failed, without the name before it."""
    err = capsys.readouterr().err
    assert err.startswith("cupy_sdpa: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("cupy_sdpa: ").rstrip("\n")


def python(*words, cwd, code=None, stdout=subprocess.PIPE):
    """A Python of its own, with warnings as errors."""
    command = [sys.executable, "-W", "error", *(["-c", code] if code else ["-m", "cupy_sdpa"]), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False)


@pytest.fixture
def no_matplotlib(monkeypatch):
    """A machine without matplotlib."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# The words themselves


@pytest.mark.parametrize("command", ["demo", "run", "info", "plan", "support", "bench"])
def test_help_has_an_example(command, capsys):
    """The help of every command ends with a command to copy."""
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert f"python -m cupy_sdpa {command}" in capsys.readouterr().out.split("example")[1]


def test_no_command_prints_the_help(capsys):
    """Without a command the help is shown, and nothing is taken for done."""
    assert main([]) == 2
    assert "python -m cupy_sdpa demo" in capsys.readouterr().err


def test_version(capsys):
    """--version says the package's version."""
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("words", [["info"], ["demo", "--no-plot", "--seq", "64", "--engine", "numpy"]], ids=lambda w: w[0])
def test_as_a_module(words, folder):
    """The commands work as python -m cupy_sdpa, with warnings as errors."""
    done = python(*words, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "numpy" in done.stdout


def test_a_reader_that_goes_away(folder):
    """A command whose output nobody reads any more, as with head, ends without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = python("info", cwd=folder, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# demo

DEMOS = {
    "whole_text": [],
    "causal": ["--causal"],
    "float16": ["--dtype", "float16", "--seq", "200"],
    "float32": ["--dtype", "float32", "--seq", "200"],
    "float64_causal": ["--dtype", "float64", "--seq", "200", "--causal"],
    "longer_than_the_text": ["--seq", "1000", "--heads", "2"],
    "one_head": ["--seq", "50", "--heads", "1"],
    "odd_sizes": ["--seq", "33", "--heads", "6", "--kv-heads", "3", "--head-dim", "17"],
    "one_token": ["--seq", "1", "--head-dim", "1"],
    "two_tokens_causal": ["--seq", "2", "--causal", "--kv-heads", "1"],
    "wider_than_the_vocabulary": ["--seq", "20", "--head-dim", "400"],
}


@pytest.mark.parametrize("words", DEMOS.values(), ids=DEMOS)
def test_demo(words, capsys):
    """The demo fits on a screen, says which engine ran and why, and its error is one that rounding explains."""
    assert main(["demo", "--engine", "numpy", "--no-plot", *words]) == 0
    shown = lines(capsys)
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 100
    printed = " ".join(" ".join(shown).split())
    assert "numpy (asked for with --engine numpy)" in printed
    error, explained = re.search(r"error (\S+) at most .* explains up to (\S+) ", printed).groups()
    assert 0 <= float(error) <= float(explained)
    assert "rows checked" in printed
    assert "right: " in printed


def test_demo_says_why_it_is_this_engine(capsys):
    """Left to itself the demo runs where it can, and says why there."""
    assert main(["demo", "--no-plot", "--seq", "64"]) == 0
    (line,) = [line for line in lines(capsys) if line.startswith("engine")]
    reasons = machine.obstacles()
    assert reasons[0][:40] in line if reasons else "cuDNN (" in line


def test_demo_is_deterministic(capsys):
    """Two runs print the same but for the times."""
    outputs = []
    for _ in range(2):
        main(["demo", "--engine", "numpy", "--no-plot", "--seq", "100"])
        outputs.append([line for line in lines(capsys) if not line.startswith("time")])
    assert outputs[0] == outputs[1]


def test_demo_finds_related_words(capsys):
    """Marmalade attends to orange more than to any other word."""
    main(["demo", "--engine", "numpy", "--no-plot"])
    assert any("'marmalade' attends to orange 0." in line for line in lines(capsys))


def test_causal_words_see_only_what_came_before():
    """With --causal no weight falls on a later word."""
    words = text.tokens()[:60]
    q, k, _ = text.heads(words, 60, 2, 1, 16)
    seen = text.weights(q, k, 0, np.arange(60), causal=True)
    assert np.array_equal(seen, np.tril(seen))
    assert np.allclose(seen.sum(axis=1), 1)


@pytest.mark.parametrize("causal", [[], ["--causal"]], ids=["full", "causal"])
def test_demo_checks_a_part_where_all_would_take_long(causal, monkeypatch, capsys):
    """A large demo checks some rows, the last among them, and says how many."""
    monkeypatch.setattr(demo, "ROWS", 64)
    assert main(["demo", "--engine", "numpy", "--no-plot", "--heads", "4", "--seq", "100", *causal]) == 0
    assert re.search(r"\(\d+ of 400 rows checked\)", "\n".join(lines(capsys)))


@pytest.mark.parametrize("rows", ["all", "some"])
def test_demo_notices_a_wrong_result(rows, monkeypatch, capsys):
    """A result that is off by more than rounding makes the demo fail."""
    right = demo.attention
    monkeypatch.setattr(demo, "attention", lambda *arrays, **options: right(*arrays, **options) * np.float32(1.1))
    monkeypatch.setattr(demo, "ROWS", 1 << 15 if rows == "all" else 64)
    assert main(["demo", "--engine", "numpy", "--no-plot", "--seq", "100"]) == 1
    assert any("WRONG" in line for line in lines(capsys))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads", "4", "--kv-heads", "3"], "--heads 4 is not a multiple of --kv-heads 3"),
        (["--seq", "10000000000"], "GiB are available"),
    ],
    ids=["heads", "too_large"],
)
def test_demo_refuses(words, said, capsys):
    """What cannot be done is refused in one line."""
    assert main(["demo", *words]) == 2
    assert said in complaint(capsys)


def test_demo_without_matplotlib(no_matplotlib, folder, capsys):
    """Without matplotlib the demo says how to get it, and draws nothing."""
    assert main(["demo", "--engine", "numpy", "--seq", "50"]) == 0
    assert "pip install 'cupy-sdpa[plot]'" in lines(capsys)[-1]
    assert not list(folder.iterdir())


def test_a_picture_that_was_asked_for_needs_matplotlib(no_matplotlib, capsys):
    """--plot without matplotlib is an error."""
    assert main(["demo", "--plot", "map.png"]) == 2
    assert "pip install 'cupy-sdpa[plot]'" in complaint(capsys)


@pytest.mark.parametrize(
    "words",
    [[], ["--plot", "map.svg"], ["--causal", "--heads", "1"], ["--seq", "1"]],
    ids=["default", "named", "one_head", "one"],
)
def test_picture(words, folder, capsys):
    """With matplotlib the demo writes a picture and says where."""
    pytest.importorskip("matplotlib")
    assert main(["demo", "--engine", "numpy", "--seq", "60", *words]) == 0
    (path,) = folder.iterdir()
    assert path.name == ("map.svg" if "map.svg" in words else "attention.png")
    assert path.stat().st_size > 5000
    assert lines(capsys)[-1].split() == ["picture", path.name]


@pytest.mark.parametrize("path", ["missing/map.png", "map.unknown"])
def test_picture_that_cannot_be_written(path, folder, capsys):
    """A picture that cannot be written is an error of one line."""
    pytest.importorskip("matplotlib")
    assert main(["demo", "--engine", "numpy", "--seq", "20", "--plot", path]) == 2
    assert path in complaint(capsys)
    assert not list(folder.iterdir())


def test_picture_that_nobody_asked_for(folder, capsys):
    """Where the default picture cannot be written the demo says so, and is done all the same."""
    pytest.importorskip("matplotlib")
    (folder / "attention.png").mkdir()
    assert main(["demo", "--engine", "numpy", "--seq", "20"]) == 0
    assert "none: cannot write attention.png" in lines(capsys)[-1]


# run


def arrays(dtype=np.float32, *, seed=0):
    """q, k and v in the package's layout."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (8, 4, 5, 2), "k": (8, 2, 7, 2), "v": (16, 2, 7, 2)}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def save(given, *, layout="dhsb", path="in.npz"):
    """Write arrays in a layout into a file."""
    np.savez(path, **{name: from_julia(array, layout) for name, array in given.items()})


def error_of(out, stats, given, **options):
    """How far a result is from the reference, in units of what rounding explains."""
    exact, exact_stats = reference.attention(*given.values(), **options)
    allowed = demo.rounding(*given.values())
    assert out.shape == exact.shape
    worst = float(np.abs(out.astype(np.float64) - exact).max())
    if stats is not None:
        assert (stats.dtype, stats.shape) == (np.float32, exact_stats.shape)
        worst = max(worst, float(np.abs(stats - exact_stats).max()))
    return worst / allowed


LAYOUT_SHAPES = {"dhsb": ("dhsb", "shb"), "bshd": ("bshd", "bsh"), "bhsd": ("bhsd", "bhs")}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("layout", LAYOUT_SHAPES)
def test_run_in_every_layout(layout, order, capsys):
    """The result comes back in the layout of the inputs, in any order in memory."""
    given = arrays()
    turned = {name: np.asarray(from_julia(array, layout), order=order) for name, array in given.items()}
    np.savez("in.npz", **turned)
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", layout, "--stats", "--causal", "--engine", "numpy"]) == 0
    result = np.load("out.npz")
    axes, stats_axes = LAYOUT_SHAPES[layout]
    out = np.einsum(f"{axes}->dhsb", result["out"])  # not by the table that the command uses
    stats = np.einsum(f"{stats_axes}->shb", result["stats"])
    assert error_of(out, stats, given, causal=True) <= 1
    _, engine_line, wrote = lines(capsys)
    assert "numpy (asked for with --engine numpy), in float32" in engine_line
    assert "out.npz" in wrote


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_run_keeps_the_dtype_of_the_file(dtype):
    """The result has the dtype of the file, bfloat16 as the two-byte void that numpy makes of it."""
    given = arrays(numpy_dtype(dtype))
    save(given)
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy", "--scale", "0.5"]) == 0
    result = np.load("out.npz")
    assert result.files == ["out"]
    out = result["out"]
    assert out.dtype == ("V2" if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        out = out.view(BFLOAT16)
    assert error_of(out, None, given, scale=0.5) <= 1


@pytest.mark.parametrize("stored", ["float32", "float64", ">f4", "float16"])
def test_run_computes_in_another_dtype(stored, capsys):
    """--dtype is what is computed in; the file keeps its own."""
    given = arrays(stored)
    save(given)
    assert main(["run", "in.npz", "-o", "out.npz", "--dtype", "bfloat16", "--engine", "numpy"]) == 0
    out = np.load("out.npz")["out"]
    assert out.dtype == np.dtype(stored).newbyteorder("=")
    assert np.array_equal(out, out.astype(BFLOAT16).astype(out.dtype))
    assert error_of(out, None, {name: array.astype(BFLOAT16) for name, array in given.items()}) <= 1
    assert "in bfloat16" in lines(capsys)[1]


def test_run_onto_its_own_input(capsys):
    """The input would be lost: refused, whatever it is called, and left as it was."""
    save(arrays())
    Path("link.npz").symlink_to("in.npz")
    for name in ("in.npz", "./in.npz", "link.npz"):
        assert main(["run", "in.npz", "-o", name]) == 2
        assert f"-o {Path(name)} is the input" in complaint(capsys)
    assert set(np.load("in.npz").files) == {"q", "k", "v"}


def test_run_keeps_a_link(folder):
    """An output that is a link is written where the link points."""
    save(arrays())
    (folder / "out.npz").symlink_to("elsewhere.npz")
    assert main(["run", "in.npz", "-o", "out.npz"]) == 0
    assert (folder / "out.npz").is_symlink()
    assert np.load("elsewhere.npz").files == ["out"]


def test_run_without_keys(capsys):
    """Queries that see no key get 0, and -inf as their log-sum-exp."""
    given = arrays()
    save({"q": given["q"], "k": given["k"][:, :, :0], "v": given["v"][:, :, :0]})
    assert main(["run", "in.npz", "-o", "out.npz", "--stats"]) == 0
    result = np.load("out.npz")
    assert not result["out"].any()
    assert np.isneginf(result["stats"]).all()


def written(name, content):
    """A file with these bytes."""
    Path(name).write_bytes(content)


def zipped(**members):
    """The bytes of a zip with these npy members."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
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
    """The bytes with one of q's data changed, so that its checksum is wrong."""
    content[content.index(b"PK", 4) - 10] ^= 1
    return content


def huge_header(content):
    """The bytes of an npy file whose header promises more than there is."""
    return content.replace(b"(8, 4, 5, 2)", b"(8, 4, 9, 9)")


SMALL = np.zeros((8, 1, 2, 1), np.float32)
#: What makes an input bad, and what the complaint says.
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
}


@pytest.mark.parametrize(("prepare", "said"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_run_refuses_a_bad_input(prepare, said, folder, capsys):
    """A bad input is one clear line, writes nothing, and leaves an output of before as it was."""
    prepare()
    (folder / "out.npz").write_bytes(b"of before")
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]) == 2
    assert said in complaint(capsys)
    assert (folder / "out.npz").read_bytes() == b"of before"
    assert {path.name for path in folder.iterdir()} <= {"in.npz", "out.npz"}


def test_run_reads_members_without_a_suffix(folder):
    """As numpy does: zip writers other than numpy may leave out .npy."""
    given = arrays()
    with zipfile.ZipFile("in.npz", "w") as file:
        for name, array in given.items():
            file.writestr(name, npy(array))
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]) == 0
    save(given, path="usual.npz")
    assert main(["run", "usual.npz", "-o", "other.npz", "--engine", "numpy"]) == 0
    np.testing.assert_array_equal(np.load("out.npz")["out"], np.load("other.npz")["out"])


@pytest.mark.parametrize("layout", LAYOUT_SHAPES)
def test_run_says_how_the_arrays_were_read(layout, capsys):
    """One line has the shapes and what each axis was taken for: arrays of another layout may fit too."""
    given = arrays()
    save(given, layout=layout)
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", layout, "--engine", "numpy"]) == 0
    said = " ".join(" ".join(lines(capsys)).split())
    shapes = {name: from_julia(array, layout).shape for name, array in given.items()}
    axes = ", ".join({"d": "head_dim", "h": "heads", "s": "seq", "b": "batch"}[letter] for letter in layout)
    assert f"read q {shapes['q']}, k {shapes['k']}, v {shapes['v']} as ({axes})" in said


def test_run_says_once_what_has_one_shape(capsys):
    """Arrays of one shape are named together."""
    save({"q": SMALL, "k": SMALL, "v": SMALL})
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "numpy"]) == 0
    assert f"q and k and v {SMALL.shape} as (head_dim, heads, seq, batch)" in " ".join(lines(capsys))


def test_run_shows_shapes_in_the_words_of_the_layout(capsys):
    """A shape is complained about in a way that people with another layout understand."""
    save({"q": SMALL, "k": SMALL[:4], "v": SMALL}, layout="bshd")
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", "bshd"]) == 2
    assert "the file's bshd arrays are shown as (head_dim, heads, seq, batch)" in complaint(capsys)


#: What makes an output impossible, where it is to go, and what the complaint says.
BAD_OUTPUTS = {
    "no_folder": (lambda: None, "missing/out.npz", "No such file"),
    "is_folder": (lambda: Path("out.npz").mkdir(), "out.npz", "it is a folder"),
    "is_device": (lambda: None, os.devnull, "not a file"),
    "in_a_file": (lambda: written("file", b""), "file/out.npz", "Not a directory"),
    "long_name": (lambda: None, "n" * 300, "too long"),
}


@pytest.mark.parametrize(("prepare", "path", "said"), BAD_OUTPUTS.values(), ids=BAD_OUTPUTS)
def test_run_refuses_a_bad_output(prepare, path, said, folder, capsys):
    """An output that cannot be written is one clear line, and nothing is left behind."""
    save(arrays())
    prepare()
    before = sorted(folder.rglob("*"))
    assert main(["run", "in.npz", "-o", path]) == 2
    assert said in complaint(capsys)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("protected", [".", "out.npz"])
def test_run_respects_write_protection(protected, folder, capsys):
    """Neither a protected folder nor a protected output is written to."""
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
    """Whatever happens while the result is written, the output of before survives and nothing is beside it."""

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
    """A file that cannot fit into memory is refused by its headers, before its data are touched."""
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
    """A conversion that would make infinities is refused."""
    save({name: 1e6 * array for name, array in arrays().items()})
    assert main(["run", "in.npz", "-o", "out.npz", "--dtype", "float16", "--engine", "numpy"]) == 2
    assert complaint(capsys) == "q has values that float16 cannot hold: choose another --dtype"


def test_run_refuses_a_scale_that_is_none(capsys):
    """What the package refuses is passed on in one line."""
    save(arrays())
    assert main(["run", "in.npz", "-o", "out.npz", "--scale", "nan"]) == 2
    assert "scale is nan" in complaint(capsys)


# Which engine


def test_cudnn_where_it_cannot_run(monkeypatch, folder, capsys):
    """--engine cudnn without what it needs names everything that is missing, with the remedy, and writes nothing."""
    monkeypatch.setattr(machine, "obstacles", lambda: ["no GPU: none", "CuPy is not installed: pip install x"])
    save(arrays())
    assert main(["run", "in.npz", "-o", "out.npz", "--engine", "cudnn"]) == 2
    assert complaint(capsys) == "--engine cudnn cannot run here: no GPU: none; CuPy is not installed: pip install x"
    assert [path.name for path in folder.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_dtype_that_cudnn_does_not_take(dtype, monkeypatch):
    """On a machine with a GPU, what cuDNN does not take is computed by numpy, and the remedy is said."""
    monkeypatch.setattr(machine, "obstacles", list)
    on_gpu, why = engine.choose("auto", dtype)
    assert not on_gpu
    assert f"not {dtype}" in why
    assert "--dtype bfloat16" in why


@pytest.mark.gpu
@pytest.mark.parametrize("words", [[], ["--causal", "--dtype", "float16"], ["--seq", "5000", "--heads", "16"]])
def test_demo_on_the_gpu(words, capsys):
    """On a GPU the demo runs on cuDNN, shows the plan, and is right."""
    assert main(["demo", "--no-plot", "--engine", "cudnn", *words]) == 0
    printed = " ".join(lines(capsys))
    assert "engine    cuDNN (" in printed
    assert "workspace" in printed
    assert "numpy in" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUT_SHAPES)
def test_run_on_the_gpu(layout, capsys):
    """On a GPU a bfloat16 file is computed by cuDNN, in every layout."""
    given = arrays(BFLOAT16)
    save(given, layout=layout)
    assert main(["run", "in.npz", "-o", "out.npz", "--layout", layout, "--stats"]) == 0
    assert any("cuDNN (" in line for line in lines(capsys))
    result = np.load("out.npz")
    axes, stats_axes = LAYOUT_SHAPES[layout]
    stats = np.einsum(f"{stats_axes}->shb", result["stats"])
    out = result["out"].view(BFLOAT16).astype(np.float32)
    assert error_of(np.einsum(f"{axes}->dhsb", out), stats, given) <= 1


@pytest.mark.gpu
def test_what_cudnn_refuses_goes_to_numpy(capsys):
    """On a GPU, what cuDNN cannot run is computed by numpy, and cuDNN's reason is said."""
    assert main(["demo", "--no-plot", "--seq", "50", "--head-dim", "20"]) == 0
    assert "numpy (cuDNN cannot run this: the head_dim" in " ".join(lines(capsys))
    assert main(["demo", "--no-plot", "--seq", "50", "--head-dim", "20", "--engine", "cudnn"]) == 2
    assert "head_dim" in complaint(capsys)


# info

#: A Python in which nothing for the GPU can be imported or loaded.
BARE = """
import sys
for name in ("cupy", "cuda", "cuda.pathfinder", "cuda.bindings", "cuda.bindings.driver", "matplotlib"):
    sys.modules[name] = None
import ctypes
def missing(name, *args, **kwargs):
    raise OSError(f"{name}: cannot open shared object file")
ctypes.CDLL = missing
from cupy_sdpa.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_info(capsys):
    """info names every library and says what this machine can run."""
    assert main(["info"]) == 0
    printed = "\n".join(lines(capsys))
    for expected in (__version__, np.__version__, ml_dtypes.__version__, "CuPy", "cuda-python", "cuDNN", "GPU"):
        assert expected in printed
    can = printed.split("this machine can run:")[1]
    assert re.search(r"numpy +yes", can)
    assert re.search(rf"cuDNN +{'no' if machine.obstacles() else 'yes'}", can)


def test_info_in_a_bare_environment(folder):
    """With nothing for the GPU installed info still works, and names the command that brings each thing."""
    env = {name: os.environ.pop(name) for name in ("CUPY_SDPA_CUDNN",) if name in os.environ}
    try:
        done = python("info", cwd=folder, code=BARE)
    finally:
        os.environ.update(env)
    assert (done.returncode, done.stderr) == (0, "")
    can = done.stdout.split("this machine can run:")[1]
    for title in ("CuPy is not installed", "cuda-python is not installed", "cuDNN is not found"):
        assert re.search(rf"{title}: pip install 'cupy-sdpa\[cuda1[23]\]'", can)
    assert re.search(r"numpy +yes", can)


def test_demo_in_a_bare_environment(folder):
    """With nothing for the GPU installed the demo runs on numpy and says why."""
    done = python("demo", "--seq", "40", cwd=folder, code=BARE)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"engine +numpy \((no GPU: |CuPy is not installed: pip install)", done.stdout)


@pytest.mark.parametrize(
    "failure", ["ImportError('libx.so.1 is missing')", "PermissionError(13, 'Permission denied', '/cache')"]
)
def test_a_module_that_is_broken(failure, folder, monkeypatch):
    """A module that is installed but cannot be imported is told from one that is missing, with its own words."""
    (folder / "broken.py").write_text(f"raise {failure}")
    monkeypatch.syspath_prepend(folder)
    assert re.search("cannot be imported: .*(libx|Permission denied)", machine.imported("broken"))
    assert machine.imported("broken_and_missing") == machine.imported("missing.too") == "not installed"


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "'cupy-sdpa[cuda12]'"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "'cupy-sdpa[cuda13]'"),
        ("something else", "'cupy-sdpa[cuda12]' (or [cuda13])"),
    ],
    ids=["cuda12", "cuda13", "unknown"],
)
def test_the_driver_chooses_the_extra(driver, extra, folder, monkeypatch):
    """The pip line is for the CUDA that the driver can run, where it says."""
    (folder / "version").write_text(f"{driver}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    monkeypatch.setattr(machine, "_DRIVER", folder / "version")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert machine.pip() == f"pip install {extra}"
    assert machine.no_gpu() is None  # a driver is there: only CuPy could tell


@pytest.mark.parametrize("override", [False, True])
def test_cudnn_that_cannot_be_found(override, monkeypatch):
    """A missing cuDNN has the pip line as its remedy; a path that was set wrongly is said to be wrong."""

    def library():
        raise CudnnError("CUPY_SDPA_CUDNN asks for x, which is not there. Searched:\n  here: no")

    monkeypatch.setattr(machine, "library", library)
    monkeypatch.delenv("CUPY_SDPA_CUDNN", raising=False)
    if override:
        monkeypatch.setenv("CUPY_SDPA_CUDNN", "x")
    (reason,) = [reason for reason in machine.obstacles() if reason.startswith("cuDNN")]
    assert ("asks for x, which is not there." if override else "pip install") in reason


# plan and support

SHAPES = """
[[attention]]
q = [64, 4, 128, 1]
k = [64, 4, 128, 1]
v = [64, 4, 128, 1]
dtype = "bfloat16"
passes = ["forward", "backward"]
"""


@pytest.mark.cudnn
def test_plan_fills_a_store(folder, capsys):
    """Two plans in the folder, told with their engine; again, they are there already; a refusal gives 1."""
    (folder / "shapes.toml").write_text(SHAPES)
    words = ["plan", "--gpu", "h200", "shapes.toml", "-o", "plans", "-j", "1"]
    assert main(words) == 0
    said = " ".join(" ".join(lines(capsys)).split())
    assert said.count("planned ") == 2
    assert re.search(r"engine 2, \d+ ms, \d+ bytes", said)
    assert len(list((folder / "plans").glob("*.plan"))) == 2
    assert main(words) == 0
    assert " ".join(" ".join(lines(capsys)).split()).count("already there") == 2
    (folder / "shapes.toml").write_text(SHAPES.replace("bfloat16", "float32"))
    assert main(words) == 1
    said = " ".join(lines(capsys))
    assert "2 refused" in said
    assert "q, k and v are float32" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.toml", "--gpu", "h200"], "No such file"),
        (["shapes.toml", "--gpu", "h201"], "no GPU named 'h201'"),
        (["bad.toml", "--gpu", "h200"], "bad.toml is not a TOML file"),
        (["shapes.toml", "--gpu", "bad.toml"], "bad.toml does not describe a GPU"),
        (["bytes", "--gpu", "h200"], "bytes is not a TOML file"),
        (["shapes.toml", "--gpu", "bytes"], "bytes does not describe a GPU"),
        (["shapes.toml", "--gpu", "h200", "--cudnn", "./missing.so.9"], "--cudnn ./missing.so.9: there is no such file"),
        (["shapes.toml", "--gpu", "h200", "--cudnn", "8.9"], "'8.9' is not supported: this package needs cuDNN 9"),
    ],
    ids=["no_file", "no_gpu", "no_toml", "no_description", "bytes", "bytes_for_a_gpu", "no_library", "old_cudnn"],
)
def test_plan_refuses(words, said, folder, capsys):
    """One line, exit status 2, no folder."""
    (folder / "shapes.toml").write_text(SHAPES)
    (folder / "bad.toml").write_text("][")
    (folder / "bytes").write_bytes(b"\xda\x00")
    assert main(["plan", *words, "-o", "plans"]) == 2
    assert said in complaint(capsys)
    assert not (folder / "plans").exists()


def test_support_prints_the_table(capsys):
    """For people, and as the page of the documentation; for an older version, and not for nonsense."""
    assert main(["support"]) == 0
    printed = "\n".join(lines(capsys))
    assert "backward-one-row" in printed
    assert "masks of positions, &, |, ~, ^       yes      yes" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert not set("`#") & set(printed)
    assert main(["support", "--markdown", "--cudnn", "9.25.1"]) == 0
    assert "cuDNN 9.25.1:" in "\n".join(lines(capsys))
    assert main(["support", "--cudnn", "new"]) == 2
    assert "'new' is not a cuDNN version" in complaint(capsys)


def test_describing_needs_a_gpu(capsys):
    """Without one: what is missing, and exit status 2."""
    if not machine.obstacles():
        pytest.skip("there is a GPU here")
    assert main(["info", "--describe"]) == 2
    assert "there is no GPU to describe" in complaint(capsys)


@pytest.mark.gpu
def test_a_description_read_off_the_card_plans(folder, capsys):
    """What info --describe prints is a GPU that plan takes, and its plans are found by calls on the card."""
    assert main(["info", "--describe"]) == 0
    (folder / "card.json").write_text("\n".join(lines(capsys)))
    (folder / "shapes.toml").write_text(SHAPES)
    assert main(["plan", "--gpu", "card.json", "shapes.toml", "-o", "plans"]) == 0
    import cupy

    from cupy_sdpa.device import cupy_runtime
    from cupy_sdpa.offline import planner

    assert planner.load_target("card.json").model == cupy_runtime.model(cupy.cuda.runtime.getDevice())


# what is written down


def written_commands():
    """Every command line of the README, the docs, the results and the helps, optional words in, with a name for each N."""
    paths = [ROOT / "README.md", ROOT / "benchmarks" / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {}
    for path in [*paths, *sorted((ROOT / "cupy_sdpa" / "_cli").glob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "results":  # commands are within its sentences, and go on in the next line
            text = re.sub(r"\n\s*", " ", text)
        for words in re.findall(r"(?:python3? -m cupy_sdpa|(?<![\w-])cupy-sdpa) ([a-z]+ ?[^`\n]*)", text):
            command = re.split(r"  |[`>#;:\"]| \.\.\.| && |, ", words.replace(" ...]", "]"))[0]
            command = re.sub(r"[\[\]]", "", command)
            command = re.sub(r"\bN\b", "3", re.sub(r"\bNAME\b", "vit", command)).strip(" .)(")
            found.setdefault(command, path.name)
    return found


@pytest.mark.parametrize("command", written_commands())
def test_every_command_that_is_written_down_is_one(command):
    """The parser takes each as it stands; of one that is only named it has the help."""
    words = command.split()
    status = 0
    try:
        cli._parser().parse_args([*words, "--help"] if len(words) == 1 else words)
    except SystemExit as ended:
        status = ended.code
    assert status == 0


def test_the_commands_are_found():
    """All of them, with their words."""
    commands = written_commands()
    assert {command.split()[0] for command in commands} == {
        "demo",
        "run",
        "info",
        "explain",
        "plan",
        "support",
        "bench",
        "check",
    }
    assert "plan --gpu h200 shapes.toml -o plans/" in commands
    assert "demo --causal --seq 3 --dtype bfloat16" in commands


@pytest.mark.parametrize(
    ("name", "said"), [("shapes.toml", "shapes.toml: File exists"), ("open", "open: others may write to it"), ("no/x", "no: ")]
)
def test_plan_refuses_a_folder_that_cannot_keep_plans(name, said, folder, capsys, monkeypatch):
    """Before anything is planned; nothing that is there is changed."""
    (folder / "shapes.toml").write_text(SHAPES)
    (folder / "open").mkdir(mode=0o777)
    (folder / "open").chmod(0o777)
    (folder / "no").write_text("")
    monkeypatch.setattr("cupy_sdpa.offline.planner.Planner", None)
    assert main(["plan", "--gpu", "h200", "shapes.toml", "-o", name]) == 2
    assert said.rpartition(": ")[2] in complaint(capsys)
    assert (folder / "shapes.toml").read_text() == SHAPES


def test_passes_may_be_one_word(folder):
    """A string stands for a list of itself."""
    (folder / "shapes.toml").write_text(SHAPES.replace('passes = ["forward", "backward"]', 'passes = "backward"'))
    assert 'passes = "backward"' in (folder / "shapes.toml").read_text()
    assert all(asked.backward for asked in store.read_problems(folder / "shapes.toml"))


MEANINGLESS = {
    "cpu": (["bench", "--cpu", "--presets", "vit"], "--presets has no meaning with --cpu"),
    "from": (["bench", "--from", "x.csv", "--tune"], "--tune has no meaning with --from"),
    "list": (["bench", "--list", "--rounds", "3"], "--rounds has no meaning with --list"),
    "support": (["support", "--pairs"], "nothing is planned without --measure"),
    "library": (["support", "--measure", "--cudnn", "9.19"], "--cudnn 9.19: there is no such file"),
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_an_option_without_a_meaning_is_refused(name, capsys):
    """It is not left out in silence."""
    words, said = MEANINGLESS[name]
    assert main(words) == 2
    assert said in complaint(capsys)


@pytest.mark.parametrize("command", ["", "demo", "run", "info", "explain", "plan", "support", "bench"])
def test_help_fits_a_narrow_terminal(command, capsys, monkeypatch):
    """80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*filter(None, [command]), "--help"])
    assert max(map(len, lines(capsys))) <= 80


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_tables_fit_the_terminal(columns, capsys, monkeypatch):
    """As far as single words do, and 100 columns are enough for everybody."""
    monkeypatch.setenv("COLUMNS", str(columns))
    words = {"support": ["support"], "explain": ["explain", "64,8,1000,2", "--gpu", "h200", "--cudnn", "9.19"]}
    for asked in words.values():
        main(asked)
        long = [line for line in lines(capsys) if len(line) > min(columns, 100)]
        assert not [line for line in long if len(line.split()) > 1 and "https://" not in line]


def test_a_terminal_without_the_letters_of_a_formula(folder):
    """What it cannot show is replaced, and nothing fails."""
    command = [sys.executable, "-m", "cupy_sdpa", "explain", "64,2,16,1", "--gpu", "h200", "--cudnn", "9.19"]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0
    assert b"S = Q K?" in done.stdout
    assert not done.stderr
