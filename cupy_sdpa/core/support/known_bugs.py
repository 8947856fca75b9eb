"""The known bugs of cuDNN: one :class:`Bug` entry each, with the versions, GPUs and problems that it affects.

To add a bug:

1. Add a :class:`Bug` to :data:`BUGS`. ``condition`` is a function of the :class:`~.core.problem.problem.Problem`; define it
   above the table, or use a lambda.
2. If a guard of :data:`GUARDS` avoids the bug, name it in ``guards``. Otherwise leave ``guards`` empty and write the fix in
   ``remedy``: affected calls then raise :class:`cupy_sdpa.Unsupported`.
3. Add a case to ``AFFECTED`` in tests/support/test_support.py: problems, versions and GPUs that are affected, and some that are
   not.
4. If the bug raises Unsupported, it must affect a problem of ``PROBES`` in cli/support_problems.py or a pair of ``OPTIONS`` in
   tools/support_table.py; add one.
5. If it affects packed sequences, exclude affected batches with lengths in :func:`.padding.copy_reason`.
6. Regenerate docs/support.md: ``python tools/support_table.py page > docs/support.md``.

Everything else (errors, guards, ``explain()``, the documentation) reads this table. A new guard also needs an
implementation: the guards in :data:`STAGING_GUARDS` change the arrays (core/support/engine_problem.py, and engine_form.py and
attention_steps.py of core/programs), the others change the graph (core/graph/attention_forward.py and attention_backward.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..errors import Unsupported
from ..options.table import OF_DIAGONAL
from ..problem.problem import Problem, writes_dq_directly
from ..problem.slices import is_too_large, slices_of_gradients
from ..problem.split import obstacle
from ..version import version_text
from .rules import ALL_GPUS, BLACKWELL, FRONTEND, HOPPER, PYTORCH

#: What each guard does to avoid a bug.
GUARDS = {
    "keys": "scores of padded keys are masked explicitly",
    "queries": "scores of padded queries are masked explicitly",
    "positions": "key positions, and arrays without a key axis, are read from memory for every key",
    "no-split": "the kernel that splits the keys is not used",
    "clear-last": "results beyond the lengths are cleared after the kernel instead of before",
    "two-rows": "each sequence is planned for two queries",
    "merged-sinks": "the sinks are merged into the results after the kernel",
    "one-key": "sequences without keys get one key, and their results are cleared after the kernel",
    "dense-queries": "the queries are copied to a dense array",
    "dense-gradients": "dq, dk and dv are computed in dense arrays and copied",
    "slices": "each launch computes a slice of the batch or of the heads",
    "finite-bias": "-inf is replaced by -1e30 in a float32 copy of the bias",
}
#: The guards that change arrays. They apply to every version and GPU, because arrays are prepared before these are known.
STAGING_GUARDS = frozenset(
    {"clear-last", "two-rows", "merged-sinks", "one-key", "dense-queries", "dense-gradients", "slices", "finite-bias"}
)

#: The value of ``last`` for a bug that the newest cuDNN still has.
NOT_FIXED = 99999
#: The number of queries in a tile of Hopper's FP8 kernel.
FP8_TILE = 128


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A known bug of cuDNN that affects this package.

    Attributes:
        name: a short, stable name; the value that ``CUPY_SDPA_GUARDS_OFF`` takes.
        first, last: the first and the last affected version of cuDNN; 9.19.0 is 91900. Default of ``last``: :data:`NOT_FIXED`.
        capabilities: the affected compute capabilities; 9.0 is 90. Default: all.
        condition: whether a problem is affected.
        when: the condition in words.
        effect: the effect in words.
        guards: keys of :data:`GUARDS` that avoid the bug. Default: no guards; affected problems raise Unsupported.
        remedy: how the user can avoid the error.
        link: the report, or ``docs/cudnn.md`` for a bug that is described there.
        planned: whether cuDNN plans affected problems, so that the tool cannot confirm the bug. Default True.
    """

    name: str
    first: int = 91900
    last: int = NOT_FIXED
    capabilities: range = ALL_GPUS
    condition: Callable[[Problem], bool]
    when: str
    effect: str
    guards: frozenset[str] = frozenset()
    remedy: str = ""
    link: str = "docs/cudnn.md"
    planned: bool = True

    error = Unsupported

    @property
    def refuses(self) -> bool:
        """Whether affected problems raise Unsupported."""
        return not self.guards

    def affects(self, problem: Problem, cudnn: int, capability: int) -> bool:
        """True if the bug affects a problem with this version of cuDNN on this GPU."""
        return self.first <= cudnn <= self.last and capability in self.capabilities and self.condition(problem)

    def violations(self, problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
        """As for a rule."""
        if self.affects(problem, cudnn, capability):
            yield f"{self.when}: {self.effect} with cuDNN {version_text(cudnn)} on this GPU: {self.remedy} ({self.link})"


def _one_query(problem: Problem) -> bool:
    *_, sq, _, _ = problem.sizes
    return sq == 1


def _one_query_forward(problem: Problem) -> bool:
    return _one_query(problem) and not problem.backward


def _one_paged_key_of_heads(problem: Problem) -> bool:
    """True for one query, and one key in a page, with scores or a mask that differ between heads."""
    expression = problem.settings.expression
    of_head = expression is not None and any(step.mode == "index" and step.name == "h" for step in expression.steps)
    of_head |= any(spec.shape[2] > 1 for spec in problem.captured)
    of_head |= any(spec is not None and max(spec.shape[2:]) > 1 for spec in (problem.mask, problem.bias))
    return _one_query_forward(problem) and bool(problem.paged) and problem.sizes[5] == 1 and of_head


def _one_paged_query_with_sinks(problem: Problem) -> bool:
    """True for one query, grouped heads and sinks, with paged keys that are not split because of another option."""
    _, _, hq, hkv, *_ = problem.sizes
    affected = _one_query_forward(problem) and problem.paged and not problem.packed
    return bool(affected and problem.sinks is not None and hq != hkv and obstacle(problem))


def _may_mask_all_keys(problem: Problem) -> bool:
    """True if a band may leave a query without keys, although its sequence has keys."""
    band, (*_, sq, skv, _) = problem.band, problem.sizes
    if band is None:
        return False
    if problem.seq_lens_kv is not None:
        return band.left is not None or band.bottom_right
    after = band.right if band.bottom_right else band.left
    return band.left is not None and after is not None and sq - skv > after


def _strided_packed_gradients(problem: Problem) -> bool:
    """Packed sequences with a dq that is not dense, or grouped heads with such a dk or dv."""
    _, _, hq, hkv, *_ = problem.sizes
    affected = (problem.dq, *((problem.dk, problem.dv) if hq != hkv else ()))
    return problem.packed and any(spec and not spec.dense for spec in affected)


def _direct_with_narrow_values(problem: Problem) -> bool:
    """dQ is written directly, with head dims (D, Dv) for which results were wrong or were not measured."""
    d, dv, *_ = problem.sizes
    return problem.backward and writes_dq_directly(problem) and d > 128 and d != dv and (d, dv) != (192, 128)


def _without_mask(problem: Problem) -> bool:
    """The last queries may attend to the last keys: no causal mask, no right bound of a window, no lengths.

    With a right bound the gradients were right without a guard, also where all queries attend to the last keys (H200, 9.19;
    ``test_a_right_bound_prevents_the_bug_of_the_last_keys`` repeats it).
    """
    return not problem.ragged and (problem.band is None or problem.band.right is None)


def _single_key_difference(problem: Problem) -> bool:
    """Gradients of scores of one key, where a function subtracts an array of one element."""
    expression = problem.settings.expression
    if not problem.backward or expression is None or problem.sizes[5] != 1:
        return False
    one_element = {spec.name for spec in problem.captured if math.prod(spec.shape) == 1}
    subtracted = [expression.steps[step.args[1]] for step in expression.steps if step.mode == "sub"]
    return any(step.mode == "captured" and step.name in one_element for step in subtracted)


def _reads_positions(problem: Problem) -> bool:
    """The scores of a single query depend on key positions or on an array, and no other option selects another kernel."""
    expression = problem.settings.expression
    in_function = expression is not None and any(step.mode in ("index", "captured") for step in expression.steps)
    reads = in_function or any(option.of(problem) for option in OF_DIAGONAL)
    return _one_query_forward(problem) and reads and not problem.settings.dropout and problem.sinks is None


_DECODE_BLACKWELL = Bug(
    name="decode-blackwell",
    last=92400,
    capabilities=BLACKWELL,
    condition=_one_query_forward,
    when="forward pass with one query",
    effect="silently wrong results",
    remedy="use cuDNN 9.25.1 or newer",
    link=f"{PYTORCH}/issues/193893",
)
_FP8_WIDE_OUTPUT = Bug(
    name="fp8-wide-output",
    first=92400,
    last=92499,
    capabilities=BLACKWELL,
    condition=lambda p: p.fp8 and p.out.dtype != p.dtype and p.sizes[4] > 1 and p.sizes[5] >= 4096 and p.band is None,
    when="FP8 with an output of another dtype, two or more queries, 4096 keys or more and no mask",
    effect="an output of 0",
    remedy="use cuDNN 9.25.0 or newer, or omit out_dtype",
    link=f"{FRONTEND}/issues/414",
)
_SINGLE_KEY_DIFFERENCE = Bug(
    name="single-key-difference",
    first=92600,
    capabilities=range(80, 100),
    condition=lambda p: _single_key_difference(p) and _one_query(p),
    when="gradients with a single key and a function that subtracts an array of one element",
    effect="planning ends in a segmentation fault",
    remedy="write s + (-t) instead of s - t",
    planned=False,
)

#: Every known bug of the supported versions. The ranges of the backward bugs were measured: plans with every release from 9.19
#: to 9.28, runs on an H200 with 9.19.0 and 9.28.0. The guards avoid the bugs with both versions. They cost time, so
#: they apply to affected problems only.
BUGS: tuple[Bug, ...] = (
    _DECODE_BLACKWELL,
    _FP8_WIDE_OUTPUT,
    replace(_DECODE_BLACKWELL, first=92402, last=92500),
    Bug(
        name="packed-one-query",
        condition=lambda p: p.packed and _one_query(p),
        when="packed sequences with one query each",
        effect="the log-sum-exp is written for one head of each group only, and gradients read it at the wrong place",
        guards=frozenset({"two-rows"}),
        link=f"{FRONTEND}/issues/1083",
    ),
    Bug(
        name="direct-narrow-values",
        capabilities=HOPPER,
        condition=_direct_with_narrow_values,
        when="deterministic gradients, or gradients of bias or tensors, with a head dim of q and k above 128 and a different "
        "head dim of v, except 192 and 128",
        effect="wrong gradients",
        remedy="pad v with zeros to the head dim of q",
    ),
    Bug(
        name="packed-narrow-values",
        capabilities=HOPPER,
        condition=lambda p: p.packed and p.backward and p.sizes[0] > 192 and 64 < p.sizes[1] <= 128,
        when="gradients of packed sequences with a head dim of q and k above 192 and of v from 72 to 128",
        effect="wrong dq, and dk beyond its first 128 head dims is not written (measured with 9.19 for all head dims)",
        remedy="pad v with zeros to the head dim of q",
    ),
    Bug(
        name="packed-strided-queries",
        condition=lambda p: p.packed and p.backward and not p.q.dense,
        when="gradients of packed sequences with queries that are not dense",
        effect="dq is written at the wrong place",
        guards=frozenset({"dense-queries"}),
    ),
    Bug(
        name="packed-misaligned-queries",
        condition=lambda p: p.packed and p.backward and p.q.alignment < 16,
        when="gradients of packed sequences with queries at an address that is not a multiple of 16 bytes",
        effect="a misaligned address (seen once, with 9.19)",
        guards=frozenset({"dense-queries"}),
    ),
    Bug(
        name="packed-strided-gradients",
        condition=_strided_packed_gradients,
        when="gradients of packed sequences with a dq that is not dense, or grouped heads with a dk or dv that is not dense",
        effect="dq is written at the wrong place; wrong dv",
        guards=frozenset({"dense-gradients"}),
    ),
    Bug(
        name="sinks-infinite-bias",
        condition=lambda p: p.backward and p.sinks is not None and p.bias is not None and p.bias.shape[0] == 1,
        when="gradients with sinks and a bias of one element per query",
        effect="-inf in the bias is read as 0",
        guards=frozenset({"finite-bias"}),
    ),
    Bug(
        name="dropout-sinks-gradient",
        last=92700,
        condition=lambda p: p.dsinks is not None and p.settings.dropout > 0,
        when="the gradient of sinks with dropout",
        effect="too small by the factor 1 - dropout_p",
        remedy="use cuDNN 9.28.0",
    ),
    Bug(
        name="packed-sinks-gradient",
        last=92501,
        condition=lambda p: p.packed and p.dsinks is not None,
        when="the gradient of sinks with packed sequences",
        effect="memory beyond the arrays is read",
        remedy="omit return_dsinks=True, or pad the sequences",
        link=FRONTEND,
    ),
    Bug(
        name="packed-narrow-gradient",
        last=92700,
        capabilities=HOPPER,
        condition=lambda p: p.packed and p.backward and p.sizes[0] % 16 != 0,
        when="gradients of packed sequences with a head dim that is not a multiple of 16",
        effect="wrong dq",
        remedy="use cuDNN 9.28.0, or pad the head dim with zeros and pass scale=",
    ),
    Bug(
        name="backward-one-row",
        first=92600,
        condition=lambda p: p.backward and _one_query(p) and p.sizes[2] == p.sizes[6] == 1,
        when="gradients of one query, one head and one batch item",
        effect="planning ends in a segmentation fault",
        remedy="pass the batch twice",
        link=f"{FRONTEND}/issues/1071",
        planned=False,
    ),
    Bug(
        name="backward-large",
        condition=lambda p: is_too_large(p) and bool(slices_of_gradients(p)),
        when="gradients where out or dout reaches beyond 2^31 elements",
        effect="wrong dq and dk (measured with 9.19.0; 9.28.0 is right)",
        guards=frozenset({"slices"}),
    ),
    Bug(
        name="backward-large-group",
        last=92700,
        condition=lambda p: is_too_large(p) and not slices_of_gradients(p),
        when="gradients where out or dout reaches beyond 2^31 elements within the query heads of one key/value head, or in "
        "packed sequences with dropout",
        effect="wrong dq and dk",
        remedy="use cuDNN 9.28.0, or call attention_backward for slices of the queries and add up dk and dv; with dropout, "
        "pack fewer sequences",
    ),
    _SINGLE_KEY_DIFFERENCE,
    replace(_SINGLE_KEY_DIFFERENCE, capabilities=range(100, 130), condition=_single_key_difference),
    Bug(
        name="one-query-positions",
        condition=_reads_positions,
        when="one query, more than 256 keys, and ALiBi or a function that reads positions or arrays",
        effect="the kernel that splits the keys computes positions wrongly, and reads arrays of one element per head at the "
        "wrong place",
        guards=frozenset({"positions"}),
    ),
    Bug(
        name="one-query-dropout",
        condition=lambda p: _one_query_forward(p) and p.settings.dropout > 0,
        when="one query with dropout",
        effect="the kernel that splits the keys writes beyond its shared memory, which destroys the CUDA context",
        guards=frozenset({"no-split"}),
    ),
    Bug(
        name="one-query-sinks",
        condition=lambda p: _one_query_forward(p) and p.sinks is not None,
        when="one query with sinks, fully masked",
        effect="the kernel that splits the keys writes -inf for the log-sum-exp",
        guards=frozenset({"no-split"}),
    ),
    Bug(
        name="one-query-deterministic",
        condition=lambda p: _one_query_forward(p) and p.deterministic,
        when="one query with deterministic=True",
        effect="the kernel that splits the keys adds their parts in an arbitrary order",
        guards=frozenset({"no-split"}),
    ),
    Bug(
        name="one-query-lengths",
        condition=lambda p: _one_query_forward(p) and p.seq_lens_q is not None,
        when="one query with a length of 0 in seq_lens_q",
        effect="the result of a query with length 1, or NaN",
        guards=frozenset({"clear-last"}),
    ),
    Bug(
        name="one-paged-key",
        capabilities=range(80, 100),
        condition=_one_paged_key_of_heads,
        when="one query and one paged key, with a mask or bias of several heads or batch items, or a function of the head",
        effect="every head of a group has the scores and the mask of the first one",
        remedy="pass the key without pages",
    ),
    Bug(
        name="one-paged-query-sinks",
        condition=_one_paged_query_with_sinks,
        when="one query, grouped heads, paged keys and sinks, with an option that prevents splitting the keys, such as a mask",
        effect="every head of a group has the sink of the first one",
        guards=frozenset({"merged-sinks"}),
    ),
    Bug(
        name="fp8-empty-sequences",
        condition=lambda p: p.fp8 and p.seq_lens_kv is not None,
        when="FP8 with a length of 0 in seq_lens_kv, together with other lengths and more than one tile per multiprocessor",
        effect="the kernel never ends",
        guards=frozenset({"one-key"}),
    ),
    Bug(
        name="fp8-empty-tiles",
        capabilities=HOPPER,
        condition=lambda p: p.fp8 and p.sizes[4] > FP8_TILE and _may_mask_all_keys(p),
        when=f"FP8 with more than {FP8_TILE} queries, some of which may have no keys because of a window, or of a causal mask "
        "from the bottom right with lengths",
        effect="the kernel never ends if a tile of queries has no keys",
        remedy=f"pass at most {FP8_TILE} queries in a call, or bfloat16 arrays",
    ),
    Bug(
        name="fp8-short-sequences",
        capabilities=HOPPER,
        condition=lambda p: (
            p.fp8 and p.seq_lens_kv is not None and p.band is not None and p.band.left is not None and p.band.bottom_right
        ),
        when="FP8 with lengths and a window from the bottom right",
        effect="wrong results of sequences with fewer keys than queries",
        remedy="pass paged keys, a window from the top left or without a left bound, or bfloat16 arrays",
    ),
    Bug(
        name="backward-key-tail",
        last=92501,
        capabilities=HOPPER,
        condition=lambda p: p.backward and _without_mask(p) and p.k.shape[2] % 128 == 64,
        when="gradients without a mask, with Skv % 128 == 64 and a log-sum-exp below -88.7",
        effect="dq is NaN",
        guards=frozenset({"keys"}),
        link=f"{PYTORCH}/issues/196678",
    ),
    Bug(
        name="backward-query-tail",
        capabilities=HOPPER,
        condition=lambda p: p.backward and _without_mask(p) and _one_query(p) and p.k.shape[2] % 64 == 0,
        when="gradients of one query without a mask, with Skv % 64 == 0 and a log-sum-exp below -88.7",
        effect="dk and dv are NaN",
        guards=frozenset({"queries"}),
        link=f"{FRONTEND}/issues/1072",
    ),
    Bug(
        name="backward-scale",
        capabilities=HOPPER,
        condition=lambda p: p.backward and not p.settings.positive_scale,
        when="gradients with a scale of 0 or below and lengths that are not multiples of 64",
        effect="all gradients are NaN",
        guards=frozenset({"keys", "queries"}),
    ),
)
