"""Host time of every option, alone and in a mix of calls, against PyTorch's closest call in the same run.

    python -m benchmarks host_options [results.csv] [--only NAME ...] [--no-flex]
    python -m benchmarks host_options --profile [results.csv] [--only NAME ...]

bfloat16, head dim 64, 8 heads, length 128, batch 2: the device is never the limit. Alone, a call is repeated on the same
addresses and an idle device: median microseconds until it returns. In a mix, calls of all kinds take turns, each on the next of
64 sets of arrays, as in a model with many layers: the mean microseconds of the calls of a kind, of the median round. There are
two mixes: the ten options, and the other calls. PyTorch runs its closest calls in the same order, in interleaved rounds, and
each measured round follows one of the same library that is not measured, as in a program that uses one library. Ratios are
medians of the ratios of rounds next to each other.

``--profile`` measures our calls only: the microseconds of each step of the calls in the two mixes.

If PyTorch has several ways to compute a kind, the first that runs is measured: for scaled dot-product attention the backends in
the order cuDNN, flash, efficient, math. FlexAttention is compiled first, which takes most of the time. Needs PyTorch besides
CuPy; without it, and where a call fails, cells are empty.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import cupy_sdpa
from cupy_sdpa._cli.helpers.console import one_line
from cupy_sdpa.device import cupy_runtime

from ..common.machine import versions
from ..common.script import add_csv, check_gpu, listed, parser, write_csv
from ..common.timing import interleaved, ratio
from . import measure, ours, profile
from .measure import Chosen, Wait, Way

#: The row of a prepared call against ``cudnnBackendExecute``, and the limit of its ratio.
PREPARED, PREPARED_LIMIT = "prepared", 1.25
NAMES = (PREPARED, *(kind.name for kind in ours.KINDS))
#: The columns of a row besides the versions. ``message`` has the reasons why something did not run.
COLUMNS = (
    "kind", "mix", "us", "peer", "peer_us", "ratio", "mix_us", "peer_mix_us", "mix_ratio", "limit", "holds", "message",
)  # fmt: skip

Row = dict[str, Any]


def load_peers(*, with_flex: bool) -> tuple[Any, str, str]:
    """PyTorch's calls, its version, and why there are none."""
    try:
        import torch

        from .pytorch import Peers

        return Peers(with_flex), str(torch.__version__), ""
    except Exception as error:
        return None, "", f"PyTorch does not run: {type(error).__name__}: {one_line(str(error))}"


class Group:
    """The calls of several kinds, ours and the peers', and their rows.

    Args:
        name: the name of the mix; empty if the calls are measured only alone.
        wait: waits for the device.
    """

    def __init__(self, name: str, wait: Wait) -> None:
        self._name, self._wait = name, wait
        self.rows: dict[str, Row] = {}
        self._ours: dict[str, Chosen] = {}
        self._peers: dict[str, Chosen] = {}

    def add(self, kind: str, limit: float | None, way: Way, peer_ways: Sequence[Way], sets: int) -> None:
        """Add a kind of call: prepare it on all sets, and start its row."""
        row = self.rows[kind] = dict.fromkeys(COLUMNS)
        row |= {"kind": kind, "mix": self._name, "limit": limit, "message": ""}
        for found, ways in ((self._ours, [way]), (self._peers, peer_ways)):
            chosen, failures = measure.choose(ways, self._wait, sets)
            if chosen:
                found[kind] = chosen
            row["message"] = "; ".join(filter(None, [row["message"], *failures]))
        if kind in self._peers:
            row["peer"] = self._peers[kind].way.title

    def measure_alone(self) -> None:
        """Measure every call on an idle device."""
        timers = {
            (side, kind): measure.idle_timer(chosen, self._wait)
            for side, found in (("us", self._ours), ("peer_us", self._peers))
            for kind, chosen in found.items()
        }
        times = interleaved(timers, measure.ROUNDS, seconds=measure.SECONDS)
        for (column, kind), several in times.items():
            self.rows[kind][column] = round(statistics.median(several), 2)
        for kind in self._ours.keys() & self._peers.keys():
            self.rows[kind]["ratio"] = round(ratio(times["us", kind], times["peer_us", kind]), 3)

    def measure_mix(self, peers_active: measure.Context) -> None:
        """Measure the mix of all kinds."""
        mixes = {}
        if self._ours:
            mixes["mix_us"] = measure.Mix({kind: x.calls for kind, x in self._ours.items()}, self._wait, captured=captured)
        if self._peers:
            peers = {kind: chosen.calls for kind, chosen in self._peers.items()}
            mixes["peer_mix_us"] = measure.Mix(peers, self._wait, peers_active)
        measure.measure_mixes(mixes)
        for column, mix in mixes.items():
            for kind, several in mix.rounds.items():
                self.rows[kind][column] = round(statistics.median(several), 2)
        for kind in self._ours.keys() & self._peers.keys():
            several, others = (mix.rounds[kind] for mix in mixes.values())
            self.rows[kind]["mix_ratio"] = round(ratio(several, others), 3)


