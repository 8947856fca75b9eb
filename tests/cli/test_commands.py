"""The command line as a whole, and the commands explain, plan and support."""

import inspect
import os
import re
from pathlib import Path

import pytest
from command_line import ROOT, python, run
from engines import one_in
from tiers import missing

import cupy_sdpa
from benchmarks.__main__ import COMMANDS
from benchmarks.__main__ import main as benchmarks

pytestmark = pytest.mark.usefixtures("folder")

PACKAGE = ("demo", "info", "explain", "plan", "support", "check")
#: The path of a cuDNN that is not there: explain then uses the support table, which takes no time.
NONE = "/missing/libcudnn.so.9"


# help and exit status


@pytest.mark.parametrize("command", ["", *PACKAGE])
def test_help(command):
    """The help of every command has examples, and fits 80 columns."""
    done = run(f"{command} --help", columns=80)
    assert done.status == 0
    assert f"python -m cupy_sdpa {command}" in done.out.split("example")[1]
    assert max(map(len, done.lines)) <= 80


def test_no_command_prints_the_help():
    """Without a command the help is printed, and the status is 2."""
    done = run("")
    assert done.status == 2
    assert "python -m cupy_sdpa demo" in done.err
    assert cupy_sdpa.__version__ in run("--version").out


@pytest.mark.slow
def test_as_a_module(folder):
    """The commands work as python -m cupy_sdpa, with warnings as errors, and in a terminal that prints only ASCII."""
    command = ["explain", "64,2,16,1", "--gpu", "h200", "--steps"]
    done = python("-m", "cupy_sdpa", *command, cwd=folder, PYTHONIOENCODING="ascii", CUPY_SDPA_CUDNN=NONE)
    assert done.status == 0
    assert "S = Q K?" in done.text


