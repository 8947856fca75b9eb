"""The tables and figures of the documentation, made from the files in ``benchmarks/results``.

    python -m benchmarks tables plans > docs/plans_table.md
    python -m benchmarks tables figures                         # in docs/_static
    python -m benchmarks tables speed FILE ...                  # of other runs of compare
    python -m benchmarks tables figures FILE --folder FOLDER

The tables of functions, host and graphs are of commands that were removed, and do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cupy_sdpa.cli.console import CommandError, pip_install

from . import figures, table
from .runner import parser
from .table import RESULTS, read

PASSES = ("forward", "backward")
#: Shorter names of contenders, for table cells.
ABBREVIATIONS = {"cudnn-frontend": "fe"}
PLAN_FILES = ("h200_cudnn919_plans.csv", "h200_cudnn928_plans.csv")


def digits(row: dict[str, str]) -> str:
    """Return a value with three significant digits."""
    value = float(row["value"])
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


#: The values of a plans file by part, case and quantity.
Values = dict[tuple[str, str, str], dict[str, str]]


def plans() -> Iterator[str]:
    """Yield the lines of the table of ``plans``."""
    files = [{(row["part"], row["case"], row["what"]): row for row in read(name)} for name in PLAN_FILES]
    heads = [next(iter(values.values())) for values in files]
    yield f"Measured on an {heads[0]['gpu']} by `python -m benchmarks plans`; all rows are in `benchmarks/results/`.\n"
    titles = [f"cuDNN {head['cudnn']}" for head in heads]
    yield (
        "First calls in a new process (head counts of Llama 3.1 8B, length 4096, causal), after the libraries are loaded. "
        'All cases but "no disk cache" run without the CUDA driver\'s own cache of compiled kernels:\n'
    )
    yield from part_table(files, titles, "start", ("first forward call done", "first backward call done"))
    yield "Two GPUs in one process, the same problem on both:\n"
    yield from part_table(files, titles, "two GPUs", ("plan built", "plan loaded"))
    yield "Forty new lengths near 3000, forward and backward:\n"
    quantities = ("plans built for 40 lengths, both passes", *(f"{name}: median time of a first call" for name in PASSES))
    yield from part_table(files, titles, "new lengths", quantities)
    yield "A call with an existing plan, by its length, with exact lengths and in buckets (launched back to back):\n"
    yield from bucket_table(files, titles)
    yield "Captured CUDA graphs:\n"
    yield from part_table(files, titles, "CUDA graph", ("ten calls, launched", "ten calls, replayed"))


def part_table(files: list[Values], titles: list[str], part: str, quantities: Sequence[str]) -> Iterator[str]:
    """Yield a table of one part of the plans files, with a column for each file."""
    yield f"| | | {' | '.join(titles)} |"
    yield "|---|---|" + "---|" * len(titles)
    for _, case, quantity in (key for key in files[0] if key[0] == part):
        if quantity in quantities:
            rows = [values.get((part, case, quantity)) for values in files]
            cells = [f"{digits(row)} {row['unit']}" if row else "" for row in rows]
            yield f"| {case} | {quantity} | {' | '.join(cells)} |"
    yield ""


def bucket_table(files: list[Values], titles: list[str]) -> Iterator[str]:
    """Yield the times with exact lengths and in buckets, and their ratio."""
    part = "cost of a bucket"
    yield f"| length, mask | | {' | '.join(f'{title}: exact | in buckets of 512 | ratio' for title in titles)} |"
    yield "|---|---|" + "---|---|---|" * len(titles)
    for _, case, quantity in (key for key in files[0] if key[0] == part and key[1].endswith("None")):
        cells = []
        for values in files:
            exact, bucket = values[part, case, quantity], values[part, case.replace("None", "512"), quantity]
            cells += [f"{digits(exact)} us", f"{digits(bucket)} us", f"{float(bucket['value']) / float(exact['value']):.2f}"]
        yield f"| {case.split(',')[0]} | {quantity} | {' | '.join(cells)} |"
    yield ""


def speed(*paths: str | Path) -> Iterator[str]:
    """Yield the lines of the table of ``compare``: all rows of the first file, and means of the others."""
    first, *others = paths or (RESULTS / "h200_cudnn919.csv",)
    rows = gpu_rows(first)
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    yield (
        f"Measured on an {rows[0]['gpu']} with {libraries(rows[0])} by `python -m benchmarks compare`. "
        "Milliseconds, TFLOP/s, and our time divided by the fastest other contender's, which is named: cudnn and flash "
        "are PyTorch's backends, fe is cudnn-frontend, flex is FlexAttention.\n"
    )
    yield f"| preset | {' | '.join(f'{direction} | TFLOP/s | ratio' for direction in directions)} |"
    yield "|---|" + "---|---|---|" * len(directions)
    cases = table.by_case(rows)
    for preset in dict.fromkeys(row["preset"] for row in rows):
        cells = [cell for direction in directions for cell in speed_cells(cases.get((preset, direction), {}))]
        yield f"| {preset} | {' | '.join(cells)} |"
    yield ""
    yield from means(rows)
    for other in map(gpu_rows, others or [RESULTS / "h200_cudnn928.csv"]):
        yield f"\nThe same with {libraries(other[0])}:\n"
        yield from means(other)


def gpu_rows(path: str | Path) -> list[table.Row]:
    """Return the rows of a file that were measured on a GPU."""
    return [row for row in table.read_csv(path) if row["gpu"]]


def libraries(row: table.Row) -> str:
    """Return the versions of the libraries."""
    names = {"cudnn": "cuDNN", "torch": "PyTorch", "cudnn_frontend": "cudnn-frontend", "jax": "JAX"}
    return ", ".join(f"{name} {row[column]}" for column, name in names.items() if row[column])


def means(rows: list[table.Row]) -> Iterator[str]:
    """Our values divided by each other contender's: device time, peak memory without the inputs, host time."""
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    yield "Our values divided by each other contender's: geometric mean over its presets, and range:\n"
    yield f"| | | {' | '.join(directions)} |"
    yield "|---|---|" + "---|" * len(directions)
    for column, title in table.MEANS.items():
        for name in (None, *(name for name in table.contenders_of(rows) if name != "ours")):
            ratios = [table.ratios(rows, direction, name, column) for direction in directions]
            if any(ratios):
                cells = [table.summary(values) if values else "" for values in ratios]
                yield f"| {title} | {name or 'the fastest'} | {' | '.join(cells)} |"


