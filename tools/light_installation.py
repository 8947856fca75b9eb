"""Compare cuDNN's light configuration (the extras ``cuda12-light``, ``cuda13-light``) with the full one, by planning.

    python tools/light_installation.py LIGHT FULL [--gpu H200] [--problems N]

LIGHT and FULL are paths of a libcudnn.so.9 of one version. For every problem of the support table it prints where the plans
differ in engine, knobs or workspace, or where only one configuration has a plan; then the bytes of both folders on disk. It
needs no GPU; see ``cupy_sdpa/offline/remote_planner.py``.

The sizes of a download: ``pip download --no-deps -d FOLDER nvidia-cudnn-jit-cu12 nvidia-cudnn-cu12``, then ``ls -l FOLDER``.
"""

import argparse
from pathlib import Path

from cupy_sdpa.cli.support_problems import PROBES
from cupy_sdpa.core.cudnn_engine.described import plan_described
from cupy_sdpa.core.cudnn_engine.plan import Target, knobs_text
from cupy_sdpa.offline.remote_planner import Planner


def text_of(plan: object) -> str:
    """Return a plan's engine, knobs and workspace, or that there is no plan."""
    return "no plan" if isinstance(plan, str) else f"engine {plan.engine}, {knobs_text(plan.knobs)}, {plan.workspace} bytes"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("light", type=Path)
    parser.add_argument("full", type=Path)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--problems", type=int, help="only the first ones; default: all")
    arguments = parser.parse_args()
    target = Target.described(arguments.gpu)
    problems = list(PROBES.items())[: arguments.problems]
    found = []
    for path in (arguments.light, arguments.full):
        with Planner(CUPY_SDPA_CUDNN=str(path)) as planner:
            found.append([planner.call(plan_described, problem, target) for _, problem in problems])
    same = refused = 0
    for (name, _), light, full in zip(problems, *found, strict=True):
        if text_of(light) == text_of(full):
            same += 1
            refused += isinstance(light, str)
        else:
            print(f"{name}:\n  light  {text_of(light)}\n  full   {text_of(full)}")
    print(f"{len(problems)} problems for {arguments.gpu}: {same} equal, of which {refused} have no plan")
    for name, path in (("light", arguments.light), ("full", arguments.full)):
        size = sum(file.stat().st_size for file in path.resolve().parent.iterdir() if file.is_file())
        print(f"{name}: {size / 1e6:.0f} MB in {path.parent}")


if __name__ == "__main__":
    main()
