"""The support table: every rule has a case on each side, and its message contains the fix."""

import functools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner import child_environment, plan_problem

import cupy_sdpa
from cupy_sdpa import jvp_problems, zoo
from cupy_sdpa.cli.support_problems import PROBES
from cupy_sdpa.core.cudnn_engine.plan import PlanInfo
from cupy_sdpa.core.graph import graph_of
from cupy_sdpa.core.problem.tensor_spec import dense_spec
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.engine_problem import engine_problem
from cupy_sdpa.core.support.gpus import NAMES
from cupy_sdpa.core.support.known_bugs import BUGS, GUARDS, NOT_FIXED, STAGING_GUARDS
from cupy_sdpa.core.support.rules import RULES
from cupy_sdpa.core.support.why_not import (
    GENERATIONS,
    guards,
    staging_guards,
    unverified,
    unverified_rules,
    why_not,
    workarounds,
)
from cupy_sdpa.core.version import MINIMUM_CUDNN, RELEASES, version_text
from cupy_sdpa.offline import remote_planner
from tools import support_table


def asked(d=64, dv=None, hq=4, hkv=4, sq=16, skv=16, b=2, dtype="bfloat16", **options):
    """The problem of dense arrays."""
    return cupy_sdpa.problem((d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b), dtype=dtype, **options)


backward = functools.partial(asked, backward=True)
in_fp8 = functools.partial(asked, dtype="float8_e4m3fn")
one_query = functools.partial(asked, sq=1, skv=300)
BIAS = (16, 16, 4, 1)


def changed(problem, name, **changes):
    """A problem with another layout of an array."""
    return replace(problem, **{name: replace(getattr(problem, name), **changes)})


def strided(problem, name):
    """A problem with an array that is not dense."""
    return changed(problem, name, strides=tuple(2 * stride for stride in getattr(problem, name).strides))