def speed_cells(contenders: dict[str, table.Row]) -> tuple[str, str, str]:
    """Our time, our rate and the ratio of a preset in one direction; empty if it was not measured."""
    ours = contenders.get("ours")
    if ours is None or ours["ms"] is None:
        return "", "", ""
    best = [
        f"{row['ours_over_it']:.2f}\N{NO-BREAK SPACE}{ABBREVIATIONS.get(name, table.short(name))}"
        for name, row in contenders.items()
        if row["best_peer"]
    ]
    return f"{ours['ms']:.3g}", f"{ours['tflops']:.0f}", "".join(best)


def decode() -> Iterator[str]:
    """Yield the lines of the table of ``decode``."""
    rows = read("h200_cudnn919_decode.csv")
    yield (
        f"Microseconds on an {rows[0]['gpu']} with cuDNN {rows[0]['cudnn']}, by `python -m benchmarks decode`: bfloat16, 32 "
        "query and 8 key/value heads, head dim 128, pages of 64 keys. The rate is the bytes of the keys and values by the "
        "time, relative to the rate of a copy. The calls are nodes of a CUDA graph, and their keys are not in the L2 cache. "
        "PyTorch reads dense arrays without a mask.\n"
    )
    names = list(dict.fromkeys(row["contender"] for row in rows if row["problem"] == "decode"))
    heads = ["batch, keys, queries", "ours", "rate", "of one query", *(name for name in names if name != "ours")]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["problem"] == "decode" and not row["option"]:
            found.setdefault((row["batch"], row["keys"], row["queries"]), {})[row["contender"]] = row
    for problem, by_name in found.items():
        ours = by_name["ours"]
        cells = [", ".join(problem), ours["us"], ours["of_copy"], ours["of_one_query"]]
        cells += [f"{by_name[name]['us']} ({by_name[name]['of_ours']}x)" if name in by_name else "" for name in names[1:]]
        yield f"| {' | '.join(cells)} |"
    prefixes: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["problem"] == "prefix":
            prefixes.setdefault((row["batch"], row["keys"]), {})[row["option"]] = row["us"]
    for (batch, keys), us in prefixes.items():
        yield (
            f"\n{batch} sequences of {keys} keys that share the first 32768, one query each: {us['shared prefix']} us with "
            f"`shared_prefix_attention`, {us['not shared']} us without; one sequence with the prefix alone "
            f"{us['one sequence, the prefix']} us, the other keys {us['the other keys']} us."
        )
    host = {row["option"]: row["us"] for row in rows if row["problem"] == "host"}
    if host:
        yield "\nThe host's time of a repeated call: " + ", ".join(f"{name} {us} us" for name, us in host.items()) + "."