def measure_mix(name: str, kinds: Sequence[ours.Kind], sets: Sequence[ours.Inputs], peers: Any, wait: Wait) -> list[Row]:
    """The rows of the kinds of one mix."""
    group = Group(name, wait)
    for kind in kinds:
        way = Way("cupy_sdpa", functools.partial(on_set, kind, sets))
        group.add(kind.name, kind.limit, way, peers.ways(kind.name) if peers else [], len(sets))
    group.measure_alone()
    group.measure_mix(peers.active if peers else contextlib.nullcontext)
    return list(group.rows.values())


def on_set(kind: ours.Kind, sets: Sequence[ours.Inputs], number: int) -> measure.Call:
    """Our call of a kind on the set of arrays with a number."""
    return kind.call(sets[number])


def measure_prepared(inputs: ours.Inputs, wait: Wait) -> list[Row]:
    """The row of a prepared call, next to ``cudnnBackendExecute`` on the same plan."""
    q, k, v = inputs.qkv()
    made: list[Any] = []

    def prepared(number: int) -> measure.Call:
        call, out = cupy_sdpa.prepare(q, k, v), cupy_sdpa.attention(q, k, v)
        return functools.partial(call, q, k, v, out=out)

    def execute(number: int) -> measure.Call:
        from ..host import Steps

        measure.repeat(functools.partial(cupy_sdpa.attention, q, k, v), wait)
        steps = Steps(q, k, v)
        made.append(steps)
        run: measure.Call = steps.execute()
        return run

    group = Group("", wait)
    group.add(PREPARED, PREPARED_LIMIT, Way("cupy_sdpa", prepared), [Way("cudnnBackendExecute", execute)], 1)
    group.measure_alone()
    for steps in made:
        steps.close()
    return list(group.rows.values())


def judge(row: Row) -> None:
    """Set whether the ratio of a row with a limit holds: that of the mix, or alone for a call without a mix."""
    value = row["mix_ratio" if row["mix"] else "ratio"]
    if row["limit"] is not None and value is not None:
        row["holds"] = value <= row["limit"]


def acceptance(rows: Sequence[Row]) -> list[str]:
    """A line for every row with a limit."""
    lines = []
    for row in rows:
        if row["limit"] is None:
            continue
        value = row["mix_ratio" if row["mix"] else "ratio"]
        said = "not measured" if value is None else f"{value:.3f} {'holds' if row['holds'] else 'DOES NOT HOLD'}"
        place = "in the mix" if row["mix"] else "alone"
        lines.append(f"  {row['kind']:18} {place:10} of {row['peer'] or 'no peer'}: {said}, limit {row['limit']}")
    return lines


def described(row: Row) -> str:
    """The printed line of a row."""
    cells = [f"{'' if row[name] is None else row[name]:>9}" for name in COLUMNS if name.endswith(("us", "ratio"))]
    return f"{row['kind']:18} {' '.join(cells)}  {row['peer'] or ''}"


def wait(results: Any) -> None:
    """Wait for the device."""
    cupy_runtime.cupy().cuda.Device().synchronize()


def captured() -> int:
    """The number of captured CUDA graphs."""
    return cupy_sdpa.get_plan_cache().recordings


def input_sets() -> list[ours.Inputs]:
    """The sets of arrays."""
    model = ours.Model(cupy_runtime.cupy())
    return [ours.Inputs(model, number) for number in range(measure.SETS)]


def print_profile(names: Sequence[str], path: str | None) -> int:
    """Measure the steps of our calls, print them and write them."""
    used, rows = versions(), []
    print(listed(used))
    print(profile.header())
    sets = input_sets()
    for mix in (ours.OPTIONS, ours.OTHERS):
        kinds = [kind for kind in ours.KINDS if kind.mix == mix and kind.name in names]
        if kinds:
            found = profile.profile({kind.name: [kind.call(x) for x in sets] for kind in kinds}, wait, captured)
            print("\n".join(map(profile.described, found)), flush=True)
            rows += [{"mix": mix, **row, **used} for row in found]
    if path:
        write_csv(path, rows)
    return 0


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    arguments = parser("host_options", __doc__)
    add_csv(arguments)
    arguments.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    arguments.add_argument("--no-flex", action="store_true", help="without FlexAttention, which has to be compiled")
    arguments.add_argument("--profile", action="store_true", help="the time of each step of our calls, without PyTorch")
    given = arguments.parse_args(words)
    check_gpu("host_options")
    names = given.only or NAMES
    if given.profile:
        return print_profile(names, given.csv)
    peers, version, reason = load_peers(with_flex=not given.no_flex)
    used = versions(torch=version)
    print(listed(used))
    if reason:
        print(reason)
    sets = input_sets()
    print(f"{'kind':18} {' '.join(f'{name:>9}' for name in COLUMNS if name.endswith(('us', 'ratio')))}  peer")
    rows: list[Row] = []
    for mix in ("", ours.OPTIONS, ours.OTHERS):
        kinds = [kind for kind in ours.KINDS if kind.mix == mix and kind.name in names]
        if mix == "" and PREPARED in names:
            found = measure_prepared(sets[0], wait)
        else:
            found = measure_mix(mix, kinds, sets, peers, wait) if kinds else []
        for row in found:
            judge(row)
            print(described(row), flush=True)
            if row["message"]:
                print(f"  {row['message']}", flush=True)
        rows += found
    print("ratios and their limits:")
    print("\n".join(acceptance(rows)))
    if given.csv:
        write_csv(given.csv, [{**row, **used} for row in rows])
    return 0