def packed(queries=16, hkv=2, d=64, dv=None, q=None, dtype="bfloat16", **options):
    """The problem of packed sequences; q may be an array."""
    starts = {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": queries, "max_seqlen_kv": 16}
    k, v = (d, hkv, 32), (dv or d, hkv, 32)
    return cupy_sdpa.problem((d, 4, 2 * queries) if q is None else q, k, v, dtype=dtype, **starts, **options)


def one_packed_query(hkv=2, **options):
    """The problem of packed sequences of one query, before the workaround."""
    problem = packed(queries=1, hkv=hkv, **options)
    return replace(problem, settings=problem.settings._replace(max_seqlen_q=1))


def one_paged_key(pages=1, mask=(1, 1, 4, 1), **options):
    """The problem of one query and pages of one key, with a mask."""
    shapes = (64, 4, 1, 2), (64, 4, 1, 5), (64, 4, 1, 5)
    return cupy_sdpa.problem(*shapes, dtype="bfloat16", page_table=(pages, 2), seq_lens_kv=True, mask=mask, **options)


def one_paged_query(hkv=2, pages=4, **options):
    """The problem of one query of four heads, pages of 16 keys and sinks, before the workaround."""
    shapes = (64, 4, 1, 2), (64, hkv, 16, 9), (64, hkv, 16, 9)
    problem = cupy_sdpa.problem(*shapes, dtype="bfloat16", page_table=(pages, 2), seq_lens_kv=True, **options)
    return replace(problem, sinks=dense_spec("sinks", "float32", (4,)))


def one_key(dtype, skv=1):
    """The problem of a single query, few keys, and a function that reads an array."""
    return asked(sq=1, skv=skv, score_mod=lambda s, b, h, i, j, t: s + t[b], tensors={"t": np.ones(2, dtype)})


def paged(page=16, sq=1, **options):
    """The problem of paged keys."""
    pages = (64, 4, page, 9)
    return cupy_sdpa.problem((64, 4, sq, 2), pages, pages, dtype="bfloat16", page_table=(4, 2), **options)


def less_a_number(skv=1, sq=16, backward=True, score_mod=lambda s, b, h, i, j, t: s - t):
    """The problem of few keys and a function that reads an array of one element."""
    return asked(skv=skv, sq=sq, backward=backward, score_mod=score_mod, tensors={"t": ()})


#: rule: (a problem that violates it, cuDNN version, capability, part of the message), (one that just satisfies it, version,
#: capability)
SIDES = {
    "fp8-gpu": ((in_fp8(), 91900, 89, r"float8_e4m3fn; .* 8\.9 does not .*pass float16"), (in_fp8(), 91900, 90)),
    "fp8-head-dim": ((in_fp8(144), 91900, 120, r"144 and 144; .* up to 128 .* 12\.0"), (in_fp8(144), 91900, 90)),
    "fp8-wide-values": ((in_fp8(128, dv=144), 91900, 90, r"128 and of v 144; .* pad q and k with zeros to 144"),
        (in_fp8(144, dv=256), 91900, 90)),
    "fp8-output": ((in_fp8(out_dtype="bfloat16"), 91900, 90, r"out_dtype is bfloat16; .* its method dequantize"),
        (in_fp8(out_dtype="bfloat16"), 91900, 100)),
    "fp8-one-query": ((in_fp8(sq=1), 91900, 90, r"one query; .*pass the query twice"), (in_fp8(sq=1), 92800, 100)),
    "fp8-scale": ((in_fp8(scale=0.0), 91900, 90, r"a scale of 0 or below .*and -q"), (in_fp8(scale=0.1), 91900, 90)),
    "fp8-packed": ((packed(dtype="float8_e4m3fn"), 91900, 90, r"illegal instruction: pad the sequences"),
        (packed(dtype="float8_e4m3fn"), 91900, 100)),
    "fp8-scores": ((in_fp8(softcap=2.0), 91900, 90, r"softcap is not supported .*omit it"),
        (in_fp8(causal=True), 91900, 90)),
    "cudnn-version": ((asked(), 91801, 90, r"cuDNN is 9\.18\.1; 9\.19\.0 .*pip install"), (asked(), 91900, 90)),
    "gpu-generation": ((asked(), 91900, 75, r"7\.5; 8\.0 \(Ampere\)"), (asked(), 91900, 80)),
    "dtype": ((asked(dtype="float32"), 91900, 90, r"float32; .* q\.astype"), (asked(dtype="float16"), 91900, 90)),
    "head-dim": ((asked(d=60), 91900, 90, r"head_dim of q and k is 60; .*pad axis 0 with 4 zeros"),
        (asked(d=72, dv=8), 91900, 90)),
    "contiguous-head-dim": ((changed(asked(), "q", strides=(256, 2, 32768, 1048576)), 91900, 90, r"q has a stride of 256 bytes .*asfortranarray\(q\)"),
        (changed(asked(), "q", strides=(2, 128 * 16, 128, 8192)), 91900, 90)),
    "negative-stride": ((changed(asked(), "q", strides=(2, 128, -512, 8192)), 91900, 90, r"does not support negative strides"),
        (changed(asked(), "q", strides=(2, 128, 512, 0)), 91900, 90)),
    "stride-alignment": ((changed(asked(), "q", strides=(2, 130, 1024, 65536)), 91900, 90, r"130 is not a multiple of 16"),
        (changed(asked(), "q", strides=(2, 144, 1024, 65536)), 91900, 90)),
    "memory-alignment": ((changed(asked(), "q", alignment=8), 91900, 90, r"multiple of 8 bytes; .* require 16"),
        (asked(), 91900, 90)),
    "dense-stats": ((changed(asked(return_stats=True), "stats", strides=(32, 8, 4)), 91900, 90, r"stats has strides \(32, 8, 4\) bytes"),
        (asked(return_stats=True), 91900, 90)),
    "grid": ((asked(b=65536, sq=1, skv=1), 91900, 90, r"batch size is 65536; .*65535"),
        (asked(b=65535, sq=1, skv=1), 91900, 90)),
    "backward-head-dim": ((backward(d=136), 91900, 80, r"head dims 136 and 136 .*up to 128"), (backward(d=136), 91900, 90)),
    "bias-dtype": ((asked(bias=np.zeros((16, 16, 1, 1), order="F")), 91900, 90, r"bias is float64; .*bias\.astype\('float32'\)"),
        (asked(bias=np.zeros((16, 16, 1, 1), np.float32, order="F")), 91900, 90)),
    "int64-tensors": ((asked(mask_mod=zoo.document, tensors={"document_id": np.zeros((2, 16), np.int64)}), 92800, 90, r"\.astype\('int32'\)"),
        (asked(mask_mod=zoo.document, tensors={"document_id": np.zeros((2, 16), np.int32)}), 92800, 90)),
    "bias-gradient": ((packed(bias=BIAS, backward=True, return_dbias=True), 92800, 90, r"the gradient of bias .*Omit return_dbias=True, or pad"),
        (packed(bias=BIAS, backward=True), 92800, 90)),
    "direct-blackwell": ((asked(bias=BIAS, dropout_p=0.5, seed=1, backward=True, return_dbias=True), 92800, 100, r"dropout on .* 10\.0: omit one"),
        (asked(bias=BIAS, dropout_p=0.5, seed=1, backward=True), 92800, 100)),
    "query-numbers": ((asked(mask=(1, 16, 1, 1), backward=True), 92800, 80, r"one element per query; .* 8\.0 .*along the key axis"),
        (asked(mask=(1, 16, 1, 1), backward=True), 92800, 100)),
    "positive-scale": ((asked(softcap=2.0, scale=0.0, backward=True), 92800, 90, r"a scale of 0 or below.* a positive scale and -q"),
        (asked(scale=0.0, backward=True), 92800, 90)),
    "dropout-mask": ((asked(dropout_p=0.5, dropout_mask=(16, 16, 4, 2)), 91900, 90, r"pass seed and offset, or pass numpy arrays"),
        (asked(dropout_p=0.5, seed=1), 91900, 90)),
    "one-key-integers": ((one_key(np.int32), 92800, 90, r"int32 array, .*pass the array as float32"),
        (one_key(np.int32, skv=2), 92800, 90)),
    "dropout-one-query": ((one_query(192, dropout_p=0.5, seed=1), 92800, 100, r"192 and 192 .* up to 128 here: pass the query twice"),
        (one_query(192, dropout_p=0.5, seed=1), 92800, 90)),
    "max-sumexp": ((asked(return_stats="max_sumexp", sinks=True), 92800, 90, r"use return_stats=True"),
        (asked(return_stats="max_sumexp"), 91900, 90)),
    "page-size": ((paged(48), 92800, 90, r"48; .* pages of 64 keys"), (paged(64), 91900, 90)),
    "paged-dropout": ((paged(dropout_p=0.5, seed=1), 92800, 120, r"omit dropout_p, or pass the query twice"),
        (paged(dropout_p=0.5, seed=1, sq=2), 92800, 90)),
    "deterministic-sinks": ((asked(sinks=True, deterministic=True, backward=True, return_dsinks=True), 91900, 90, r"omit deterministic=True or"),
        (asked(sinks=True, deterministic=True, backward=True), 91900, 90)),
}  # fmt: skip

#: The same for rules that raise no error.
DOUBTS = {
    "packed-gradients": ((packed(backward=True), 91900, 80, r"packed .* compute capability 8\.0"),
        (packed(backward=True), 91900, 90)),
    "positive-scale-elsewhere": ((asked(softcap=2.0, scale=0.0, backward=True), 92800, 80, r"a scale of 0 or below, were not run on .* 8\.0"),
        (asked(softcap=2.0, scale=1.0, backward=True), 92800, 80)),
    "backward-256": ((backward(d=256), 92800, 100, r"head dim 256 were not run on .* 10\.0"), (backward(d=128), 92800, 100)),
    "deterministic": ((backward(deterministic=True), 91900, 120, r"not run on .* 12\.0"), (backward(), 91900, 120)),
}  # fmt: skip


def test_every_rule_and_every_bug_has_both_sides():
    """Every rule and every bug has a case here."""
    assert set(SIDES) == {rule.name for rule in RULES if rule.refuses}
    assert set(DOUBTS) == {rule.name for rule in RULES if not rule.refuses}
    assert set(AFFECTED) == {bug.name for bug in BUGS}


@pytest.mark.parametrize("rule", DOUBTS)
def test_what_was_never_run_is_unverified_and_not_refused(rule):
    """Such a problem is not refused, and the report names the GPU. Just on the other side it is verified."""
    problem, cudnn, capability, words = DOUBTS[rule][0]
    assert why_not(problem, cudnn, capability) == []
    (text,) = [text for name, text in unverified_rules(problem, cudnn, capability) if name == rule]
    assert re.search(words, text)
    assert text in unverified(problem, cudnn, capability)
    assert rule not in {name for name, _ in unverified_rules(*DOUBTS[rule][1])}
    assert unverified(asked(), 92800, 90) == ()
    assert unverified(asked(), 92800, 80) == ("this package was not run on compute capability 8.0",)


@pytest.mark.parametrize("rule", SIDES)
def test_a_rule_refuses_violations(rule):
    """The reason is that rule's, with the values and the fix; just on the other side of the limit every rule is satisfied."""
    problem, cudnn, capability, words = SIDES[rule][0]
    reasons = [reason for reason in why_not(problem, cudnn, capability) if reason.rule == rule]
    assert reasons
    with pytest.raises(next(r.error for r in RULES if r.name == rule), match=words):
        raise reasons[0].error(reasons[0].text)
    assert why_not(*SIDES[rule][1]) == []


#: A problem, a version and a GPU, and whether they raise: limits of gradients of each generation.
LIMITED = [
    *(
        (backward(d=d, dv=dv), cudnn, capability, refused)
        for d, dv, cudnn, capability, refused in (
            (128, 128, 91900, 80, False), (136, 136, 91900, 89, True), (256, 256, 91900, 90, False), (264, 264, 91900, 90, True),
            (128, 128, 91900, 100, False), (192, 128, 91900, 100, False), (192, 192, 91900, 100, True),
            (256, 256, 92200, 100, True), (256, 256, 92300, 100, False), (136, 136, 92800, 120, True),
        )
    ),
    (asked(d=264), 91900, 90, False), (asked(d=136), 91900, 89, False), (asked(d=256), 92200, 100, False),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LIMITED)))
