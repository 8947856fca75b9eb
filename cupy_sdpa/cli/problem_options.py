"""A problem on the command line: shapes and options, as ``explain`` and ``plan`` take them."""

from __future__ import annotations

import argparse
import re
from typing import Any

from .. import Problem
from ..explanation import problem
from .console import CommandError, positive

#: The layouts of ``--layout``: the order of the axes, and their names.
LAYOUTS = ("dhsb", "bshd", "bhsd", "sbhd")
#: PyTorch's order is assumed if the first axis is no head dim of cuDNN's kernels, and the last one is.
_HEAD_DIMS = range(8, 257, 8)

EPILOG = """\
Shapes are D,H,S,B: head dim, heads, sequence length, batch. PyTorch's order
(batch, heads, seq, head_dim) is --layout bhsd.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shapes of k and v, and the options of a call."""
    shapes = parser.add_argument_group("arrays")
    shapes.add_argument("--kv-heads", type=positive, metavar="N", help="heads of k and v (default: as many as q)")
    shapes.add_argument("--keys", type=shape, metavar="D,Hkv,Skv,B", help="the shape of k (default: q's shape)")
    shapes.add_argument("--values", type=shape, metavar="Dv,Hkv,Skv,B", help="the shape of v (default: k's shape)")
    shapes.add_argument("--layout", choices=LAYOUTS, default="dhsb", help="the order of the axes (default dhsb)")
    shapes.add_argument("--dtype", default="bfloat16", help="dtype of all arrays (default bfloat16)")
    shapes.add_argument("--lengths", action="store_true", help="sequences have their own lengths (seq_lens_q, seq_lens_kv)")
    shapes.add_argument("--packed", action="store_true", help="sequences of at most S tokens are packed (cu_seqlens)")
    shapes.add_argument("--pages", type=positive, metavar="N", help="keys and values are in pages of N tokens (page_table)")
    options = parser.add_argument_group("options of the call")
    options.add_argument(
        "--causal",
        nargs="?",
        const="top_left",
        choices=("top_left", "bottom_right"),
        help="causal mask aligned to the top left (default) or bottom right",
    )
    options.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT", help="visible keys on each side of the diagonal; empty for no bound"
    )
    for name in ("mask", "bias"):
        options.add_argument(
            f"--{name}", type=shape, nargs="?", const=(), metavar="Skv,Sq,H,B",
            help=f"a {name} (default shape: one for all heads and sequences)",
        )  # fmt: skip
    options.add_argument("--bias-repeats", type=positive, metavar="N", help="consecutive batch items that share a bias")
    options.add_argument("--scale", type=float, metavar="TAU", help="scale of the scores (default: 1/sqrt(D))")
    options.add_argument("--softcap", type=float, metavar="C", help="softcap of the scores")
    options.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    options.add_argument("--sinks", action="store_true", help="attention sinks")
    options.add_argument("--dropout", type=float, metavar="P", help="dropout of the weights")
    options.add_argument("--stats", action="store_true", help="the log-sum-exp, which the backward pass needs")
    options.add_argument("--deterministic", action="store_true", help="bitwise reproducible gradients")
    options.add_argument("--dbias", action="store_true", help="the gradient of the bias, with --backward")
    options.add_argument("--dsinks", action="store_true", help="the gradient of the sinks, with --backward")
    options.add_argument("--num-splits", type=positive, metavar="N", help="chunks of the keys of each sequence, with --pages")
    options.add_argument("--bucket", type=_bucket, metavar="N", help="round lengths up to multiples of N, or to a power_of_two")
    options.add_argument("--max-workspace", type=positive, metavar="BYTES", help="limit of cuDNN's workspace")


