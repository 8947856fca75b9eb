"""The options of a call at the boundary: signatures, names and settings, from the table of options."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, overload

from ..layout import default_layout
from ..options.table import OPTIONS, GradientOptions, Settings, help_of_options
from ..problem.arrays import REQUESTS
from ..problem.problem import Problem
from .layouts import check_layout, in_default, refuse_default, takes_default

Function = TypeVar("Function", bound=Callable[..., Any])

#: What to write instead of other libraries' options.
_ANSWERS = {
    "pass alibi_slopes=, float32 (Hq,); cupy_sdpa.alibi_slopes(Hq) returns the usual ones": "alibi has_alibi use_alibi",
    "pass seq_lens_kv=, the length of each sequence; or mask=, bool, where True attends: with a layout in C order "
    "(B, Hq, Sq, Skv), else (Skv, Sq, Hq, B)": "attention_mask",
    "pass seq_lens_kv=, the length of each sequence; or mask=, bool, where True attends: with a layout in C order "
    "(B, 1, 1, Skv), else (Skv, 1, 1, B)": "key_padding_mask",
    "pass mask=, bool, where True attends; for packed sequences (max_seqlen_kv, max_seqlen_q, Hq, B), one for each sequence":
        "custom_mask packed_custom_mask",
    "pass mask=, bool, where True attends, to mask the padding before the first key of each sequence; or packed "
    "sequences with offsets from cupy_sdpa.cu_seqlens_with_gaps": "leftpad_k",
    "pass bias=: a (B, Hq, Sq, Skv) array unchanged with a layout in C order, else its transpose, such as attn_bias.T":
        "attn_bias bias_mod core_attention_bias position_bias qk_bias rpb",
    "pass mask= (bool, True attends) or bias= (float, added to the scores): PyTorch's (B, Hq, Sq, Skv) array unchanged with a "
    "layout in C order, else attn_mask.T": "attn_mask",
    "pass causal=True, or causal='bottom_right' if the last query attends to all keys; for padding pass seq_lens_q= and "
    "seq_lens_kv=":
        "attn_mask_type causal_mask is_causal mask_type use_causal_mask",
    "pass softcap=": "attn_logit_softcapping cap logit_cap logits_soft_cap soft_cap tanh_cap",
    "pass scale=": "attn_scale scale_factor scaling scaling_factor sm_scale softmax_scale",
    "pass page_table=: a (B, pages per sequence) array unchanged with a layout in C order, else its transpose":
        "block_table block_tables",
    "pass page_table= and seq_lens_kv=; cupy_sdpa.page_table_from_lists makes both from lists of pages":
        "kv_indices paged_kv_indices paged_kv_indptr",
    "pass seq_lens_q=": "counts query_lens query_seq_lengths seq_len_q seqused_q",
    "pass seq_lens_kv=":
        "cache_seqlens context_lens key_value_seq_lengths kv_len kv_lens kv_seq_len kv_seq_lens seq_len_kv seqused_k",
    "pass seq_lens_q= and seq_lens_kv=, the length of each sequence": "actual_seq_lengths lengths seq_len seq_lens seqlens",
    "pass cu_seqlens_q= and cu_seqlens_kv=, with max_seqlen_q= and max_seqlen_kv=": "cu_seqlens",
    "pass cu_seqlens_q=": "qo_indptr",
    "pass cu_seqlens_kv=": "cu_seqlens_k kv_indptr",
    "pass cu_seqlens_q= and cu_seqlens_kv= of sequences with gaps, which cupy_sdpa.cu_seqlens_with_gaps makes; or dense arrays "
    "with seq_lens_q= and seq_lens_kv=":
        "cu_seqlens_kv_padded cu_seqlens_q_padded pad_between_seqs",
    "pass cu_seqlens_q= and cu_seqlens_kv= of packed sequences; or mask_mod=cupy_sdpa.zoo.document with tensors=":
        "decoder_segment_ids document_ids kv_segment_ids q_segment_ids segment_ids",
    "pass max_seqlen_q= and max_seqlen_kv=": "max_s max_seqlen",
    "pass max_seqlen_kv=": "max_seqlen_k",
    "pass window=(left, right), where None is no bound": "local_window_size window_left window_right window_size",
    "pass causal='bottom_right', or a window=(left, right, 'bottom_right')":
        "bottom_right bottom_right_causal bottom_right_diagonal",
    "pass return_stats='max_sumexp', which also returns the largest score of each row": "return_max_logit",
    "pass window=(left, right): a sliding window of n keys is window=(n - 1, 0)": "sliding_window",
    "pass dropout_p= and seed=; cupy_sdpa.nnlib.dot_product_attention takes a function of the weights as fdrop=": "fdrop",
    "pass dropout_p= and seed=":
        "attention_dropout dropout dropout_prob dropout_rate dropout_rng dropout_seed p_dropout rng_state",
    "omit dropout_p= and seed= where nothing is dropped": "is_training training",
    "pass sinks=, float32 (Hq,)": "learnable_sink s_aux softmax_offset softmax_type",
    "no option is needed: k and v may have fewer heads than q": "enable_gqa num_kv_heads num_gqa_groups num_key_value_heads",
    "no option is needed: the heads are axis 1 of q, k and v, or the axis h of layout=": "num_attention_heads num_heads",
    "no option is needed: axis 1 of q, k and v is heads; for arrays (features, len, batch) use "
    "cupy_sdpa.nnlib.dot_product_attention, which takes nheads=": "nheads",
    "pass layout=": "head_first input_layout kv_layout qkv_format qkv_layout tensor_layout",
    "pass return_stats=True":
        "generate_stats lse return_lse return_residual return_residuals return_softmax_lse save_residuals",
    "pass return_stats=True; the weights are never stored, and exp(score - stats) computes them": "return_attn_probs",
    "the weights are never stored; cupy_sdpa.nnlib.dot_product_attention computes them in a separate pass":
        "alpha need_weights output_attentions return_attention_scores",
    "pass q, k and v by position, or as q=, k= and v=": "key key_layer query query_layer value value_layer",
    "pass q, k and v by position, as three arrays: views such as qkv[:, :, 0] are not copied": "kv kv_layer qkv qkv_layer",
    "this function takes q and k, but not v: omit v. With a cache: view = cache.view(); del view['v']; then pass **view": "v",
    "the dtype is q's; for float32 arrays pass compute_dtype=": "dtype precision",
    "no option is needed: scores and the softmax are float32, and float64 for float64 arrays": "logits_dtype softmax_dtype",
    "no option is needed: the page size is axis 2 of k and v, or axis 1 with layout='bshd'": "page_size",
    "the page size is axis 2 of k and v, or axis 1 with layout='bshd'; for the blocks of a mask pass block= to "
    "cupy_sdpa.block_mask": "block_size",
    "pass arrays of cupy_sdpa.fp8.quantize, which carry their factors":
        "k_descale k_scale kv_cache_sf q_descale q_scale v_descale v_scale",
    "functions read the arrays in tensors=": "aux_tensors",
    "pass block_mask=": "block_sparse_tensors",
    "pass score_mod=, a function f(score, b, h, q_idx, kv_idx)": "score_fn score_function score_modifier",
    "pass mask_mod=, a function f(b, h, q_idx, kv_idx) -> condition": "mask_fn mask_function",
    "pass bias= (float, added to the scores); for other changes pass a function as score_mod=":
        "bias_type core_attention_bias_type",
    "multiply the output of each head: out * head_mask[:, None, None]": "head_mask layer_head_mask",
    "masked scores are -inf: no value is needed": "mask_value",
    "apply rotary embeddings to q and k before the call, with cupy_sdpa.apply_rope":
        "pos_encoding_mode rope_scale rope_theta rotary_cos rotary_sin",
    "append the new keys to a cupy_sdpa.KVCache, and pass its keys and values with page_table= and seq_lens_kv=":
        "inference_params k_cache kv_cache paged_kv_cache past_key_value past_key_values v_cache",
    "remove it: the kernel is chosen by cuDNN":
        "attn_implementation backend implementation math_mode pack_gqa use_fp16_qk_reduction",
    "remove it: the backward pass stores no weights, and writes whole results": "checkpoint_core_attention fast_zero_fill",
}  # fmt: skip
#: The answers by the names of the options.
OTHER_NAMES = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}


class _Annotation(str):
    """The text of an annotation, which ``help`` shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(annotation: Any) -> Any:
    """Return the text of an annotation; no annotation remains none."""
    if annotation is inspect.Parameter.empty:
        return annotation
    return _Annotation(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


#: The line of a docstring that names the options, and the beginning of the line that names the gradient flags; Python 3.13 and
#: newer strip their indentation.
_EVERY_OPTION = re.compile(r"^( +)options: every option; :doc:`/options` defines each\.\n", re.M)
_REQUESTS = re.compile(r"^( +)requests:", re.M)
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@overload
def takes_options(function: Function, /) -> Function: ...
@overload
def takes_options(*, name: str = "", gradients: bool = False) -> Callable[[Function], Function]: ...
def takes_options(function: Any = None, /, *, name: str = "", gradients: bool = False) -> Any:
    """Give a function with ``**options`` a signature that lists the options that it takes, for ``help`` and completion.

    The table of options says which. ``name`` is the function's name in the table, by default its own. With ``gradients`` the
    function also takes the flags that request gradients.

    A call that does not fit the signature raises an error that names the fix. In :func:`cupy_sdpa.layout.default`, a call
    without ``layout=`` gets the default layout; a function that does not take it raises TypeError. A function with
    ``*positional`` does both itself, with :func:`special_call`; others are wrapped, which takes 0.2 us per call.

    A function without ``**options`` must take ``layout=``; it keeps its signature and only gets the default layout.

    >>> def attention(q, k, v, **options):
    ...     ...
    >>> "window" in inspect.signature(takes_options(attention)).parameters
    True
    """
    if function is None:
        return functools.partial(takes_options, name=name, gradients=gradients)
    signature = inspect.signature(function)
    if all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
        return takes_default(function)
    parameters = [p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    # a default ... lets a call with other names reach the check of the names
    parameters = [p.replace(default=p.empty, annotation="Array") if p.default is ... else p for p in parameters]
    defaults = dict.fromkeys(REQUESTS, False) if gradients else {}
    defaults |= {
        option.name: option.default for option in OPTIONS.values() if option.refusal(name or function.__name__) is None
    }
    for keyword, default in defaults.items():
        annotation = GradientOptions.__annotations__[keyword]
        text = getattr(annotation, "__forward_arg__", annotation)
        parameters.append(inspect.Parameter(keyword, _KEYWORD, default=default, annotation=text))
    parameters = [p.replace(annotation=_shown(p.annotation)) for p in parameters]
    returned = _shown(signature.return_annotation)
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    result: Any = function if takes_more else _with_remedies(function, any(p.name == "layout" for p in parameters))
    if function.__doc__:
        lines = help_of_options().splitlines(keepends=True)
        doc = _EVERY_OPTION.sub(lambda match: "".join(f"{match[1]}{line}" for line in lines), function.__doc__)
        result.__doc__ = _REQUESTS.sub(lambda match: f"{match[1]}{', '.join(REQUESTS)}:", doc)
    result.__signature__ = signature.replace(parameters=parameters, return_annotation=returned)
    return result


def _with_remedies(function: Callable[..., Any], takes_layout: bool) -> Callable[..., Any]:
    """Return the function; a call that does not fit its signature raises an error that names the fix, if there is one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if default_layout() is not None:
            return in_default(call, *args, **kwargs) if takes_layout else refuse_default(function.__name__)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next is None:  # raised by the call, not inside the function
                known = inspect.signature(call).parameters
                _check_arguments(call, args[len(_positional(call)) :], [name for name in kwargs if name not in known])
            raise

    return call


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that may be passed by position."""
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def special_call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Make a call in :func:`cupy_sdpa.layout.default`, or raise TypeError for a missing or surplus array.

    ``arguments`` are the ``locals()`` of the function, with ``*positional`` and ``**options``, at the beginning.
    """
    positional, options = arguments.pop("positional"), arguments.pop("options")
    if positional or any(value is ... for value in arguments.values()):
        known = inspect.signature(function).parameters
        _check_arguments(function, positional, [name for name in options if name not in known])
        names = [p.name for p in _positional(function) if p.default is p.empty]
        raise TypeError(f"{_listed(names)} are required: {function.__name__}({', '.join(names)})")
    return in_default(function, **arguments, **options)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _check_arguments(function: Callable[..., Any], others: Sequence[Any], options: Iterable[str]) -> None:
    """Raise our own error, not Python's, for a call with unknown options or too many arguments."""
    check_spelling(options)
    if others:
        names = [p.name for p in _positional(function) if p.name != "self"]
        raise TypeError(
            f"{len(names) + len(others)} arguments are passed by position; only {_listed(names)} can be; pass options by name: "
            "a bool array, True where the query attends, as mask=, and an array that is added to the scores as bias="
        ) from None


#: The flags that request gradients.
_REQUEST_NAMES = frozenset(REQUESTS)


#: The flags that request gradients if no gradient is requested.
NO_REQUESTS: Mapping[str, Any] = MappingProxyType(dict.fromkeys(REQUESTS, False))


def split_requests(options: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Split the flags that request gradients, which are False by default, from the options.

    The flags are :data:`NO_REQUESTS` itself if the options have none.
    """
    if _REQUEST_NAMES.isdisjoint(options):
        return NO_REQUESTS, {**options}
    requests = {name: options.get(name, False) for name in REQUESTS}
    if isinstance(names := requests["return_dtensors"], (list, set)):
        requests["return_dtensors"] = tuple(names)  # the caller's list may change before a later call
    return requests, {name: value for name, value in options.items() if name not in requests}


def check_names(options: Mapping[str, Any]) -> None:
    """Check that every option exists."""
    for name, value in options.items():
        instead = OPTIONS[name].refusal("problem") if value is not None and name in OPTIONS else None
        if instead is not None:
            remedy = f": {instead}" if instead else ""
            raise TypeError(
                f"this call does not take {name}; cupy_sdpa.attention, attention_backward, attention_vjp, attention_jvp, "
                f"prepare and explain do{remedy}"
            )
    check_layout(options.get("layout"))
    check_spelling(options)


def check_spelling(options: Iterable[str]) -> None:
    """Raise TypeError for the first option that does not exist; it names the nearest one."""
    for name in options:
        if name in OPTIONS:
            continue
        if name in OTHER_NAMES:
            raise TypeError(f"there is no option {name}: {OTHER_NAMES[name]}") from None
        import difflib  # slow to import

        near = difflib.get_close_matches(name, OPTIONS, 1, cutoff=0.75)
        hint = f"; did you mean {near[0]}?" if near else f"; the options are {', '.join(OPTIONS)}"
        raise TypeError(f"there is no option {name}{hint}") from None


def read_settings(options: Mapping[str, Any]) -> tuple[Settings, dict[str, float]]:
    """Read the settings, which are part of a plan, and the scalars, which are passed by value to every execution.

    The scale is a number among the options.
    """
    settings: dict[str, Any] = {}
    scalars: dict[str, float] = {}
    for option in OPTIONS.values():
        if option.read is None:
            continue
        value = option.read(options)
        settings[option.setting] = option.plan_of(value)
        if option.by_value and value is not None:
            scalars[option.name] = value
    return Settings(**settings), scalars


def check_factors(problem: Problem, arrays: Mapping[str, Any]) -> None:
    """Check that FP8 arrays have factors."""
    if problem.fp8 and any(name not in arrays for name in ("descale_q", "descale_k", "descale_v")):
        raise TypeError(
            f"q is {problem.dtype}, whose values need factors: pass arrays of cupy_sdpa.fp8.quantize, or "
            "cupy_sdpa.fp8.Fp8Array(data, descale)"
        )