def test_limits_of_each_generation(number):
    """Head dims, versions and numbers of queries; the forward pass is not affected by the limits of gradients."""
    problem, cudnn, capability, refused = LIMITED[number]
    assert bool(why_not(problem, cudnn, capability)) is refused


#: bug: (an affected problem), [affected versions and GPUs], [unaffected versions and GPUs], [unaffected problems]
AFFECTED = {
    "decode-blackwell": (asked(sq=1), [(91900, 100), (92400, 103), (92402, 100), (92500, 110)],
        [(92401, 100), (92501, 100), (91900, 90), (91900, 120)], [asked(sq=2), backward(sq=1)]),
    "fp8-wide-output": (in_fp8(skv=4096, out_dtype="bfloat16"), [(92400, 100), (92401, 103)], [(91900, 100), (92500, 100)],
        [in_fp8(skv=4096), in_fp8(skv=4095, out_dtype="bfloat16"), in_fp8(skv=4096, out_dtype="bfloat16", causal=True)]),
    "packed-one-query": (one_packed_query(return_stats=True), [(91900, 90), (92600, 90), (92800, 80)], [],
        [packed(queries=2, return_stats=True), one_query()]),
    "direct-narrow-values": (backward(d=136, dv=72, deterministic=True), [(91900, 90), (92800, 90)], [(92800, 100)],
        [backward(d=136, dv=72), backward(d=136, deterministic=True), backward(d=192, dv=128, deterministic=True),
        backward(d=128, dv=72, deterministic=True)]),
    "packed-strided-queries": (strided(packed(backward=True), "q"), [(91900, 90), (92800, 80)], [],
        [packed(backward=True), strided(packed(), "q"), strided(backward(), "q")]),
    "packed-misaligned-queries": (changed(packed(backward=True), "q", alignment=8), [(91900, 90), (92800, 80)], [],
        [packed(backward=True), changed(packed(), "q", alignment=8)]),
    "packed-strided-gradients": (strided(packed(backward=True), "dk"), [(91900, 90), (92800, 80)], [],
        [packed(backward=True), strided(packed(backward=True, hkv=4), "dk"), strided(backward(), "dq")]),
    "one-query-positions": (one_query(alibi_slopes=True), [(91900, 90), (92800, 80), (92800, 120)], [], [one_query(),
        one_query(bias=(300, 1, 4, 1)), asked(alibi_slopes=True), one_query(alibi_slopes=True, backward=True),
        one_query(alibi_slopes=True, sinks=True)]),
    "one-query-dropout": (one_query(dropout_p=0.5, seed=1), [(91900, 90), (92800, 90)], [],
        [one_query(), asked(dropout_p=0.5, seed=1), one_query(dropout_p=0.5, seed=1, backward=True)]),
    "one-query-sinks": (one_query(sinks=True), [(91900, 90), (92800, 90)], [],
        [one_query(), asked(sinks=True), one_query(sinks=True, backward=True)]),
    "one-query-lengths": (one_query(seq_lens_kv=True), [(91900, 90), (92800, 90)], [],
        [one_query(), asked(seq_lens_kv=True), one_query(seq_lens_kv=True, backward=True)]),
    "one-paged-key": (one_paged_key(), [(91900, 90), (92800, 80), (92800, 90)], [(92800, 100)],
        [one_paged_key(pages=2, mask=(2, 1, 4, 1)), one_paged_key(mask=(1, 1, 1, 1)), one_paged_key(mask=None)]),
    "one-paged-query-sinks": (one_paged_query(alibi_slopes=True), [(91900, 90), (92800, 80), (92800, 100)], [],
        [one_paged_query(), one_paged_query(hkv=4, alibi_slopes=True), one_query(alibi_slopes=True, sinks=True)]),
    "fp8-empty-sequences": (in_fp8(seq_lens_kv=True), [(91900, 90), (92800, 90)], [], [in_fp8(), asked(seq_lens_kv=True)]),
    "fp8-short-sequences": (in_fp8(seq_lens_kv=True, window=(5, 0, "bottom_right")), [(91900, 90), (92800, 90)],
        [(91900, 100), (92800, 120)], [in_fp8(seq_lens_kv=True, window=(5, 0)), in_fp8(seq_lens_kv=True, causal="bottom_right"),
        in_fp8(window=(5, 0, "bottom_right"))]),
    "fp8-empty-tiles": (in_fp8(sq=129, seq_lens_kv=True, causal="bottom_right"), [(91900, 90), (92800, 90)],
        [(91900, 100), (92800, 120)], [in_fp8(sq=129, seq_lens_kv=True, causal=True), in_fp8(sq=129, causal="bottom_right"),
        in_fp8(sq=128, seq_lens_kv=True, causal="bottom_right"), asked(sq=129, seq_lens_kv=True, causal="bottom_right")]),
    "dropout-sinks-gradient": (asked(sinks=True, dropout_p=0.5, seed=1, backward=True, return_dsinks=True),
        [(91900, 90), (92700, 80)], [(92800, 90)],
        [asked(sinks=True, dropout_p=0.5, seed=1, backward=True), asked(sinks=True, backward=True, return_dsinks=True)]),
    "packed-narrow-values": (packed(d=256, dv=72, backward=True), [(91900, 90), (92800, 90)], [(92800, 100)],
        [packed(d=256, backward=True), packed(d=192, dv=128, backward=True), packed(d=256, dv=136, backward=True),
        packed(d=256, dv=64, backward=True), packed(d=256, dv=72), backward(d=256, dv=72)]),
    "packed-narrow-gradient": (packed(d=72, backward=True), [(91900, 90), (92700, 90)], [(92800, 90), (91900, 100)],
        [packed(d=80, backward=True), packed(d=72)]),
    "packed-sinks-gradient": (packed(sinks=True, backward=True, return_dsinks=True), [(91900, 90), (92501, 100)],
        [(92600, 90)], [packed(sinks=True, backward=True), asked(sinks=True, backward=True, return_dsinks=True)]),
    "one-query-deterministic": (one_query(deterministic=True), [(91900, 90), (92800, 80), (92800, 100)], [],
        [one_query(), asked(sq=2), backward(sq=1), one_query(backward=True, deterministic=True)]),
    "sinks-infinite-bias": (asked(sinks=True, bias=(1, 16, 1, 1), backward=True), [(91900, 90), (92800, 80), (92800, 100)],
        [], [asked(sinks=True, bias=(1, 16, 1, 1)), asked(bias=(1, 16, 1, 1), backward=True),
        asked(sinks=True, bias=(16, 16, 1, 1), backward=True), asked(sinks=True, mask=(1, 16, 1, 1), backward=True)]),
    "backward-one-row": (backward(hq=1, hkv=1, sq=1, b=1), [(92600, 90), (92601, 80), (92800, 100)], [(92501, 90)],
        [backward(hq=2, hkv=2, sq=1, b=1), backward(hq=1, hkv=1, sq=2, b=1), backward(hq=1, hkv=1, sq=1, b=2),
        asked(hq=1, hkv=1, sq=1, b=1)]),
    "single-key-difference": (less_a_number(sq=1), [(92600, 90), (92601, 80), (92800, 100)], [(92501, 90)],
        [less_a_number(skv=2), less_a_number(backward=False), less_a_number(score_mod=lambda s, b, h, i, j, t: t - s)]),
    "backward-key-tail": (backward(skv=192), [(91900, 90), (92501, 90)], [(92600, 90), (91900, 80), (91900, 100)],
        [backward(skv=128), backward(skv=200), backward(skv=192, causal=True), asked(skv=192)]),
    "backward-query-tail": (backward(sq=1, skv=128), [(91900, 90), (92800, 90)], [(92800, 80)],
        [backward(sq=2, skv=128), backward(sq=1, skv=129), backward(sq=1, skv=128, causal=True), asked(sq=1, skv=128)]),
    "backward-large": (backward(sq=2**17, b=128), [(91900, 90), (92800, 80)], [],
        [asked(sq=2**17, b=128), backward(sq=2**16, b=128), backward(sq=2**17, skv=8, b=64), backward(skv=2**17, b=1024)]),
    "backward-large-group": (backward(hq=64, hkv=1, sq=2**20, b=1), [(91900, 90), (92700, 80)], [(92800, 90)],
        [backward(hq=64, hkv=2, sq=2**20, b=1), backward(hq=64, hkv=1, sq=2**19, b=1)]),
    "backward-scale": (backward(skv=100, scale=-1.0), [(91900, 90), (92800, 90)], [(91900, 80)],
        [backward(skv=100), asked(skv=100)]),
}  # fmt: skip