def test_a_closed_pipe(folder):
    """A command whose output pipe is closed, as by head, ends without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = python("-m", "cupy_sdpa", "demo", "--seq", "9", "--engine", "numpy", cwd=folder, stdout=writer)
    finally:
        os.close(writer)
    assert (done.status, done.err) == (141, "")


@pytest.mark.parametrize("command", ["support", "explain 64,8,1000,2 --gpu h200 --steps"])
def test_tables_fit_the_terminal(command):
    """Lines are at most as wide as the terminal; single long words excepted."""
    long = [line for line in run(command, columns=60, CUPY_SDPA_CUDNN=NONE).lines if len(line) > 60]
    assert not [line for line in long if len(line.split()) > 1 and "https://" not in line]


#: Command lines, and a part of the error.
WRONG = {
    "support --cudnn new": "'new' is not a cuDNN version",
    "explain 64,8,100,2 --gpu abacus": "abacus",
    "explain 64,8,100,2 --gpu h200 --dtype int8": "int8",
    "explain 64,8,100": "64,8,100 has 3 numbers; a shape has 4: D,H,S,B",
    "explain 64,8,100,2 --kv-heads 5 --gpu h200": "--kv-heads is 5, and q has 8 heads: 8 must be a multiple of it, such as --kv-heads 4",
    "explain 64,8,100,2 --keys 32,8,100,2 --gpu h200": "shapes are (head_dim, heads, seq, batch). --layout is the order of the axes",
    "explain 64,8,100 --gpu h200": "64,8,100 has 3 numbers; a shape has 4: D,H,S,B",
    "explain 1,32,4096,128 --gpu h200": "write 128,32,4096,1, or add --layout bhsd",
    "explain 64,8,100,2 --gpu h200 --kv-heads 2 --keys 64,2,9,2": "--kv-heads and --keys are given",
    "explain 64,8,100,2 --gpu h200 --lengths --packed": "--lengths and --packed are given",
    "explain 64,8,100,2 --gpu h200 --num-splits 3": "--num-splits is given without --pages",
    "explain 64,8,1,4 --keys 64,8,900,2 --pages 64 --gpu h200": "--keys has batch 2, and q has batch 4",
    "explain 64,8,1,4 --keys 64,8,900,2 --gpu h200": "--keys has batch 2, and q has batch 4",
    "explain 64,8,100,2 --values 64,3,100,2 --gpu h200": "numbers of heads",
    "plan --gpu h200 -o plans": "pass shapes such as 128,32,4096,1, or --saved FILE",
    "plan 64,4,128,1 --saved bad.json --gpu h200 -o plans": "pass shapes such as 128,32,4096,1, or --saved FILE",
    "plan --saved missing --gpu h200 -o plans": "No such file",
    "plan --saved bad.json --gpu h200 -o plans": "bad.json, line 1 is not a problem",
    "plan --saved bytes --gpu h200 -o plans": "bytes, line 1 is not a problem",
    "plan 64,4,128,1 --gpu h201 -o plans": "no GPU named 'h201'; the names are a10, a100",
    "plan 64,4,128,1 --gpu bad.json -o plans": "bad.json does not describe a GPU",
    "plan 64,4,128,1 --gpu bytes -o plans": "bytes does not describe a GPU",
    "plan 64,4,128,1 --gpu h200 --cudnn ./none.so.9 -o plans": "--cudnn ./none.so.9: there is no such file",
    "plan 64,4,128,1 --gpu h200 --cudnn 8.9 -o plans": "'8.9' is not supported: this package needs cuDNN 9",
    "plan 64,4,128,1 --gpu h200 -o bytes": "plans cannot be stored in bytes: File exists",
    "plan 64,4,128,1 --gpu h200 -o open": "plans cannot be stored in open: other users may write to it",
    "plan 64,4,128,1 --gpu h200 -o bytes/x": "plans cannot be stored in bytes/x: Not a directory",
    "demo --engine numpy --plot none/map.png": "cannot write none/map.png: ",
    "demo --engine numpy --plot .": "cannot write .: ",
    "check --minutes 0": "--minutes",
    "check --seed -1": "--seed",
    "check --case Case(sq=f)": "--case",
    "check --json no/such/folder/x.json": "cannot write no/such/folder/x.json: No such file or directory",
    "check --json .": "cannot write .: ",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_command_lines(command, folder):
    """The error is one line before anything is computed and printed, and no file is changed or created."""
    (folder / "bad.json").write_text("][")
    (folder / "bytes").write_bytes(b"\xda\x00")
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    assert WRONG[command] in run(command).complaint
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.cudnn
def test_a_plan_that_cannot_be_stored(folder):
    """It counts as refused, with the reason, and the exit status says so."""
    command = "plan 64,4,128,1 --gpu h200 -o plans"
    assert run(command).status == 0
    (stored,) = (folder / "plans").glob("*.plan")
    stored.write_text("of another program")
    done = run(command)
    assert done.status == 1
    assert "0 plans, 1 refused" in done.text
    assert "plans cannot be stored in" in done.text
    assert stored.read_text() == "of another program"


#: Command lines that the parser rejects, and the end of its error.
UNREADABLE = {
    "explain 64,8,x,2": "'64,8,x,2' is not a shape such as 128,32,4096,1",
    "explain 64,8,100,2 --window 1": "'1' is not a window such as 127,0 or 127,",
    "explain 64,2,128,1 --causl": "unrecognized arguments: --causl",
    "info --causl": "unrecognized arguments: --causl",
    "support --causl": "unrecognized arguments: --causl",
}


@pytest.mark.parametrize("command", UNREADABLE)
def test_words_that_cannot_be_parsed(command):
    """The error comes after the command's usage, not the usage of python -m cupy_sdpa, which lists no options."""
    done, name = run(command), command.split()[0]
    assert done.status == 2
    assert done.err.startswith(f"usage: python -m cupy_sdpa {name} ")
    assert done.err.endswith(f"{UNREADABLE[command]}\n")


# explain, plan and support


def test_the_steps_of_a_problem():
    """explain --json has the problem with its options, the formulas of the steps, the inputs and the outputs."""
    options = "--backward --window 127, --causal bottom_right --softcap 20 --deterministic --values 32,4,500,2"
    done = run(f"explain 64,8,1000,2 --keys 64,4,500,2 {options} --gpu h200 --json", CUPY_SDPA_CUDNN=NONE)
    found = done.json
    assert done.status == (0 if found["runs"] else 1)
    for words in ("deterministic backward attention", "127", "softcap"):
        assert words in found["problem"]
    assert any("dV = " in step["formula"] for step in found["steps"])
    assert sorted(name for step in found["steps"] for name in step["outputs"]) == ["dk", "dq", "dv"]
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["inputs"]}
    assert (shapes["q"], shapes["v"]) == ([64, 8, 1000, 2], [32, 4, 500, 2])


