"""A problem bound to arrays and by-value scalars, and how a call ran."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..problem.arrays import VECTORS
from ..problem.bucket import Rounding
from ..problem.problem import Problem
from ..problem.tensor_spec import Expected, check_spec, dtype_name, numpy_dtype
from ..problem.view import View
from ..support.engine_problem import engine_problem
from .user_functions import NO_FUNCTIONS, Functions, Gradients, gradient_name

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from ..cudnn_engine.plan import Plan

#: Logs plans at INFO (built, loaded, refused) and the steps of calls at DEBUG. Its child ``cupy_sdpa.cudnn`` has cuDNN's own
#: log.
logger = logging.getLogger("cupy_sdpa")


#: What the log-sum-exp of a backward pass covers: all keys of the call ("whole"), also with the rows of its gradient in out and
#: dout ("appended"); these keys and others ("part"); or q and k with other roundings ("other"). The CPU checks it accordingly.
GivenStats = Literal["whole", "appended", "part", "other"]


class LaunchRecord(NamedTuple):
    """How a call ran on the GPU.

    Attributes:
        plans: the plans of its launches.
        memory_bytes: the memory that it needed in addition to its arrays, its results and the inputs that were created.
        plan_only: whether only one plan ran, whose workspace is this memory.
    """

    plans: tuple[Plan, ...]
    memory_bytes: int
    plan_only: bool


class Fill(NamedTuple):
    """A one-dimensional array of equal integers."""

    dtype: str
    size: int
    value: int


@dataclass
class BoundProblem:
    """A problem and what it is computed on: a call's arrays, or the views of a program's step.

    :func:`.read_forward` and :func:`.read_backward` validate the arguments and return it. A builder adds its steps.

    Attributes:
        problem: the problem that the arguments define.
        arrays: the arrays by name, or their views.
        scalars: the by-value scalars by name.
        on_gpu: whether the arrays are CuPy's.
        bucket: how lengths are rounded up.
        functions: the traced score and mask functions.
        gradients: which gradients of ``tensors`` are requested.
        fills: inputs that the caller did not pass, by name; they are created when the call runs. If ``seq_lens_q`` is one of
            them, no query is padding.
        given_stats: what the log-sum-exp of a backward pass covers.
    """

    problem: Problem
    arrays: dict[str, Any]
    scalars: dict[str, float]
    on_gpu: bool
    bucket: Rounding | None = None
    functions: Functions = NO_FUNCTIONS
    gradients: Gradients | None = None
    fills: dict[str, Fill] = dataclasses.field(default_factory=dict)
    given_stats: GivenStats = "part"

    @functools.cached_property
    def engine_problem(self) -> Problem:
        """The problem that the engine runs, see :mod:`.core.support.engine_problem`."""
        return engine_problem(self.problem, self.bucket, self.on_gpu)

    @functools.cached_property
    def result_names(self) -> list[str]:
        """The names of the results among the arrays."""
        names = [spec.name for spec in self.problem.results if spec not in self.problem.dcaptured]
        return [*names, *self.gradients.results] if self.gradients else names

    def result_views(self, views: Mapping[str, View], dtype: Any) -> dict[str, View]:
        """Return views of the results in order, and check passed results. Results with a head dim have the dtype ``dtype``."""
        device = views["q"].storage.device
        results = {
            spec.name: View.dense(spec.name, spec.shape, dtype if spec.name in VECTORS else numpy_dtype(spec.dtype), device)
            for spec in self.problem.results
        }
        for of, (shape, of_gradient) in self.gradients.specs.items() if self.gradients else ():
            results[gradient_name(of)] = View.dense(gradient_name(of), shape, of_gradient, device)
        table = Expected.of_call(self.problem.q, self.problem.k, self.problem.v)
        for name in ("out", "dq", "dk", "dv"):
            if name in results and name in views and name in self.result_names:
                expected = table[name]._replace(dtype=dtype_name(dtype), writable=True)
                check_spec(views[name].spec(name), expected)
        return {name: results[name] for name in self.result_names}