#: A described GPU of each generation.
GPUS = {80: "A100", 90: "H200", 100: "B200"}


#: The bugs with a guard, and a problem, a version and a GPU that each affects; without arrays that a call copies first.
GUARDED = {bug.name: (AFFECTED[bug.name][0], AFFECTED[bug.name][1][0]) for bug in BUGS if bug.guards}
GUARDED = {name: (problem, target) for name, (problem, target) in GUARDED.items() if not why_not(problem, *target)}


@pytest.mark.parametrize("bug", GUARDED)
def test_reports_on_another_version_have_its_workarounds(bug):
    """The report on a version that is not installed lists the bugs that it works around, and has the graph that would run."""
    problem, (cudnn, capability) = GUARDED[bug]
    report = cupy_sdpa.explain(problem, gpu=GPUS[capability], cudnn=version_text(cudnn))
    assert report, report
    own = [launch.problem for launch in report.launches or (report,)]
    assert {*workarounds(problem, cudnn, capability), *workarounds(own[0], cudnn, capability)} == {*report.workarounds}
    assert any(text.startswith(f"{bug} ") for text in report.workarounds)
    if report.plan is None:
        assert report.graph == graph_of(own[0], guards(own[0], cudnn, capability))


def test_entries_are_complete():
    """A bug has existing guards or a fix; guards of arrays do not depend on version and GPU."""
    for bug in BUGS:
        assert bug.guards <= GUARDS.keys()
        assert bool(bug.guards) != bool(bug.remedy), bug.name
        if bug.guards & STAGING_GUARDS:
            assert (bug.first, bug.last, bug.capabilities) == (MINIMUM_CUDNN, NOT_FIXED, range(80, 130))