#: The options of a problem, and a part of its description; or its sizes (D, Dv, Hq, Hkv, Sq, Skv, B).
ASKED = {
    "--layout bhsd": "batch 64, 8 query",
    "--kv-heads 2": "8 query and 2 key/value heads",
    "--keys 64,2,50,2 --mask --bias 50,1,8,1": "50 keys, head dim 64, a mask, a bias",
    "--lengths --sinks --alibi --stats": "at most 100 queries, at most 100 keys, head dim 64, no mask, ALiBi, sinks, with log-sum-exp",
    "--packed --causal": "2 packed sequences, 8 query and 8 key/value heads, at most 100 queries",
    "--keys 64,8,70,2 --pages 16": "at most 128 keys, head dim 64, no mask, pages of 16 keys",
    "--keys 64,8,70,2 --pages 16 --packed": "2 packed sequences, 8 query and 8 key/value heads, at most 100 queries, at most 128 keys",
    "--dropout 0.1 --softcap 5": "softcap, dropout 0.1",
    "--backward --bias --dbias --sinks --dsinks": "with the gradient of the bias, with the gradient of the sinks",
    "--bucket 64 --scale 0.5": "at most 128 queries, at most 128 keys",
    "--bucket power_of_two": "at most 128 queries",
    "--keys 64,8,70,2 --pages 16 --num-splits 2": "pages of 16 keys",
    "--layout bshd --packed": "64 packed sequences, 100 query",
    "--layout bshd --keys 64,80,100,2 --pages 16": "batch 64, 100 query and 100 key/value heads, at most 8 queries, at most 128 keys",
}


@pytest.mark.parametrize("options", one_in(6, ASKED))
def test_the_options_of_a_problem(options):
    """Masks, biases, pages, packed sequences, dropout, sinks and layouts can be asked for."""
    assert ASKED[options] in run(f"explain 64,8,100,2 {options} --gpu h200 --cudnn 9.19 --json").json["problem"]


def test_every_option_can_be_asked_for():
    """Every option of problem() except functions, their arrays and what changes no plan has an option of the command."""
    names = {"alibi_slopes": "alibi", "dropout_p": "dropout", "seq_lens_q": "lengths", "seq_lens_kv": "lengths",
             "cu_seqlens_q": "packed", "cu_seqlens_kv": "packed", "max_seqlen_q": "packed", "max_seqlen_kv": "packed",
             "page_table": "pages", "return_stats": "stats", "k": "keys", "v": "values",
             "return_dbias": "dbias", "return_dsinks": "dsinks"}  # fmt: skip
    left_out = {"q", "score_mod", "mask_mod", "tensors", "return_dtensors", "seed", "offset", "dropout_mask", "out_dtype",
                "batch_invariant", "return_dscale", "dstats"}  # fmt: skip
    text = run("explain --help").out
    for name in inspect.signature(cupy_sdpa.problem).parameters.keys() - left_out:
        assert f"--{names.get(name, name).replace('_', '-')}" in text, name


def test_the_verdict_comes_first():
    """Whether it runs, the reasons and the fix; the steps on request, after them."""
    for shape, verdict in (("64,8,1000,2", "runs on cuDNN ("), ("12,8,1000,2", "cannot run on cuDNN (")):
        done = run(f"explain {shape} --gpu h200 --cudnn 9.19")
        assert done.text.startswith(verdict)
        assert "S = Q K" not in done.text
        assert len(done.lines) < 10
        steps = run(f"explain {shape} --gpu h200 --cudnn 9.19 --steps").lines
        assert steps[: len(done.lines)] == done.lines
        assert "S = Q K" in "".join(steps)


def test_only_one_command_is_imported():
    """Each command starts without the modules of the others, and without CuPy."""
    code = "import sys; from cupy_sdpa.__main__ import main; "
    code += "main(['explain', '64,8,9,2', '--gpu', 'h200', '--cudnn', '9.19']); print(sorted(x for x in sys.modules if x == 'cupy' or x.startswith(('cupy_sdpa.cli.', 'cupy_sdpa.check'))))"
    loaded = python("-c", code, cwd=ROOT, CUPY_SDPA_CUDNN=NONE).lines[-1]
    assert "'cupy_sdpa.cli.explain_command'" in loaded
    for absent in ("demo", "plan'", "support", "cupy_sdpa.check", "'cupy'"):
        assert absent not in loaded