def host_options() -> Iterator[str]:
    """Yield the lines of the table of ``host_options``."""
    rows = read("h200_cudnn919_host_options.csv")
    yield (
        f"Microseconds of the host per call on an {rows[0]['gpu']}, cuDNN {rows[0]['cudnn']}, by "
        "`python -m benchmarks host_options`: a repeated call on an idle device, and in a mix of calls of all kinds on 64 sets "
        "of arrays in turn. The ratios divide our time by the time of PyTorch's closest call in the same run.\n"
    )
    yield "| call | alone | ratio | in the mix | ratio | PyTorch's call |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = (row[name] for name in ("kind", "us", "ratio", "mix_us", "mix_ratio", "peer"))
        yield f"| {' | '.join(cells)} |"


def jvp() -> Iterator[str]:
    """Yield the lines of the table of ``jvp``."""
    problems: dict[str, dict[str, dict[str, str]]] = {}
    for row in read("h200_cudnn919_jvp.csv"):
        problems.setdefault(row["name"], {})[row["contender"]] = row
    head = next(iter(next(iter(problems.values())).values()))
    yield (
        f"Milliseconds and MiB beyond the inputs on an {head['gpu']}, cuDNN {head['cudnn']}, by `python -m benchmarks jvp`: "
        "bfloat16. The ratios divide PyTorch's time and memory by ours, for `torch.func.jvp` on its math backend; both "
        "passes are the forward and the backward pass of the same arrays.\n"
    )
    yield "| problem | batch, heads, length, head dim | jvp | memory | both passes | PyTorch's time | PyTorch's memory |"
    yield "|---|---|---|---|---|---|---|"
    for name, rows in problems.items():
        ours, peer = rows["attention_jvp"], rows.get("torch.func.jvp, math")
        heads = ours["hq"] if ours["hq"] == ours["hkv"] else f"{ours['hq']}/{ours['hkv']}"
        ratios = f"{peer['of_jvp']}x | {peer['memory_of_jvp']}x" if peer else " | "
        yield (
            f"| {name} | {ours['b']}, {heads}, {ours['s']}, {ours['d']} | {ours['ms']} | {ours['peak_mib']} | "
            f"{rows['forward and backward']['ms']} | {ratios} |"
        )


def features() -> Iterator[str]:
    """Yield the lines of the table of ``features``."""
    rows = read("h200_cudnn919_features.csv")
    yield (
        f"Times on an {rows[0]['gpu']} with cuDNN {rows[0]['cudnn']}, by `python -m benchmarks features`: float16; a case has "
        "head dim x heads x positions x batch. A ratio is our time divided by the time without the feature; the memory is what "
        "a call allocates, and the arrays made for it beforehand.\n"
    )
    yield "| feature | case | without it | ms | without it, ms | ratio | host us | without it, us | MiB | without it, MiB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        memory = (f"{int(row[name]) / 2**20:.3g}" for name in ("ours_bytes", "without_bytes"))
        times = (row[name] for name in ("ours_ms", "without_ms", "ratio", "ours_host_us", "without_host_us"))
        yield f"| `{row['feature']}` | {row['case']} | {row['without']} | {' | '.join((*times, *memory))} |"


