"""What runs where: named problems, asked of the support table for every GPU, and of cuDNN itself, to see that it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..explain import problem
from ..problem.problem import Problem
from ..problem.subproblems import subproblems
from ..score_fn.ufuncs import FUNCTIONS
from ..support import gpus
from ..support.rules import MINIMUM_CAPABILITY, RULES
from ..support.known_bugs import BUGS, GUARDS, Bug
from ..support.why_not import unverified_rules, why_not
from ..version import MINIMUM_CUDNN, version_text
from .planner import Planner, load_target


def _problem(
    d: int = 128, dv: int | None = None, hkv: int = 8, sq: int = 512, skv: int = 512, b: int = 2, **options: Any
) -> Problem:
    dtype = options.pop("dtype", "bfloat16")
    hq = options.pop("hq", 8)
    return problem((d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b), dtype=dtype, **options)


def _packed(queries: int = 512, d: int = 128, **options: Any) -> Problem:
    starts: dict[str, Any] = {"cu_seqlens_q": (5,), "cu_seqlens_kv": (5,), "max_seqlen_q": queries, "max_seqlen_kv": 512}
    return problem((d, 8, 4 * queries), (d, 2, 2048), (d, 2, 2048), dtype="bfloat16", **starts, **options)


#: A problem for everything that can be asked for, by its words.
PROBES: dict[str, Problem] = {
    "forward, head dim 64": _problem(64),
    "forward, head dim 128": _problem(),
    "forward, head dim 256": _problem(256),
    "forward, head dim 192, values 128": _problem(192, 128),
    "forward, head dim 12": _problem(12),
    "forward, float16, causal, grouped queries": _problem(hkv=2, dtype="float16", causal=True),
    "forward, log-sum-exp": _problem(return_stats=True),
    "forward, lengths that 64 does not divide": _problem(sq=333, skv=777),
    "forward, causal from the bottom right": _problem(sq=333, skv=777, causal="bottom_right"),
    "forward, window": _problem(window=(100, 50)),
    "forward, causal window from the bottom right": _problem(sq=333, skv=777, causal="bottom_right", window=(100, None)),
    "forward, lengths given": _problem(seq_lens=True, causal=True),
    "forward, lengths given, window from the bottom right": _problem(seq_lens=True, window=(100, 50, "bottom_right")),
    "forward, lengths in buckets, causal": _problem(sq=333, skv=777, causal=True, bucket=256),
    "forward, one query": _problem(hkv=2, sq=1, skv=4096),
    "forward, packed sequences, causal": _packed(causal=True),
    "forward, packed sequences of one query, log-sum-exp": _packed(queries=1, return_stats=True),
    "forward, bias, ALiBi, softcap": _problem(bias=(512, 512, 8, 1), alibi_slopes=True, softcap=30.0, causal=True),
    "forward, mask of keys": _problem(mask=(512, 1, 1, 2)),
    "forward, sinks, window": _problem(sinks=True, window=(100, 0)),
    "forward, dropout": _problem(dropout_p=0.1, seed=0),
    "forward, maximum and sum": _problem(return_stats="max_sumexp"),
    "gradients, head dim 64": _problem(64, backward=True),
    "gradients, head dim 128": _problem(backward=True),
    "gradients, head dim 128, grouped queries, causal": _problem(hkv=2, causal=True, backward=True),
    "gradients, head dim 256": _problem(256, backward=True),
    "gradients, head dim 192, values 128": _problem(192, 128, backward=True),
    "gradients, causal window": _problem(causal=True, window=(100, None), backward=True),
    "gradients, causal from the bottom right": _problem(sq=333, skv=777, causal="bottom_right", backward=True),
    "gradients, window, lengths given": _problem(window=(100, 50, "bottom_right"), seq_lens=True, backward=True),
    "gradients, lengths in buckets": _problem(sq=333, skv=777, backward=True, bucket=256),
    "gradients, deterministic": _problem(backward=True, deterministic=True),
    "gradients, packed sequences, grouped queries": _packed(backward=True),
    "gradients, packed sequences, head dim 72": _packed(d=72, backward=True),
    "gradients, bias and its own": _problem(bias=(512, 512, 8, 1), backward=True, return_dbias=True),
    "gradients, mask of keys": _problem(mask=(512, 1, 1, 2), backward=True),
    "gradients, ALiBi, softcap, dropout": _problem(
        alibi_slopes=True, softcap=30.0, dropout_p=0.1, seed=0, causal=True, backward=True
    ),
    "gradients, sinks and their own": _problem(sinks=True, backward=True, return_dsinks=True),
    "gradients, one query": _problem(sq=1, skv=4096, backward=True),
    "gradients, one query, head and batch entry": _problem(hq=1, hkv=1, sq=1, b=1, backward=True),
    "gradients, deterministic, head dim 192, values 128": _problem(192, 128, backward=True, deterministic=True),
    "gradients, deterministic, head dim 136, values 72": _problem(136, 72, backward=True, deterministic=True),
    "forward, one query and key, integers of tensors": _problem(
        sq=1, skv=1, score_mod=lambda s, b, h, i, j, t: s + t[b], tensors={"t": np.ones(2, np.int32)}
    ),
    "gradients, one query and key, scores less an array of one element": _problem(
        sq=1, skv=1, backward=True, score_mod=lambda s, b, h, i, j, t: s - t, tensors={"t": ()}
    ),
}


_SQ, _SKV = 333, 777
#: The options whose pairs are looked at, forward and backward, by their words. Arrays are given as shapes.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (100, 50)},
    "lengths": {"seq_lens": True},
    "packed": {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": _SQ, "max_seqlen_kv": _SKV},
    "bias": {"bias": (_SKV, _SQ, 8, 1)},
    "mask": {"mask": (_SKV, _SQ, 1, 2)},
    "mask of keys": {"mask": (_SKV, 1, 1, 2)},
    "ALiBi": {"alibi_slopes": True},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.1, "seed": 0},
    "max and sum": {"return_stats": "max_sumexp"},
    "bias's gradient": {"bias": (_SKV, _SQ, 8, 1), "return_dbias": True},
    "sinks' gradient": {"sinks": True, "return_dsinks": True},
    "deterministic": {"deterministic": True},
}
_FORWARD_ONLY = {"max and sum"}
_BACKWARD_ONLY = {"bias's gradient", "sinks' gradient", "deterministic"}


def pair(one: str, other: str, *, backward: bool) -> Problem | None:
    """The problem with two options, or with one given twice; None where they exclude each other or belong to the other pass."""
    if excluded(one, other, backward=backward):
        return None
    first, second = OPTIONS[one], OPTIONS[other]
    if "packed" in (one, other):
        shapes = (128, 8, 2 * _SQ), (128, 2, 2 * _SKV), (128, 2, 2 * _SKV)
        return problem(*shapes, dtype="bfloat16", backward=backward, **(first | second))
    return _problem(hkv=2, sq=_SQ, skv=_SKV, backward=backward, **(first | second))


def excluded(one: str, other: str, *, backward: bool) -> bool:
    """Whether two options exclude each other, or belong to the other pass."""
    if {one, other} & (_FORWARD_ONLY if backward else _BACKWARD_ONLY):
        return True
    first, second = OPTIONS[one], OPTIONS[other]
    return any(first[name] != second[name] for name in first.keys() & second.keys()) or {one, other} == {"lengths", "packed"}


def pairs() -> dict[str, Problem]:
    """Every pair of options in each direction, and every option alone, by its words."""
    found = {}
    for backward in (False, True):
        for number, one in enumerate(OPTIONS):
            for other in list(OPTIONS)[number:]:
                if asked := pair(one, other, backward=backward):
                    words = one if one == other else f"{one} and {other}"
                    found[f"{'gradients' if backward else 'forward'}, {words}"] = asked
    return found


def _of_score(function: Callable[[Any], Any]) -> dict[str, Any]:
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: function(score)}


def _mask(function: Callable[..., Any], *shape: int) -> dict[str, Any]:
    tensors = {"tensors": {"x": np.zeros(shape, np.int32)}} if shape else {}
    return {"mask_mod": function, **tensors}


def _reads(function: Callable[..., Any], *shape: int) -> dict[str, Any]:
    return {"score_mod": function, "tensors": {"x": shape}}


#: What functions of the caller's can be made of, by its words.
OPERATIONS: dict[str, dict[str, Any]] = {
    "`s + s * s - 3`, `-s`": _of_score(lambda s: -(s + s * s - 3)),
    "`s / (1 + s * s)`, `1 / s`": _of_score(lambda s: s / (1 + s * s)),
    "`s ** 3`, `np.power`": _of_score(lambda s: (1 + s * s) ** s),
    "`abs`, `np.sign`": _of_score(lambda s: abs(s) + np.sign(s)),
    "`np.maximum`, `np.minimum`, `np.clip`": _of_score(lambda s: np.clip(s, -1.5, 1.5)),
    "`np.exp`, `np.exp2`, `np.expm1`": _of_score(lambda s: np.exp(0.5 * s)),
    "`np.log`, `np.log1p`, `np.log2`, `np.log10`": _of_score(lambda s: np.log(1 + s * s)),
    "`np.logaddexp`": _of_score(lambda s: np.logaddexp(s, 0.5)),
    "`np.sqrt`, `np.hypot`": _of_score(lambda s: np.sqrt(1 + s * s)),
    "`s ** -0.5`": _of_score(lambda s: (1 + s * s) ** -0.5),
    "`np.tanh`": _of_score(np.tanh),
    "`scipy.special.expit`": _of_score(lambda s: FUNCTIONS["expit"](s)),
    "`scipy.special.erf`": _of_score(lambda s: FUNCTIONS["erf"](s)),
    "`np.sinh`, `np.cosh`": _of_score(lambda s: np.sinh(0.5 * s)),
    "`np.sin`, `np.cos`": _of_score(np.sin),
    "`np.tan`": _of_score(np.tan),
    "`np.floor`, `np.ceil`, `//`, `%`": _of_score(lambda s: s % 1.5 + np.ceil(s)),
    "`np.where(s > 0, ...)`, `==`, `<=`": _of_score(lambda s: np.where((s > 0) | (s <= -1), s, 0.5 * s)),
    "places as numbers": {"score_mod": lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) * 0.1 + b - h},
    "`x[h]`, `x[b, h]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s * x[h], 8),
    "`x[kv_idx]`, `x[b, h, kv_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s + x[b, kv_idx], 2, 512),
    "`x[q_idx]`, `x[b, h, q_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s * x[b, h, q_idx], 2, 8, 512),
    "`x[h, q_idx, kv_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s + x[h, q_idx, kv_idx], 8, 512, 512),
    "masks by places, `&`, `|`, `~`, `^`": _mask(lambda b, h, q_idx, kv_idx: (q_idx % 3 == 0) ^ ~(kv_idx // 64 == q_idx // 64)),
    "masks by whole numbers of arrays": _mask(lambda b, h, q_idx, kv_idx, x: x[b, q_idx] == x[b, kv_idx], 2, 512),
}


def operations() -> dict[str, Problem]:
    """A problem for every operation of a function, in each direction, by its words."""
    return {
        f"{direction}, {words}": _problem(backward=direction == "gradients", **options)
        for direction in ("forward", "gradients")
        for words, options in OPERATIONS.items()
    }


@dataclass(frozen=True)
class Finding:
    """What the table says of a problem on a GPU, and what cuDNN did.

    Attributes:
        probe: the words of the problem.
        gpu: the name of the description.
        rules: the rows of the table that refuse it.
        measured: ``engine`` and its number, or cuDNN's refusal.
        agree: whether they say the same. A row about wrong results agrees with any plan: planning cannot show it.
    """

    probe: str
    gpu: str
    rules: tuple[str, ...]
    measured: str
    agree: bool


def measure(
    cudnn: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    probes: Mapping[str, Problem] | None = None,
) -> tuple[int, list[Finding]]:
    """Plan every problem for every described GPU with the cuDNN that is here; gives its version, and what was found.

    Args:
        probes: the problems by their words; :func:`pairs` gives those of two options each, :func:`operations` those of
            functions. None for :data:`PROBES`.
        cudnn: the path of a libcudnn.so.9; None for the one that this process would find.
        progress: called with (how many are done, how many there are).

    Raises:
        CudnnError: this machine cannot plan; the message says what it lacks.
    """
    probes = PROBES if probes is None else probes
    parts = {words: subproblems(asked)[-1] for words, asked in probes.items()}  # of several the last is the new one
    asked = [(words, gpu) for gpu in gpus.NAMES for words in probes]
    found: dict[int, Finding] = {}
    with Planner(2, cudnn) as planner:
        jobs = [(parts[words], load_target(gpu)) for words, gpu in asked]
        for number, answer in planner.plan_all(jobs, None):
            words, gpu = asked[number]
            rules = tuple(reason.rule for reason in why_not(probes[words], planner.version, gpus.capability(gpu)))
            refused = isinstance(answer, str)
            measured = " ".join(answer.split()) if isinstance(answer, str) else f"engine {answer.engine}"
            agree = bool(rules) or (words, gpu) in EXCEPTIONS if refused else not set(rules) - _SILENT
            found[number] = Finding(words, gpu, rules, measured, agree)
            if progress:
                progress(len(found), len(jobs))
        return planner.version, [found[number] for number in range(len(asked))]


#: Rows about what planning cannot show: results that are wrong, or not the same in every run.
_SILENT = {"deterministic-sinks", "bias-gradient", "max-sumexp"} | {
    bug.name for bug in BUGS if not bug.guards and "planning" not in bug.effect
}
#: What cuDNN refuses for a described GPU and the table does not: with 9.28 the kernel does not compile for the constructed
#: description of the B200 (NVRTC); NVIDIA's frontend says that it runs from 9.23 on, and it was not tried on the card.
EXCEPTIONS = {("gradients, head dim 256", "b200")}


def page(version: int) -> Iterator[str]:
    """The documentation's page of what runs where, in Markdown, for a version of cuDNN and the oldest; from the table alone."""
    yield "# What runs where\n"
    yield "<!-- Written by `python -m cupy_sdpa support --markdown`; a test compares. -->\n"
    yield (
        f"cuDNN {version_text(MINIMUM_CUDNN)} or newer, on GPUs of compute capability {MINIMUM_CAPABILITY / 10} or newer. "
        "`explain()` says it of a single call, with the reason, and what would lift it. "
        "`python -m cupy_sdpa support --measure` asks the cuDNN that is installed, without a GPU, and compares.\n"
    )
    yield (
        "Results were verified on Hopper GPUs (H100, H200) only. For the other GPUs the tables state what cuDNN plans for "
        'their descriptions. "Unverified" marks what has a known doubt: such a call runs if cuDNN can plan it. '
        "`python -m cupy_sdpa check` verifies the results on a GPU.\n"
    )
    yield "## Problems and GPUs\n"
    for number in (version, MINIMUM_CUDNN):
        yield f"cuDNN {version_text(number)}:\n"
        yield "| | " + " | ".join(_title(gpu) for gpu in gpus.NAMES) + " |"
        yield "|---|" + "---|" * len(gpus.NAMES)
        for words, asked in PROBES.items():
            cells = []
            for gpu in gpus.NAMES:
                rules = [reason.rule for reason in why_not(asked, number, gpus.capability(gpu))]
                doubts = [name for name, _ in unverified_rules(asked, number, gpus.capability(gpu))]
                if rules:
                    cells.append(f"no: {', '.join(dict.fromkeys(rules))}")
                else:
                    cells.append(f"unverified: {', '.join(dict.fromkeys(doubts))}" if doubts else "yes")
            yield f"| {words} | " + " | ".join(cells) + " |"
        yield ""
    yield "## Two options at once\n"
    yield (
        f"With cuDNN {version_text(version)}. Each option alone stands on the diagonal. An empty cell: they exclude each "
        "other. More than two at once run where each two of them do, as far as random problems show "
        "(tests/test_combinations.py).\n"
    )
    for backward in (False, True):
        left_out = _FORWARD_ONLY if backward else _BACKWARD_ONLY
        names = [name for name in OPTIONS if name not in left_out]
        yield ("Gradients" if backward else "Forward") + ":\n"
        yield "| | " + " | ".join(names) + " |"
        yield "|---|" + "---|" * len(names)
        for one in names:
            cells = [_cell(pair(one, other, backward=backward), version) for other in names]
            yield f"| {one} | " + " | ".join(cells) + " |"
        yield ""
    yield "## Score and mask functions\n"
    yield f"What they can be made of, with cuDNN {version_text(version)}; `support --measure --operations` plans each.\n"
    yield "| | forward | gradients |"
    yield "|---|---|---|"
    of_functions = operations()
    for words in OPERATIONS:
        cells = [_cell(of_functions[f"{direction}, {words}"], version) for direction in ("forward", "gradients")]
        in_a_table = words.replace("|", "\\|")
        yield f"| {in_a_table} | " + " | ".join(cells) + " |"
    yield ""
    yield "## Rules\n"
    yield "| rule | | raises | source |"
    yield "|---|---|---|---|"
    for rule in RULES:
        raises = f"`{rule.error.__name__}`" if rule.refuses else "nothing: unverified"
        yield f"| {rule.name} | {rule.summary} | {raises} | {_link(rule.link)} |"
    yield "\n## Known bugs\n"
    yield "| bug | cuDNN | compute capability | met by | effect | what is done | source |"
    yield "|---|---|---|---|---|---|---|"
    for bug in BUGS:
        done = ", ".join(GUARDS[guard] for guard in sorted(bug.guards)) or f"refused: {bug.remedy}"
        yield f"| {bug.name} | {_range(bug)} | {_capabilities(bug)} | {bug.when} | {bug.effect} | {done} | {_link(bug.link)} |"


def _cell(asked: Problem | None, version: int) -> str:
    """Where a problem runs, in a word."""
    if asked is None:
        return ""
    there = [gpu for gpu in gpus.NAMES if not why_not(asked, version, gpus.capability(gpu))]
    if len(there) == len(gpus.NAMES):
        return "yes"
    return ", ".join(gpu.upper() for gpu in there) or "no"


def _title(gpu: str) -> str:
    return f"{gpu.upper()} ({gpus.capability(gpu) / 10})"


def _range(bug: Bug) -> str:
    last = "newest" if bug.last >= 99999 else version_text(bug.last)
    return f"{version_text(bug.first)} to {last}"


def _capabilities(bug: Bug) -> str:
    return f"{bug.capabilities.start / 10} to {(bug.capabilities.stop - 1) / 10}"


def _link(link: str) -> str:
    if not link:
        return "measured"
    return f"<{link}>" if link.startswith("https://") else "[design](design.md)"