def test_guards_of_arrays_do_not_need_a_gpu():
    """Only affected problems have them: with lengths, results are cleared after the kernel for a single query. A problem may
    have several.
    """
    assert staging_guards(one_query(seq_lens_kv=True)) == {"clear-last"}
    assert staging_guards(one_packed_query()) == {"two-rows"}
    assert staging_guards(one_paged_query(mask=(64, 1, 1, 1))) == {"clear-last", "merged-sinks"}
    assert staging_guards(one_paged_query()) == {"clear-last"}  # its keys are split, and the sinks merged with the parts
    for problem in (
        one_query(),
        one_query(seq_lens_kv=True, backward=True),
        asked(seq_lens_kv=True),
        packed(),
        backward(skv=192),
    ):
        assert staging_guards(problem) == frozenset()
    of_positions = one_query(mask_mod=lambda b, h, i, j: (h + j) % 2 == 0, deterministic=True)
    assert guards(of_positions, 91900, 90) >= {"positions", "no-split"}


def test_workarounds_are_described():
    """Name, condition, effect and workaround, for the bugs with guards only."""
    (line,) = workarounds(backward(skv=192), 91900, 90)
    assert line.startswith("backward-key-tail (gradients without a mask, ")
    assert line.endswith(": dq is NaN): scores of padded keys are masked explicitly")
    assert workarounds(asked(sq=1), 91900, 100) == ()