def shape(text: str) -> tuple[int, ...]:
    """Parse a shape."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 128,32,4096,1") from None


def _bucket(text: str) -> int | str:
    return text if text == "power_of_two" else positive(text)


def _window(text: str) -> tuple[int | None, ...]:
    try:
        left, right = (int(part) if part else None for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window such as 127,0 or 127,") from None
    return left, right


def problem_of(arguments: argparse.Namespace, queries: tuple[int, ...], *, backward: bool, stats: bool = False) -> Problem:
    """Return the problem of the shape of q, in the order of ``--layout``, and of the options that :func:`add_options` adds.

    With ``stats`` the forward pass returns the log-sum-exp, also without ``--stats``.

    Raises:
        CommandError: the shapes do not describe a call.
        TypeError, ValueError: as :func:`cupy_sdpa.problem`.
    """
    sizes = [_sizes(arguments, queries)]
    keys = arguments.keys and _sizes(arguments, arguments.keys)
    if keys is None:
        heads, of_keys = sizes[0]["h"], arguments.kv_heads or sizes[0]["h"]
        if of_keys and heads % of_keys:
            near = max(n for n in range(1, of_keys) if heads % n == 0)
            raise CommandError(
                f"--kv-heads is {of_keys}, and q has {heads} heads: {heads} must be a multiple of it, such as --kv-heads {near}"
            )
        keys = {**sizes[0], "h": of_keys}
    elif arguments.kv_heads:
        raise CommandError("--kv-heads and --keys are given: the heads are in the shape of --keys")
    elif keys["b"] != sizes[0]["b"]:
        raise CommandError(f"--keys has batch {keys['b']}, and q has batch {sizes[0]['b']}: they must be equal")
    if arguments.num_splits and not arguments.pages:
        raise CommandError("--num-splits is given without --pages: only paged keys are split")
    sizes += [keys, _sizes(arguments, arguments.values) if arguments.values else keys]
    options = dict(_options(arguments, sizes))
    if not backward:
        options["return_stats"] = stats or arguments.stats
    for name in ("dbias", "dsinks"):
        if getattr(arguments, name) and not arguments.backward:
            raise CommandError(f"--{name} is given without --backward: only the backward pass has gradients")
        if getattr(arguments, name) and backward:
            options[f"return_{name}"] = True
    shapes = [tuple(x[axis] for axis in _axes(arguments, name)) for name, x in zip("qkv", sizes, strict=True)]
    if arguments.layout != "dhsb":
        options["layout"] = "thd" if arguments.packed else arguments.layout
    try:
        return problem(*shapes, dtype=arguments.dtype, backward=backward, deterministic=arguments.deterministic, **options)
    except ValueError as error:
        raise CommandError(_on_the_command_line(str(error))) from error


#: What messages of :func:`cupy_sdpa.problem` say of other axes, in code.
_CODE = re.compile(r"\. (Arrays in C order|Heads and seq may be exchanged).*|; omit layout for arrays.*| \[layout='\w+'\]$")


def _on_the_command_line(message: str) -> str:
    """Return the message of an error of :func:`cupy_sdpa.problem`, with ``--layout`` instead of code."""
    text = _CODE.sub("", message)
    return message if text == message else f"{text}. --layout is the order of the axes"


def _sizes(arguments: argparse.Namespace, lengths: tuple[int, ...]) -> dict[str, int]:
    """Return the lengths of the axes ``d``, ``h``, ``s`` and ``b``; raise if not four, or probably in another order."""
    text = ",".join(map(str, lengths))
    if len(lengths) != 4:
        raise CommandError(f"{text} has {len(lengths)} numbers; a shape has 4: {','.join(arguments.layout.upper())}")
    first, *_, last = lengths
    if arguments.layout == "dhsb" and first not in _HEAD_DIMS and last in _HEAD_DIMS:
        right = f"{last},{lengths[1]},{lengths[2]},{first}"
        raise CommandError(
            f"{text} is read as (head_dim, heads, seq, batch): head_dim {first}, batch {last}. If it is in PyTorch's order "
            f"(batch, heads, seq, head_dim), write {right}, or add --layout bhsd; if the head_dim is {first}, pad it to "
            f"{-(-first // 8) * 8}"
        )
    return dict(zip(arguments.layout, lengths, strict=True))


def _axes(arguments: argparse.Namespace, name: str) -> str:
    """Return the axes of q, k or v in the shape that the call gets."""
    if arguments.packed and not (arguments.pages and name != "q"):
        return "dht" if arguments.layout == "dhsb" else "thd"
    if arguments.pages and name != "q":  # pages of tokens instead of sequences
        return str(arguments.layout).replace("s", "g").replace("b", "p")
    return str(arguments.layout)


def _options(arguments: argparse.Namespace, sizes: list[dict[str, int]]) -> Any:
    """Yield the options of the call; adds the lengths of packed and paged axes to the sizes."""
    q, k, v = sizes
    for name in ("window", "scale", "softcap", "bias_repeats", "num_splits", "bucket", "max_workspace"):
        if (value := getattr(arguments, name)) is not None:
            yield name, value
    for name in ("mask", "bias"):
        if (given := getattr(arguments, name)) is not None:
            own = given or (k["s"], q["s"], 1, 1)
            yield name, own if given or arguments.layout == "dhsb" else own[::-1]
    if arguments.lengths and arguments.packed:
        raise CommandError("--lengths and --packed are given: packed sequences already have lengths")
    names = {"causal": "causal", "alibi": "alibi_slopes", "sinks": "sinks", "dropout": "dropout_p", "lengths": "seq_lens_kv"}
    for given, name in names.items():
        if value := getattr(arguments, given):
            yield name, value
    if arguments.packed:
        for part, side in ((q, "q"), (k, "kv")):
            if side == "q" or not arguments.pages:
                yield f"cu_seqlens_{side}", (part["b"] + 1,)
                yield f"max_seqlen_{side}", part["s"]
        for part in (q, k, v):
            part["t"] = part["s"] * part["b"]
    if page := arguments.pages:
        count = -(-k["s"] // page)
        for part in (k, v):
            part |= {"g": page, "p": count * part["b"]}
        yield "page_table", (count, k["b"]) if arguments.layout == "dhsb" else (k["b"], count)
