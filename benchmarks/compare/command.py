"""The command ``compare``: measure, print the table, and write CSV, JSON and figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cupy_sdpa._cli.helpers import machine, picture
from cupy_sdpa._cli.helpers.console import CommandError, Progress, file_error, one_line, output_file, positive

from .. import presets
from ..common import script
from ..common.accuracy import WrongResultError
from ..common.timing import ROUNDS
from ..contenders import registry
from ..contenders.ours import Ours
from . import cpu, plots, table
from .run import Settings, compile_peers, run

_EPILOG = """\
A ratio is our time divided by the other contender's. All contenders run on the
same inputs in the same process, in an order that is shuffled in every round.
Their results are compared with ours first. A share is relative to the rate of
a large matrix product in the same run, for decoding to the rate of a copy.

examples:
  python -m benchmarks compare --list
  python -m benchmarks compare --presets llama-8b decode --csv out.csv
  python -m benchmarks compare --compile --peers flex --presets vit
  python -m benchmarks compare --cpu                             needs no GPU
  python -m benchmarks compare --from out.csv --plots pictures   needs no GPU
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = script.parser(
        "compare", "Time attention and its gradients against PyTorch, cudnn-frontend, FlexAttention and JAX."
    )
    parser.epilog = _EPILOG
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cpu", action="store_true", help="time the CPU engine against plain numpy only")
    mode.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="read the rows of an earlier run from its CSV file"
    )
    mode.add_argument("--list", action="store_true", help="list presets, directions and peers, and which peers are available")
    mode.add_argument(
        "--compile", action="store_true", help="call every peer once to fill the caches of compiled kernels; no measurement"
    )
    parser.add_argument("--presets", nargs="+", metavar="NAME", help="names or prefixes of presets (default: all)")
    parser.add_argument("--directions", nargs="+", choices=presets.DIRECTIONS, metavar="NAME",
        help=f"{', '.join(presets.DIRECTIONS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="*", metavar="NAME", help=f"{', '.join(registry.PEERS)} (default: all; no name: none)")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"rounds (default {ROUNDS}, with --cpu {cpu.ROUNDS})")
    parser.add_argument("--tune", action="store_true", help="autotune our plans first (docs/plans.md)")
    parser.add_argument(
        "--cold", metavar="PRESET", help="time the first call in a new process for this preset, or none (default: the first)"
    )
    parser.add_argument("--csv", type=output_file, metavar="FILE", help="write all rows, each with all versions")
    parser.add_argument("--json", action="store_true", help="print all rows as JSON instead of the table")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write figures (needs matplotlib)")
    parser.add_argument("--plot-format", choices=("svg", "png"), default="svg", help="format of the figures (default svg)")
    return parser


def main(words: Sequence[str]) -> int:
    """Run ``compare``; returns 1 if one of our own calls failed.

    Raises:
        CommandError: it cannot run.
    """
    arguments = parser().parse_args(words)
    _check_combination(arguments)
    settings = _settings(arguments)
    if arguments.list:
        _list(as_json=arguments.json)
        return 0
    if arguments.compile:
        _check_gpu(settings)
        with Progress("compiling") as bar:
            for line in compile_peers(settings, _reporter(bar)):
                print(f"left out: {line}")
        return 0
    if arguments.plots and not picture.importable():
        raise CommandError("--plots needs matplotlib: pip install 'cupy-sdpa[plot]'")
    rows = _collect(arguments, settings)
    return int(any(row["left_out"] and row["way"] == Ours.name for row in rows))


def _collect(arguments: argparse.Namespace, settings: Settings) -> list[table.Row]:
    """Measure or read the rows, and write them to all outputs; rows of an interrupted run are written, too.

    Raises:
        CommandError: a file cannot be read or written, or the results differ.
    """
    rows: list[table.Row] = []
    try:
        for new in _rows(arguments, settings):
            rows += new
            if arguments.csv:
                script.write_csv(arguments.csv, rows)  # after every case, so that an interrupted run keeps its rows
    except OSError as error:
        raise CommandError(file_error(error)) from error
    except (ValueError, WrongResultError) as error:
        raise CommandError(str(error)) from error
    finally:
        if rows:
            _show(arguments, rows)
    return rows


#: The options that cannot be combined with a mode.
_EXCLUDED = {
    "cpu": ("presets", "directions", "peers", "tune", "cold"),
    "source": ("rounds", "tune", "cold", "csv"),
    "list": ("presets", "directions", "peers", "rounds", "tune", "cold", "csv", "plots"),
    "compile": ("rounds", "tune", "cold", "csv", "plots", "json"),
}


def _check_combination(arguments: argparse.Namespace) -> None:
    for mode, names in _EXCLUDED.items():
        present = [name for name in names if getattr(arguments, name) not in (None, False)]
        if getattr(arguments, mode) and present:
            raise CommandError(f"--{present[0]} has no effect with --{'from' if mode == 'source' else mode}: remove it")


def _settings(arguments: argparse.Namespace) -> Settings:
    """What to measure; imports no library."""
    try:
        selected, peers = presets.select(arguments.presets), registry.select(arguments.peers)
        cold = selected[0] if arguments.cold is None else None
        if arguments.cold not in (None, "none"):
            (cold,) = presets.select([arguments.cold])
    except ValueError as error:
        raise CommandError(str(error)) from error
    directions = arguments.directions or presets.DIRECTIONS
    return Settings(selected, directions, peers, arguments.rounds or ROUNDS, arguments.tune, cold)


def _rows(arguments: argparse.Namespace, settings: Settings) -> Iterator[list[table.Row]]:
    """The rows of an earlier run, or of each case as soon as it is measured."""
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
    if arguments.source:
        yield [row for row in table.read_csv(arguments.source) if _selected(row, arguments, settings)]
        return
    with Progress("measuring") as bar:
        report = _reporter(bar)
        if not arguments.cpu:
            _check_gpu(settings)
            yield from run(settings, report)
        if arguments.cpu or arguments.presets is None:
            rounds = arguments.rounds or cpu.ROUNDS
            yield [table.complete(row) for row in cpu.measure(rounds=rounds, progress=report)]


def _selected(row: table.Row, arguments: argparse.Namespace, settings: Settings) -> bool:
    """Whether the options select a row of an earlier run."""
    contenders = (Ours.name, *(peer.name for peer in settings.peers))
    return (
        (arguments.presets is None or row["preset"] in {preset.name for preset in settings.presets})
        and row["direction"] in settings.directions
        and (arguments.peers is None or row["way"] in contenders)
    )


def _check_gpu(settings: Settings) -> None:
    if reason := machine.no_gpu():
        raise CommandError(f"compare needs a GPU ({reason}); --cpu runs the part that needs none")
    for peer in settings.peers:
        registry.unavailable(peer)  # imports peers before cuDNN is loaded, so that all use the same library
    if obstacles := machine.obstacles():
        raise CommandError(f"compare cannot run here: {obstacles[0]}; --cpu runs the part that needs no GPU")


def _reporter(bar: Progress) -> Callable[[int, int, str], None]:
    """A function that shows progress: a bar on a terminal, else a line for every case."""

    def report(done: int, total: int, case: str) -> None:
        if sys.stderr.isatty():
            bar(done, total)
        else:
            print(f"{done + 1} of {total}: {case}", file=sys.stderr, flush=True)

    return report


def _show(arguments: argparse.Namespace, rows: list[table.Row]) -> None:
    """Print the table or JSON, and draw the figures."""
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        for line in table.lines(rows):
            print(line)
    if arguments.plots:
        for path in plots.draw(rows, arguments.plots, arguments.plot_format):
            print(f"wrote {path}", file=sys.stderr)


def _list(*, as_json: bool) -> None:
    """Print all presets, directions and peers."""
    peers = {name: one_line(registry.unavailable(kind)) or "available" for name, kind in registry.PEERS.items()}
    if as_json:
        load_target = {preset.name: _description(preset) for preset in presets.PRESETS}
        print(json.dumps({"presets": load_target, "directions": presets.DIRECTIONS, "peers": peers}, indent=1))
        return
    print("presets:")
    for preset in presets.PRESETS:
        print(f"  {preset.name:26}{_description(preset)}")
    print(f"directions: {', '.join(presets.DIRECTIONS)}")
    print("peers:")
    for name, state in peers.items():
        print(f"  {name:16}{registry.PEERS[name].title:18}{state}")


def _description(preset: presets.Preset) -> str:
    heads = f"{preset.hq}/{preset.hkv} heads"
    lengths = f"{preset.sq}" if preset.sq == preset.skv else f"{preset.sq} x {preset.skv}"
    dims = f"D {preset.d}" if preset.d == preset.dv else f"D {preset.d}, Dv {preset.dv}"
    mask = "causal" if preset.causal else "full"
    window = "" if preset.left is None else f", window {preset.left + 1}"
    return f"batch {preset.b}, {heads}, {lengths}, {dims}, {mask}{window}: {', '.join(preset.directions)}"