def test_strided_arrays_of_packed_gradients_are_planned_dense():
    """cuDNN writes dq with the offsets of q, and with grouped heads dk and dv must be dense: q and the gradients are copied."""
    for hkv, name, dense in ((4, "q", True), (4, "dq", True), (2, "dk", True), (4, "dk", False)):
        planned = engine_problem(strided(packed(hkv=hkv, backward=True), name), None, on_gpu=True)
        assert getattr(planned, name).dense == dense
    assert not engine_problem(strided(packed(), "q"), None, on_gpu=True).q.dense


def effects(bug, problem, cudnn, capability):
    """Whether the table handles a bug, by a refusal or a guard."""
    named = {reason.rule for reason in why_not(problem, cudnn, capability)}
    for known in BUGS:
        if known.guards and known.affects(problem, cudnn, capability):
            assert known.guards <= guards(problem, cudnn, capability)
            named.add(known.name)
    return bug in named


@pytest.mark.parametrize("bug", AFFECTED)
def test_bugs_are_handled_exactly_where_they_occur(bug):
    """Exactly the affected versions, GPUs and problems raise or are guarded."""
    meets, with_it, without, others = AFFECTED[bug]
    assert all(effects(bug, meets, *where) for where in with_it)
    assert not any(effects(bug, meets, *where) for where in without)
    assert not any(effects(bug, other, *where) for other in others for where in with_it)