@pytest.mark.parametrize(
    ("shape", "status"), [("64,8,1000,2", 0), pytest.param("12,8,1000,2", 1, marks=pytest.mark.slow)], ids=["runs", "refused"]
)
def test_explain_without_cudnn(shape, status):
    """The support table of the newest version is used, and the report says so; a refusal has the fix and status 1."""
    done = run(f"explain {shape} --gpu h200", CUPY_SDPA_CUDNN=NONE)
    assert done.status == status
    assert "; from the support table alone, not planned: libcudnn.so.9 was not found" in done.text
    assert "--cudnn VERSION" in done.text
    assert ("pad axis 0 with 4 zeros" in done.text) == bool(status)


def test_without_a_gpu():
    """explain asks for the name of a GPU, and info has no GPU to describe."""
    if not missing("gpu"):
        pytest.skip("this machine has a GPU")
    assert "name one with --gpu" in run("explain 64,8,1000,2").complaint
    assert "there is no GPU to describe" in run("info --describe").complaint


@pytest.mark.slow
@pytest.mark.cudnn
def test_planning(folder):
    """plan stores a plan, which a second run finds; what cannot run has its reason and status 1."""
    command = "plan 64,4,128,1 --gpu h200 -o plans -j 1"
    done = run(command)
    assert done.status == 0
    assert re.search(r"planned .* engine \d+, \d+ ms, \d+ bytes", done.text)
    assert len(list((folder / "plans").glob("*.plan"))) == 1
    assert "already stored" in run(command).text
    done = run(f"{command} --dtype float32")
    assert done.status == 1
    assert "1 refused" in done.text
    assert "q, k and v are float32" in done.text


def test_the_support_table():
    """As text without Markdown, a bug with two rows printed once; also of another version."""
    printed = run("support", columns=200).lines
    assert max(map(len, printed)) <= 100
    assert "  forward, head dim 64: yes" in printed
    assert "  gradients, one query, head and batch item: no (backward-one-row)" in printed
    assert not set("`#") & set("".join(printed))
    assert sum(line.startswith("  single-key-difference: ") for line in printed) == 1
    assert run("support --cudnn 9.25.1").lines[0].startswith("cuDNN 9.25.1 ")


@pytest.mark.gpu
def test_a_description_read_off_the_card_plans(folder):
    """plan accepts the output of info --describe, and plans for the GPU of that name."""
    import cupy

    Path("card.json").write_text(run("info --describe").out)
    found = run("plan 64,4,128,1 --gpu card.json -o plans --json").json
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    (gpu,) = (problem["gpu"] for problem in found["problems"])
    assert gpu.startswith(f"{name}, compute capability")


# the commands in the documents

PATHS = [
    ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "cupy_sdpa" / "cli").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py")),
]  # fmt: skip


def written_commands(program):
    """The command lines of a program in the documents: optional words without brackets, placeholders replaced by values."""
    found = set()
    for path in PATHS:
        text = path.read_text(encoding="utf-8")
        for words in re.findall(rf"(?:{program}) ([a-z]+ ?[^`\n]*)", text):
            command = re.split(r"  |[`>#;:\"]| \.\.\.| && |, ", words.replace(" ...]", "]"))[0]
            command = re.sub(r"[\[\]]", "", command)
            found.add(re.sub(r"\bN\b", "3", re.sub(r"\bNAME\b", "vit", command)).strip(" .)("))
    return found


def test_every_command_in_the_documents_is_accepted():
    """The parser has nothing against a command but an option that the test adds; and all commands are found."""
    found = written_commands(r"python3? -m cupy_sdpa|(?<![\w-])cupy-sdpa")
    assert {command.split()[0] for command in found} == set(PACKAGE)
    assert {"plan 128,32,4096,1 --causal --gpu h200 -o plans/", "check --saved problems.jsonl"} <= found
    for command in found:
        if " " in command and "--help" not in command:
            assert run(f"{command} --none").err.endswith("error: unrecognized arguments: --none\n"), command
    found = written_commands("python3? -m benchmarks")
    assert {command.split()[0] for command in found} == set(COMMANDS)
    for command in found:
        if command.startswith("compare "):
            assert run(f"{command} --none", main=benchmarks).err.endswith("unrecognized arguments: --none\n"), command