def sparse() -> Iterator[str]:
    """Yield the lines of the table of ``sparse``."""
    rows = read("h200_cudnn919_sparse.csv")
    yield (
        f"Microseconds on an {rows[0]['gpu']} with cuDNN {rows[0]['cudnn']} and PyTorch {rows[0]['torch']}, by `python -m "
        "benchmarks sparse`: bfloat16, batch 1, 16 heads, head dim 128. A ratio is our time divided by FlexAttention's in the "
        "same run; an error is the largest of the output and the three gradients, relative to the largest magnitude.\n"
    )
    yield "| pattern | length | blocks skipped | forward | ratio | both passes | ratio | error | FlexAttention's |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [
            row["name"].replace("_", " "),
            row["length"],
            f"{100 * float(row['sparsity']):.0f} %",
            *(f"{float(row[f'{name}_us']):.0f} | {float(row[f'{name}_ratio']):.2f}" for name in ("forward", "both")),
            row["error"] or "–",
            row["flex_error"] or "–",
        ]
        yield f"| {' | '.join(cells)} |"


def fp8() -> Iterator[str]:
    """Yield the lines of the tables of ``fp8`` and ``fp8 --decode``."""
    rows = read("h200_cudnn919_fp8.csv")
    yield (
        f"{rows[0]['gpu']}, cuDNN {rows[0]['cudnn']}, head dim 128, batch 1, by `python -m benchmarks fp8`. The last three "
        "columns are bfloat16's time divided by FP8's: of *attention* alone, *with conversions* of q, k, v and of "
        "the output, and also with q and k *rotated*. The *mean of v* is the part of the call with conversions that the mean "
        "takes.\n"
    )
    times = ("bfloat16 ms", "FP8 ms", "TFLOP/s", "q, k, v to FP8 ms")
    heads = ("keys", "heads", "mask", *times, "mean of v ms", "attention", "with conversions", "rotated")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        numbers = (f"{float(row[name]):.3g}" for name in ("bfloat16_ms", "fp8_ms", "fp8_tflops", "quantize_ms"))
        ratios = (f"{float(row[f'{name}_speedup']):.2f}" for name in ("fp8", "converted", "rotated"))
        mask = "causal" if row["causal"] == "True" else "none"
        mean = "–"
        if row.get("converted_mean_kept_ms"):
            mean = f"{float(row['converted_ms']) - float(row['converted_mean_kept_ms']):.3f}"
        yield f"| {' | '.join((row['length'], row['heads'], mask, *numbers, mean, *ratios))} |"
    rows = read("h200_cudnn919_fp8_decode.csv")
    yield (
        "\nDecoding, one query per sequence, 32 query and 8 key/value heads, head dim 128, pages of 64 tokens, by `python -m "
        "benchmarks fp8 --decode`: the time over a bfloat16 cache divided by that over an FP8 cache. The call converts "
        "*bfloat16 queries*.\n"
    )
    yield "| sequences | keys | bfloat16 ms | FP8 ms | FP8 | bfloat16 queries | FP8 pages TB/s |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        numbers = (f"{float(row[name]):.3g}" for name in ("bfloat16_ms", "fp8_ms"))
        ratios = (f"{float(row[f'{name}_speedup']):.2f}" for name in ("fp8", "converted"))
        rate = f"{float(row['fp8_gbs']) / 1000:.1f}"
        yield f"| {' | '.join((row['batch'], row['keys'], *numbers, *ratios, rate))} |"