def test_a_refusal_for_a_bug_says_what_and_where():
    """The message contains the condition, the effect, the version, the fix and the report."""
    (reason,) = why_not(backward(hq=1, hkv=1, sq=1, b=1), 92800, 90)
    for words in (
        "one query, one head and one batch item",
        "segmentation fault",
        "9.28.0",
        "pass the batch twice",
        "issues/1071",
    ):
        assert words in reason.text


def test_strides_of_axes_of_length_1_are_ignored():
    """For any stride that numpy, CuPy and DLPack use for such an axis: one problem, one plan."""
    x = np.empty((64, 4, 16, 1), np.float16, order="F")
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (2, 128, 512, 7))
    problems = [cupy_sdpa.problem(q, x, x) for q in (x, odd)]
    assert problems[0] == problems[1]
    assert hash(problems[0]) == hash(problems[1])
    head = x[:, 1:2]
    assert why_not(cupy_sdpa.problem(head, head, head), MINIMUM_CUDNN, 90) == []


def test_all_reasons_are_reported():
    """A problem that violates several rules has a reason for each."""
    reasons = why_not(changed(asked(d=60, dtype="float32"), "q", alignment=4), 91801, 75)
    assert {"cudnn-version", "gpu-generation", "dtype", "head-dim", "memory-alignment"} <= {reason.rule for reason in reasons}


@pytest.mark.slow
def test_single_rules_can_be_turned_off():
    """The environment names a bug or a limit, which is then ignored; rules that protect memory stay."""
    code = """
import cupy_sdpa
from cupy_sdpa.core.support.why_not import guards, why_not
x = (128, 8, 1, 1)
decode = cupy_sdpa.problem(x, (128, 8, 512, 1), (128, 8, 512, 1), dtype="bfloat16")
print([reason.rule for reason in why_not(decode, 91900, 100)])
odd = cupy_sdpa.problem((128, 8, 64, 1), (128, 8, 192, 1), (128, 8, 192, 1), dtype="bfloat16", backward=True)
print(sorted(guards(odd, 91900, 90)))
"""

    def run(code, names):
        environment = child_environment(CUPY_SDPA_GUARDS_OFF=names)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)

    for names, printed in (("", "['decode-blackwell']\n['keys']\n"), ("decode-blackwell, backward-key-tail", "[]\n[]\n")):
        assert run(code, names).stdout == printed
    for name in ("contiguous-head-dim", "nonsense"):
        assert f"CUPY_SDPA_GUARDS_OFF names {name}; it can turn off" in run(code, name).stderr


@pytest.mark.parametrize("bug", [bug for bug in BUGS if not bug.guards], ids=lambda bug: f"{bug.name}-{bug.first}")
def test_a_refusal_for_a_bug_names_what_runs_the_problem(bug):
    """The problem has no reason against it with that version or on that GPU. A bug that was fixed names a version."""
    capability = bug.capabilities.start
    affected = [p for p in (PROBES | support_table.pairs()).values() if bug.affects(p, bug.first, capability)]
    assert affected, "no problem of cli/support_problems.py or tools/support_table.py is affected by this bug"
    lifts = []
    for problem in affected:
        (reason,) = [r for r in why_not(problem, bug.first, capability) if r.rule == bug.name]
        lifts.append(reason.lift)
        named = reason.lift.split("on ")[-1].split(", ")
        for version in RELEASES:
            if f"with cuDNN {version_text(version)}" in reason.lift:
                assert not why_not(problem, version, capability)
        for other, name in GENERATIONS.items():
            if name in named:
                assert not why_not(problem, bug.first, other)
    assert any(lifts) or bug.last > RELEASES[-1]


@pytest.mark.slow
def test_the_page_is_the_table():
    """docs/support.md is the output of the tool."""
    text = (Path(__file__).parents[2] / "docs" / "support.md").read_text(encoding="utf-8")
    assert text == "\n".join(support_table.page(RELEASES[-1])) + "\n", (
        "run python tools/support_table.py page > docs/support.md"
    )
    for name in (*(rule.name for rule in RULES), *(bug.name for bug in BUGS)):
        assert f"| {name} |" in text


#: A planning process that compiles no kernels.
ACCEPTING = """
import runpy, planner
with planner.without_kernels():
    runpy.run_module("cupy_sdpa.offline.plan_worker", run_name="__main__")
"""


@pytest.fixture
def accepting(monkeypatch):
    """The survey compiles no kernels."""
    monkeypatch.setattr(remote_planner, "_COMMAND", [sys.executable, "-c", ACCEPTING])


