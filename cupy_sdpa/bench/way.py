"""What every way to compute a preset has in common, and our own way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..attention import attention, attention_backward
from ..device import cupy_runtime
from ..explain import explain
from ..prepare import prepare
from .measure import Events, random_normal
from .presets import Preset

if TYPE_CHECKING:
    from ..plans.plan import PlanInfo

Call = Callable[[], Sequence[Any]]


class Impossible(Exception):
    """A way that has no such option; the message says which."""


class Timer(Protocol):
    """Milliseconds of a call, and how they are measured."""

    @property
    def clock(self) -> str:
        """How."""

    def __call__(self) -> float:
        """One measurement."""


class Inputs:
    """Random q, k, v and gradient of the output, in Julia's layout."""

    def __init__(self, preset: Preset) -> None:
        self.q, self.k, self.v = (random_normal(*shape) for shape in preset.shapes)
        self.dout = random_normal(*preset.out_shape)


class Way:
    """A way to compute a preset in one direction.

    A call's results are a sequence: out; dq, dk, dv; or all four.

    Attributes:
        name: for the command line and the tables.
        title: for people.
        needs: the modules without which it cannot be had.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, preset: Preset, direction: str) -> None:
        self.preset, self.direction = preset, direction

    def call(self, inputs: Inputs) -> Call:
        """The call on these inputs; what the gradients need of a forward pass is computed before."""
        raise NotImplementedError

    def as_ours(self, results: Sequence[Any]) -> list[Any]:
        """The results as CuPy arrays in Julia's layout."""
        return list(results)

    def active(self) -> AbstractContextManager[Any]:
        """What its calls run in."""
        return contextlib.nullcontext()

    def timer(self, calls: Sequence[Call], busy: Any) -> Timer:
        """What times its calls."""
        return Events(calls, busy)

    def wait(self, results: Any = None) -> None:
        """Until the device has nothing left to do."""
        cupy_runtime.cupy().cuda.Device().synchronize()

    def peak_bytes(self, call: Call) -> int | None:
        """The most bytes that a call has allocated at once, its results among them; None where nobody counts."""
        return None

    def facts(self) -> dict[str, Any]:
        """What is known of how it computes."""
        return {}

    def other_calls(self, inputs: Inputs) -> Iterator[tuple[str, Call]]:
        """Other forms of the same call, by the column of their host times."""
        return iter(())


class Ours(Way):
    """This package on CuPy arrays."""

    name, title = "ours", "cupy_sdpa"

    def __init__(self, preset: Preset, direction: str) -> None:
        super().__init__(preset, direction)
        self._options, self._untuned = preset.options, ""

    def call(self, inputs: Inputs) -> Call:
        """The plain call, which allocates its results."""
        x = (inputs.q, inputs.k, inputs.v)
        options = self._options
        if self.direction == "forward":
            return lambda: (attention(*x, **options),)
        if self.direction == "backward":
            given = (inputs.dout, *x, *attention(*x, return_stats=True, **options))
            return lambda: attention_backward(*given, **options)

        def both() -> tuple[Any, ...]:
            out, stats = attention(*x, return_stats=True, **options)
            return (out, *attention_backward(inputs.dout, *x, out, stats, **options))

        return both

    def other_calls(self, inputs: Inputs) -> Iterator[tuple[str, Call]]:
        """With results given, and prepared."""
        cupy, x, options = cupy_runtime.cupy(), (inputs.q, inputs.k, inputs.v), self._options
        if self.direction == "forward":
            out, prepared = cupy.empty_like(inputs.dout), prepare(*x, **options)
            yield "host_out_us", lambda: (attention(*x, **options, out=out),)
            yield "host_prepared_us", lambda: (prepared(*x),)
        elif self.direction == "backward":
            given = [inputs.dout, *x, *attention(*x, return_stats=True, **options)]
            into = {**options, **{f"d{name}": cupy.empty_like(array) for name, array in zip("qkv", x, strict=True)}}
            backward = prepare(*x, **options, backward=True)
            yield "host_out_us", lambda: attention_backward(*given, **into)
            yield "host_prepared_us", lambda: backward(*given)

    def facts(self) -> dict[str, Any]:
        """The engines of the plans, with that of before where they were tuned; workspace; and the time to get the plans."""
        plans = self._plans()
        return {
            "engine": _engines(plans),
            "untuned_engine": self._untuned,
            "workspace_bytes": max(plan.workspace for plan in plans),
            "plan_ms": sum(plan.build_ms for plan in plans),
        }

    def peak_bytes(self, call: Call) -> int | None:
        """As CuPy's memory pool counts."""
        return allocated_at_once(call)

    def tune(self, inputs: Inputs) -> None:
        """Measure every engine config that is proposed, and keep the fastest."""
        self._untuned = _engines(self._plans())
        for asked in self.preset.problems(self.direction):
            stats = asked.stats is not None and not asked.backward
            x, options = (inputs.q, inputs.k, inputs.v), self._options
            prepare(*x, **options, return_stats=stats, backward=asked.backward, autotune=True)

    def _plans(self) -> list[PlanInfo]:
        plans = []
        for asked in self.preset.problems(self.direction):
            report = explain(asked)
            if report.plan is None:
                raise report.error("; ".join(report.reasons))
            plans.append(report.plan)
        return plans


def _engines(plans: Sequence[PlanInfo]) -> str:
    return " + ".join(f"{plan.engine}{' tuned' * plan.tuned}" for plan in plans)


def allocated_at_once(call: Callable[[], Any]) -> int:
    """The most bytes that CuPy's memory pool has handed out at once during a call."""
    hook = cupy_runtime.cupy().cuda.MemoryHook
    now, most = 0, 0

    class Count(hook):  # type: ignore[misc, valid-type]  # CuPy has no types
        """Adds up what is handed out and taken back."""

        name = "count"

        def malloc_postprocess(self, *, mem_size: int, **_: Any) -> None:
            """Memory has been handed out."""
            nonlocal now, most
            now += mem_size
            most = max(most, now)

        def free_postprocess(self, *, mem_size: int, **_: Any) -> None:
            """Memory has been taken back."""
            nonlocal now
            now -= mem_size

    with Count():
        results = call()
        del results
    return most