def fp8_errors() -> Iterator[str]:
    """Yield the lines of the table of ``fp8 --errors``: values with a mean."""
    rows = [row for row in read("h200_cudnn919_fp8_errors.csv") if row["inputs"].startswith("v = ")]
    found = {(row["inputs"], row["keys"], row["method"]): f"{float(row['error']):.2g}" for row in rows}
    methods = ("FP8, rotated, with the mean of v", "FP8, rotated", "bfloat16")
    yield "| values | keys | FP8 with the mean of v (`center=False`) | FP8 | bfloat16 |"
    yield "|---|---|---|---|---|"
    for inputs, keys in dict.fromkeys((row["inputs"], row["keys"]) for row in rows):
        yield f"| {inputs} | {keys} | {' | '.join(found.get((inputs, keys, method), '–') for method in methods)} |"


def parallel() -> Iterator[str]:
    """Yield the lines of the table of ``parallel``."""
    rows = read("h200x2_cudnn919_parallel.csv")
    head, columns = rows[0], ("ring", "all_gather", "all_to_all", "PyTorch, ring", "PyTorch, all_gather")
    measured: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["pass"]:
            name = f"PyTorch, {row['method']}" if row["kind"] == "PyTorch" else row["method"]
            measured.setdefault((row["problem"], row["pass"]), {})[name] = row["of_ideal"]
    yield (
        f"Measured on {head['gpus']} {head['gpu']}s with cuDNN {head['cudnn']} and {float(head['link_gbs']):.0f} GB/s between "
        "them: the time of one GPU divided by the number of GPUs, relative to the time taken.\n"
    )
    yield f"| problem | pass | {' | '.join(columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    for (problem, direction), found in measured.items():
        yield f"| {problem} | {direction} | {' | '.join(found.get(column, '') for column in columns)} |"


def cpu(path: str = "cpu_engine.csv") -> Iterator[str]:
    """Yield the lines of the table of ``cpu``."""
    rows = read(path)
    by_case: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["pass"]] = row
    yield (
        f"Times in microseconds with float32, {rows[0]['threads'] or 'all'} thread of {rows[0]['cpu']} and numpy "
        f"{rows[0]['numpy']}, measured by `python -m benchmarks cpu`, and their ratios to plain numpy, one matrix product per "
        "key/value head, and to PyTorch where it was installed. In the backward pass both compute the softmax weights again.\n"
    )
    yield "| case | forward | of numpy | of PyTorch | backward | of numpy | of PyTorch |"
    yield "|---|---|---|---|---|---|---|"
    for name, passes in by_case.items():
        cells = [
            passes[direction][column] if direction in passes else ""
            for direction in PASSES
            for column in ("ours_us", "of_numpy", "of_torch")
        ]
        yield f"| {name} | {' | '.join(cells)} |"


TABLES = {
    "cpu": cpu, "plans": plans, "decode": decode, "speed": speed, "host_options": host_options, "jvp": jvp,
    "features": features, "sparse": sparse,
    "fp8": fp8, "fp8_errors": fp8_errors, "parallel": parallel,
}  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Print a table, or write the figures."""
    options = parser("tables", __doc__)
    options.add_argument("table", choices=(*TABLES, "figures"), metavar="TABLE", help=f"of {', '.join((*TABLES, 'figures'))}")
    options.add_argument("csv", nargs="*", default=[], type=Path, metavar="FILE", help="CSV files of compare")
    options.add_argument("--folder", type=Path, default=figures.FOLDER, help="the folder of the figures")
    given = options.parse_args(words)
    if given.csv and given.table not in ("speed", "figures"):
        raise CommandError(f"FILE has no effect with {given.table}, only with speed and figures: remove it")
    try:
        if given.table == "figures":
            for path in (path for source in given.csv or [None] for path in figures.write(source, given.folder)):
                print(f"wrote {path}")
        else:
            print("\n".join(TABLES[given.table](*given.csv)).rstrip())
    except ImportError as error:
        raise CommandError(f"figures need matplotlib: {pip_install('plot')}") from error
    except ValueError as error:  # a file of another command
        raise CommandError(str(error)) from error
    return 0