#: The engines that the problems use on one GPU of each compute capability.
ENGINES = {"a100": "17", "a10": "17", "l40s": "17", "h200": "126", "b200": "1357", "rtx5090": "17"}
#: Whether to compile the kernels of every problem for every GPU, which takes minutes.
NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"


@pytest.mark.cudnn
@pytest.mark.slow
def test_the_table_is_what_cudnn_accepts(accepting):
    """The real cuDNN accepts a problem for a described GPU exactly if the table does."""
    _, findings = support_table.measure(PROBES)
    assert len(findings) == len(PROBES) * len(gpus.REPRESENTATIVES)
    assert [finding for finding in findings if not finding.agree] == []
    for gpu, engines in ENGINES.items():
        assert {finding.measured for finding in findings if finding.gpu == gpu} >= {f"engine {number}" for number in engines}


@pytest.mark.cudnn
@pytest.mark.sweep
@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
def test_the_table_matches_cudnn(gpu, monkeypatch):
    """The kernels of every problem are compiled for one of the GPUs, or the table rules it out; at night for every GPU."""
    monkeypatch.setattr(gpus, "REPRESENTATIVES", (gpu,))
    first = 0 if NIGHTLY else [*ENGINES].index(gpu)
    compiled = dict([*PROBES.items()][first :: 1 if NIGHTLY else len(ENGINES)])
    _, findings = support_table.measure(compiled)
    assert len(findings) == len(compiled)
    assert [finding for finding in findings if not finding.agree] == []


def test_every_gpu_is_measured():
    """No compute capability is missing above, and each has one representative."""
    assert {*ENGINES} == {*gpus.REPRESENTATIVES}
    assert [gpus.capability_of(name) for name in gpus.REPRESENTATIVES] == sorted({gpus.capability_of(name) for name in NAMES})


@pytest.mark.cudnn
@pytest.mark.slow
def test_every_description_is_accepted(planner):
    """cuDNN accepts the description of every GPU, and an engine of it computes both passes."""
    q, kv = (64, 4, 256, 1), (64, 2, 256, 1)
    for name in NAMES:
        for backward in (False, True):
            problem = cupy_sdpa.problem(q, kv, kv, dtype="float16", causal=True, backward=backward)
            plan = planner.accept(plan_problem, problem, name)
            assert isinstance(plan, PlanInfo), (name, plan)


@pytest.mark.cudnn
@pytest.mark.slow
def test_a_wrong_table_is_detected(accepting, monkeypatch):
    """With a missing and an additional rule the survey differs from cuDNN."""
    title = "gradients, head dim 256"
    more = why_not(asked(d=60), 91900, 90)
    for reasons, wrong in (([], {"a100", "l40s", "rtx5090"}), (more, {"h200"})):
        monkeypatch.setattr(support_table, "why_not", lambda *_, reasons=reasons: reasons)
        _, findings = support_table.measure({title: PROBES[title]})
        assert {finding.gpu for finding in findings if not finding.agree} >= wrong


@pytest.mark.parametrize(
    ("capability", "d", "runs"),
    [(90, 128, True), (90, 136, False), (80, 64, True), (80, 72, False), (100, 64, True), (120, 64, True)],
)
def test_the_largest_head_dims_of_derivatives(capability, d, runs):
    """128 on Hopper and 64 on other GPUs."""
    shape = (d, 4, 256, 2)
    reasons = [
        reason for one in jvp_problems(shape, shape, shape, dtype="bfloat16") for reason in why_not(one, 92800, capability)
    ]
    assert (not reasons) is runs


def test_sinks_are_merged_into_a_dense_output(fake):
    """The kernel writes a temporary array, whatever strides the caller's output has."""
    q, pages = fake.zeros((64, 4, 1, 2), np.float16, order="F"), fake.zeros((64, 2, 16, 6), np.float16, order="F")
    options = {
        "sinks": fake.zeros(4, np.float32), "mask": fake.ones((48, 1, 1, 2), bool, order="F"),
        "page_table": fake.asarray(np.arange(6, dtype=np.int32).reshape(3, 2, order="F")),
        "seq_lens_kv": fake.asarray(np.int32([3, 40])), "out": fake.zeros((64, 16, 1, 2), np.float16, order="F")[:, ::4],
    }  # fmt: skip
    report = cupy_sdpa.explain(q, pages, pages, **options)
    assert "merged into the results" in str(report)
    assert report.problem.out.strides == (2, 2 * 64, 2 * 64 * 4, 2 * 64 * 4)
