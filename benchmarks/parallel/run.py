"""Attention over several GPUs: time, hidden transfers, memory, exactness.

    python -m benchmarks parallel [results.csv] [--members N] [--threads] [--cpu] [--only NAME ...] [--methods METHOD ...]
                                  [--model]

Each GPU has its own process, which this command starts unless torchrun, mpirun or srun did. With ``--threads`` the members are
threads of one process; with fewer GPUs than members, on one GPU, and transfers are then copies on it. The ideal time is that
of one GPU for the whole problem, divided by the number of GPUs. ``calls_ms`` is the time without transfers, ``transfers_ms``
that of the same transfers alone; the hidden fraction is 1 - (total - calls) / transfers. ``timeline`` lists when the transfers
of the first member begin and end on the GPU, from events. Predictions use the measured rates of one GPU and of a link.
``--model`` prints predictions for 2, 4 and 8 GPUs alone, from the rates that are given or assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cupy_sdpa._cli.helpers.console import CommandError, positive, positive_number
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.parallel import connect
from cupy_sdpa.parallel.groups.launch import environment
from cupy_sdpa.parallel.planning.configuration import METHODS
from cupy_sdpa.parallel.planning.report import Machine

from ..common.machine import versions
from ..common.script import add_csv, check_gpu, listed, parser, write_csv
from . import model, processes, pytorch
from .measure import Engine, link_bandwidth, measure, one_device_ms
from .model import CPU_PROBLEMS, PROBLEMS, Problem, configuration, operations, predicted

#: The columns of the rows.
COLUMNS = (
    "kind", "problem", "members", "gpus", "method", "pass", "one_gpu_ms", "ideal_ms", "total_ms", "of_ideal", "calls_ms",
    "transfers_ms", "hidden", "predicted_ms", "sent_mib", "memory_mib", "predicted_memory_mib", "error", "forward_ms",
    "forward_of_ideal", "both_ms", "both_of_ideal", "forward_sent_mib", "backward_sent_mib", "link_gbs", "timeline", "message",
)  # fmt: skip


def measured_machine(engine: Engine, problem: Problem, times: dict[str, float], link: float) -> Machine:
    """The rates of one GPU for a problem, and of a link."""
    forward, backward = (
        operations(problem, engine.members, name == "backward") / times[name] * 1e3 for name in ("forward", "backward")
    )
    return Machine(forward, backward, link or Machine().link)


def measured_rows(engine: Engine, problem: Problem, methods: Sequence[str], link: float) -> Iterator[dict[str, Any]]:
    """The rows of a problem."""
    config = configuration(problem, engine.members)
    times = one_device_ms(engine, problem, problem.length * engine.members)
    found: dict[str, float] = {}
    machine = measured_machine(engine, problem, times, link)
    gpus = max(engine.gpus, 1)
    share = engine.members / gpus  # the members of a GPU
    for method in methods:
        if method in config.refusals:
            print(f"{problem.name}, {method}: {config.refusals[method]}", flush=True)
            continue
        for name, timings, error, memory in measure(engine, problem, method):
            total = max(timing.total for timing in timings)
            ideal, found[name] = times[name] / gpus, total
            expected = predicted(problem, engine.members, method, name == "backward", machine)
            assert expected is not None
            yield {
                "kind": "measured", "problem": problem.name, "members": engine.members, "gpus": engine.gpus, "method": method,
                "pass": name, "one_gpu_ms": round(times[name], 3), "ideal_ms": round(ideal, 3), "total_ms": round(total, 3),
                "of_ideal": round(ideal / total, 3), "calls_ms": round(max(x.calls for x in timings), 3),
                "transfers_ms": round(max(x.transfers for x in timings), 3),
                "hidden": round(min(x.hidden for x in timings), 3),
                "predicted_ms": round((expected.compute * share + expected.exposed) * 1e3, 3),
                "sent_mib": round(timings[0].sent / 2**20, 2), "memory_mib": round(memory / 2**20, 1),
                "predicted_memory_mib": round(expected.memory / 2**20, 1), "error": f"{error:.2e}",
                "link_gbs": round(link / 1e9, 1), "timeline": timings[0].timeline,
            }  # fmt: skip
        ideal, total = sum(times.values()) / gpus, sum(found.values())
        yield {
            "kind": "measured", "problem": problem.name, "members": engine.members, "gpus": engine.gpus, "method": method,
            "pass": "both", "ideal_ms": round(ideal, 3), "total_ms": round(total, 3), "of_ideal": round(ideal / total, 3),
        }  # fmt: skip
    if pytorch.is_available(engine) and pytorch.supports(problem):
        yield from pytorch_rows(engine, problem, methods, times)
    if engine.gpus:
        yield from ({**row, "link_gbs": round(machine.link / 1e9, 1)} for row in model.rows(problem, machine))


def pytorch_rows(engine: Engine, problem: Problem, methods: Sequence[str], times: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The rows of PyTorch's context parallelism; the ideal time is that of ours."""
    for method, name, ms, error, backend in pytorch.rows(engine, problem, methods):
        row = {
            "kind": "PyTorch", "problem": problem.name, "members": engine.members, "gpus": engine.gpus, "method": method,
            "pass": name, "message": backend,
        }  # fmt: skip
        if name:
            ideal = (times["forward"] + times["backward"] if name == "both" else times[name]) / engine.gpus
            row |= {"ideal_ms": round(ideal, 3), "total_ms": round(ms, 3), "of_ideal": round(ideal / ms, 3)}
            row |= {"error": f"{error:.2e}"}
        yield row


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    arguments = parser("parallel", __doc__)
    add_csv(arguments)
    arguments.add_argument(
        "--members", type=positive, metavar="N", help="number of members; by default that of GPUs, at least 2"
    )
    arguments.add_argument("--threads", action="store_true", help="one process with a thread for each GPU")
    arguments.add_argument("--cpu", action="store_true", help="small problems with numpy arrays, to test the benchmark")
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="only problems whose name contains one of these texts")
    arguments.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="only these methods"
    )
    arguments.add_argument("--model", action="store_true", help="only predictions for H200 GPUs with NVLink; measures nothing")
    arguments.add_argument(
        "--link", type=positive_number, metavar="GB/S", help="with --model: the bandwidth of a link, per direction"
    )
    arguments.add_argument(
        "--rates", type=positive_number, nargs=2, metavar="TFLOP/S", help="with --model: rates of both passes"
    )
    given = arguments.parse_args(words)
    known = CPU_PROBLEMS if given.cpu else PROBLEMS
    chosen = [x for x in known if not given.only or any(text in x.name for text in given.only)]
    if not chosen:
        names = "; ".join(x.name for x in known)
        raise CommandError(f"no name of a problem contains {' or '.join(map(repr, given.only))}; the names are {names}")
    if given.model:
        engine = None
    else:
        if not given.cpu:
            check_gpu("parallel without --cpu or --model")
        count = 0 if given.cpu else int(cupy_runtime.cupy().cuda.runtime.getDeviceCount())
        members = given.members or max(count, 2)
        engine = Engine(members, members if count >= members else min(count, 1))
        if engine.gpus == members and not given.threads:
            if not _is_launched():
                return processes.start(words, members)
            group = connect()
            engine = Engine(group.size, group.size, group)
    rows: list[dict[str, Any]] = []
    for row in _rows(given, chosen, engine):
        if engine and engine.group and engine.group.rank:
            continue  # the first process prints and writes
        rows.append({name: row.get(name, "") for name in COLUMNS} | ({} if given.cpu or given.model else versions()))
        print(listed(row), flush=True)
        if given.csv:
            write_csv(given.csv, rows)
    return 0


def _is_launched() -> bool:
    """Whether a launcher started this process."""
    try:
        environment()
    except RuntimeError:
        return False
    return True


def _rows(given: Any, problems: Sequence[Problem], engine: Engine | None) -> Iterator[dict[str, Any]]:
    if engine is None:
        forward, backward = (x * 1e12 for x in given.rates or (Machine().forward / 1e12, Machine().backward / 1e12))
        machine = Machine(forward, backward, given.link * 1e9 if given.link else Machine().link)
        for problem in problems:
            yield from ({**row, "link_gbs": round(machine.link / 1e9, 1)} for row in model.rows(problem, machine))
        return
    link = link_bandwidth(engine)
    for problem in problems:
        yield from measured_rows(engine, problem, given.methods, link)
