"""``bench``: our calls beside everybody else's on the GPU, or beside plain numpy on the CPU; tables, files and pictures."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ..bench import cpu, plots, presets, table, ways
from ..bench.measure import ROUNDS
from ..bench.run import Wanted, compiled, run
from ..bench.way import Ours
from . import machine, picture
from .console import CommandError, Help, Progress, one_line, positive, told

_EPILOG = """\
A ratio is our time over the other way's. Every way computes on the same
numbers, in one run, in an order that is shuffled in every round; its results
are compared with ours first. A share is of the rate of a large matrix product
in the same run, for decoding of that of a copy.

examples:
  python -m cupy_sdpa bench --list
  python -m cupy_sdpa bench --presets llama-8b decode --csv out.csv
  python -m cupy_sdpa bench --compile --peers flex --presets vit
  python -m cupy_sdpa bench --cpu                             needs no GPU
  python -m cupy_sdpa bench --from out.csv --plots pictures   needs no GPU
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="how fast it is, beside everybody else's",
        description="Time attention and its gradients beside PyTorch, cudnn-frontend, FlexAttention and JAX, on this GPU.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--cpu", action="store_true", help="only the interpreter beside plain numpy, on the CPU")
    what.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: take an earlier run's CSV")
    what.add_argument("--list", action="store_true", help="show presets, directions and peers, and what is missing here")
    what.add_argument(
        "--compile", action="store_true", help="measure nothing: call every peer once, so that its caches are filled"
    )
    parser.add_argument("--presets", nargs="+", metavar="NAME", help="names, or how they begin (default: all)")
    parser.add_argument("--directions", nargs="+", choices=presets.DIRECTIONS, metavar="NAME",
        help=f"{', '.join(presets.DIRECTIONS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="*", metavar="NAME", help=f"{', '.join(ways.PEERS)} (default: all; no name: none)")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"of every way (default {ROUNDS}, --cpu {cpu.ROUNDS})")
    parser.add_argument("--tune", action="store_true", help="choose our plans by measuring first (docs/plans.md)")
    parser.add_argument(
        "--cold", metavar="PRESET", help="whose first call in a new process is timed, or none (default: the first)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every figure, with all versions in every row")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON in place of the table")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures, with matplotlib")
    parser.add_argument("--plot-format", choices=("svg", "png"), default="svg", help="of the pictures (default svg)")
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``bench``; 1 where our own calls failed.

    Raises:
        CommandError: it cannot be done.
    """
    _refuse_meaningless(arguments)
    wanted = _wanted(arguments)
    if arguments.list:
        _list(as_json=arguments.json)
        return 0
    if arguments.compile:
        _check_gpu(wanted)
        with Progress("compiling") as bar:
            for line in compiled(wanted, _telling(bar)):
                print(f"left out: {line}")
        return 0
    if arguments.plots and not picture.importable():
        raise CommandError("--plots needs matplotlib: pip install 'cupy-sdpa[plot]'")
    rows: list[table.Row] = []
    try:
        for some in _measured(arguments, wanted):
            rows += some
            if arguments.csv:
                table.write_csv(arguments.csv, rows)  # every time, so that a run that is cut short leaves what it has
    except OSError as error:
        raise CommandError(told(error)) from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    finally:
        if rows:
            _show(arguments, rows)
    return int(any(row["left_out"] and row["way"] == Ours.name for row in rows))


#: What has no meaning beside what is done.
_MEANINGLESS = {
    "cpu": ("presets", "directions", "peers", "tune", "cold"),
    "source": ("rounds", "tune", "cold", "csv"),
    "list": ("presets", "directions", "peers", "rounds", "tune", "cold", "csv", "plots"),
    "compile": ("rounds", "tune", "cold", "csv", "plots", "json"),
}


def _refuse_meaningless(arguments: argparse.Namespace) -> None:
    for mode, names in _MEANINGLESS.items():
        given = [name for name in names if getattr(arguments, name) not in (None, False)]
        if getattr(arguments, mode) and given:
            raise CommandError(f"--{given[0]} has no meaning with --{'from' if mode == 'source' else mode}: leave it out")


def _wanted(arguments: argparse.Namespace) -> Wanted:
    """What is asked for, read before anything is loaded."""
    try:
        chosen, peers = presets.chosen(arguments.presets), ways.chosen(arguments.peers)
        cold = chosen[0] if arguments.cold is None else None
        if arguments.cold not in (None, "none"):
            (cold,) = presets.chosen([arguments.cold])
    except ValueError as error:
        raise CommandError(str(error)) from error
    directions = arguments.directions or presets.DIRECTIONS
    return Wanted(chosen, directions, peers, arguments.rounds or ROUNDS, arguments.tune, cold)


def _measured(arguments: argparse.Namespace, wanted: Wanted) -> Iterator[list[table.Row]]:
    """The rows as they come."""
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
    if arguments.source:
        yield [row for row in table.read_csv(arguments.source) if _among(row, arguments, wanted)]
        return
    if arguments.csv:
        _check_writable(arguments.csv)  # so that nothing is measured in vain
    with Progress("measuring") as bar:
        progress = _telling(bar)
        if not arguments.cpu:
            _check_gpu(wanted)
            yield from run(wanted, progress)
        if arguments.cpu or arguments.presets is None:
            rounds = arguments.rounds or cpu.ROUNDS
            yield [table.tidy(row) for row in cpu.measure(rounds=rounds, progress=progress)]


def _check_writable(path: Path) -> None:
    """Raise OSError where a file cannot be written; one that is not there yet is not left behind."""
    target = Path(os.path.realpath(path))  # a link stays a link
    is_new = not target.exists()
    try:
        target.open("a").close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if is_new:
        target.unlink()


def _among(row: table.Row, arguments: argparse.Namespace, wanted: Wanted) -> bool:
    """Whether an earlier row is among what is asked for; what is not asked about counts as asked for."""
    ways_wanted = (Ours.name, *(peer.name for peer in wanted.peers))
    return (
        (arguments.presets is None or row["preset"] in {preset.name for preset in wanted.presets})
        and row["direction"] in wanted.directions
        and (arguments.peers is None or row["way"] in ways_wanted)
    )


def _check_gpu(wanted: Wanted) -> None:
    if reason := machine.no_gpu():
        raise CommandError(f"the bench needs a GPU ({reason}); --cpu runs the part that needs none")
    for peer in wanted.peers:
        ways.why_not(peer)  # imported before cuDNN is looked for, so that all use one
    if obstacles := machine.obstacles():
        raise CommandError(f"the bench cannot run here: {obstacles[0]}; --cpu runs the part that needs no GPU")


def _telling(bar: Progress) -> Callable[[int, int, str], None]:
    """A bar on a terminal; elsewhere a line for every step, for a run takes minutes."""

    def tell(done: int, total: int, what: str) -> None:
        if sys.stderr.isatty():
            bar(done, total)
        else:
            print(f"{done + 1} of {total}: {what}", file=sys.stderr, flush=True)

    return tell


def _show(arguments: argparse.Namespace, rows: list[table.Row]) -> None:
    """The table or JSON, and the pictures."""
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        for line in table.lines(rows):
            print(line)
    if arguments.plots:
        for path in plots.draw(rows, arguments.plots, arguments.plot_format):
            print(f"wrote {path}", file=sys.stderr)


def _list(*, as_json: bool) -> None:
    """Everything that can be chosen."""
    if as_json:
        peers = {name: one_line(ways.why_not(peer)) or "is here" for name, peer in ways.PEERS.items()}
        found = {"presets": {preset.name: _described(preset) for preset in presets.PRESETS}}
        print(json.dumps({**found, "directions": presets.DIRECTIONS, "peers": peers}, indent=1))
        return
    print("presets:")
    for preset in presets.PRESETS:
        print(f"  {preset.name:26}{_described(preset)}")
    print(f"directions: {', '.join(presets.DIRECTIONS)}")
    print("peers:")
    for name, peer in ways.PEERS.items():
        print(f"  {name:16}{peer.title:18}{one_line(ways.why_not(peer)) or 'is here'}")


def _described(preset: presets.Preset) -> str:
    heads = f"{preset.hq}/{preset.hkv} heads"
    lengths = f"{preset.sq}" if preset.sq == preset.skv else f"{preset.sq} x {preset.skv}"
    dims = f"D {preset.d}" if preset.d == preset.dv else f"D {preset.d}, Dv {preset.dv}"
    mask = "causal" if preset.causal else "full"
    window = "" if preset.left is None else f", window {preset.left + 1}"
    return f"batch {preset.b}, {heads}, {lengths}, {dims}, {mask}{window}: {', '.join(preset.directions)}"
