"""Steps of programs: attention on views of arrays, and kernels; and the class that collects them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..boundary.arguments import check_lengths
from ..boundary.call import Fill, GivenStats
from ..boundary.compute import copy
from ..problem.arrays import INTEGERS
from ..problem.problem import Problem
from ..problem.tensor_spec import TensorSpec, numpy_dtype
from ..problem.view import View
from ..runtime import cupy_runtime, driver, memory
from ..runtime.interpreted_array import InterpretedArray, plain


class Constant:
    """A dense numpy array whose elements are known when a program is built, and its copies on GPUs.

    >>> from cupy_sdpa.extend import Builder
    >>> builder = Builder(device=None)
    >>> builder.constant(Constant(np.arange(3, dtype=np.int32)), keep=True).shape
    (3,)
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        #: The copies by the id of the CUDA context.
        self._copies: dict[int, Any] = {}

    def on_device(self) -> Any:
        """Return the copy in the current CUDA context; the first call makes it, and synchronizes.

        Raises:
            RuntimeError: there is no copy yet, and the stream is being captured.
        """
        context = driver.context_id()
        if context not in self._copies:
            if cupy_runtime.capturing():
                raise RuntimeError(
                    "the stream is being captured into a CUDA graph, and the tables of this call are not on the GPU yet: run "
                    "the call once before the capture begins"
                )
            order = "F" if self.array.flags.f_contiguous else "C"
            copy = cupy_runtime.cupy().asarray(self.array, order=order)
            cupy_runtime.cupy().cuda.get_current_stream().synchronize()  # other streams may use it next
            self._copies[context] = copy
        return self._copies[context]

    def like(self, array: Any) -> Any:
        """Return the elements as an array of the engine and the device of another array."""
        on_engine = plain(array)
        if not cupy_runtime.is_array(on_engine):
            return self.array
        with cupy_runtime.device_context(on_engine):
            copy = self.on_device()
        return copy if on_engine is array else InterpretedArray(copy)


class Scalar(NamedTuple):
    """A number that is not known when a program is built: a kernel's argument, by the name of the call's scalar."""

    name: str


class Check(NamedTuple):
    """What a program requires of elements of the caller's arrays, see :meth:`Steps.check`."""

    function: Callable[[Mapping[str, Any]], object]
    views: Mapping[str, View]


class Attend(NamedTuple):
    """Attention, or its gradients, in one launch.

    Attributes:
        problem: the problem that the engine runs.
        arrays: the views of its arrays, by name; empty if nothing runs, because the problem is trivial.
        of: the problem that the caller or a builder asked for.
        given_stats: what the log-sum-exp of gradients covers, so that it can be checked.
        scalars: the values of by-value scalars that belong to the program; the call passes the others.
        source_lines: the source line of each operation of the score and mask functions, if they belong to the program.
    """

    problem: Problem
    arrays: Mapping[str, View]
    of: Problem
    given_stats: GivenStats = "part"
    scalars: Mapping[str, float] = {}
    source_lines: Mapping[str, str] = {}


class ProgramStep(NamedTuple):
    """One step of a program.

    Attributes:
        name: what it does, for reports and errors.
        attend: attention or its gradients; None for a kernel.
        function: a function that takes numpy or CuPy arrays and writes into some of them; None for attention.
        arguments: its arguments: views, scalars, numbers, None, and sequences of these.
        writes: the views that it writes.
        branch: whether it is part of a branch, which runs in parallel with the steps after the branch in a captured CUDA graph,
            until one reads what the branch writes.
        on_host: whether it runs on the host, not on a stream, such as an exchange of a group: it runs in every call, between
            captured CUDA graphs. Its arguments are temporaries.
    """

    name: str
    attend: Attend | None
    function: Callable[..., None] | None
    arguments: tuple[Any, ...]
    writes: tuple[View, ...]
    branch: bool = False
    on_host: bool = False

    def views(self) -> Iterator[View]:
        """Yield all views that the step reads or writes."""
        yield from self.writes
        yield from views_of(self.arguments if self.attend is None else tuple(self.attend.arrays.values()))


def join_of(steps: Sequence[ProgramStep]) -> int:
    """Return the number of the step before which the branch must have ended; the number of steps if no step waits for it."""
    written = {view.storage.name for step in steps if step.branch for view in step.writes}
    begun = False
    for number, step in enumerate(steps):
        begun = begun or step.branch
        if begun and not step.branch and any(view.storage.name in written for view in step.views()):
            return number
    return len(steps)


def views_of(value: Any) -> Iterator[View]:
    """Yield the views in an argument."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from views_of(part)


@dataclass
class Steps:
    """Collects steps.

    Attributes:
        device: the number of the GPU that the program is for; None for numpy.
        part: what the next steps compute, as the beginning of their names; may be empty.
        branch: whether the next steps are a branch, see :class:`ProgramStep`. A program has at most one branch.
        sizes: the bytes of each temporary.

    The other attributes are as in :class:`.Program`, with the constants themselves.
    """

    device: int | None
    part: str = ""
    branch: bool = False
    steps: list[ProgramStep] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    kept: list[Constant] = field(default_factory=list)
    fills: dict[str, Fill] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether the program is for a GPU."""
        return self.device is not None

    # arrays

    def temporary(self, shape: Sequence[int], dtype: Any) -> View:
        """Return an array in Fortran order that only this program uses."""
        view = View.dense(f"temporary {len(self.sizes) + 1}", shape, dtype, self.device)
        self.sizes[view.storage.name] = view.nbytes
        return view

    def temporary_stats(self, q: View) -> View:
        """Return a :meth:`temporary` array with one number for each row of scores; see :meth:`.View.row_stats`."""
        stats = View.row_stats("stats", q)
        return self.temporary(stats.shape, stats.dtype)

    def temporary_of(self, spec: TensorSpec) -> View:
        """An array of a problem that only this program uses, see :meth:`temporary`."""
        return self.temporary(spec.shape, numpy_dtype(spec.dtype, on_gpu=self.on_gpu))

    def constant(self, constant: Constant, *, keep: bool = False) -> View:
        """Add an array that is known now; ``keep``: the program keeps it alive, because nothing that the caller holds does."""
        array = constant.array
        if keep:
            self.kept.append(constant)
        name = next((name for name, other in self.constants.items() if other is constant), "")
        if not name:
            name = f"constant {len(self.constants) + 1}"
            self.constants[name] = constant
        view = View.dense(name, array.shape, array.dtype, self.device)
        return view if array.flags.f_contiguous else view.strided(array.shape, array.strides)

    def filled(self, fill: Fill) -> View:
        """Return an array of equal integers."""
        name = f"{fill.size} times {fill.value}, {fill.dtype}"
        self.fills[name] = fill
        return View.dense(name, (fill.size,), fill.dtype, self.device)

    # steps

    def attend_to(self, name: str, attend: Attend) -> None:
        """Add attention on arrays in the form that the engine needs."""
        writes = tuple(attend.arrays[spec.name] for spec in attend.problem.results if spec.name in attend.arrays)
        self.steps.append(ProgramStep(f"{self.part}: {name}" if self.part else name, attend, None, (), writes, self.branch))
        self.check_lengths(attend.of, attend.arrays)

    def check(self, function: Callable[[Mapping[str, Any]], object], views: Mapping[str, View]) -> None:
        """Add a check of elements of the caller's arrays, such as lengths, that every call on the CPU makes.

        The function gets the caller's arrays by the names in ``views``, and raises ValueError if an element is invalid.

        >>> def is_increasing(arrays):
        ...     if (np.diff(arrays["starts"]) < 0).any():
        ...         raise ValueError(f"starts is {arrays['starts']}; it must not decrease: sort it")
        >>> from cupy_sdpa.extend import Builder
        >>> builder = Builder(device=None)
        >>> builder.check(is_increasing, {"starts": View.dense("starts", (4,), np.int32, None)})
        """
        self.checks.append(Check(function, views))

    def check_lengths(self, problem: Problem, views: Mapping[str, View]) -> None:
        """Check in every call on the CPU that a problem's lengths, offsets and pages are valid; other views are ignored."""
        if lengths := {name: views[name] for name in INTEGERS if name in views}:
            self.check(functools.partial(check_lengths, problem), lengths)

    def run(self, function: Callable[..., None], *arguments: Any, writes: Sequence[View], on_host: bool = False) -> None:
        """Add a kernel: a function of arrays, numbers and sequences of them that writes into its arguments ``writes``."""
        self.steps.append(ProgramStep(function.__name__, None, function, arguments, tuple(writes), self.branch, on_host))

    def copy(self, target: View, source: View) -> None:
        """Copy ``source``, which may be broadcast and converted, into ``target``."""
        if target.size:
            self.run(copy, target, source, writes=(target,))

    def copy_part(self, target: View, source: View) -> None:
        """Copy ``source`` into ``target``, which has its shape and dtype; parts of larger arrays are copied row by row."""
        if target.size:
            self.run(memory.copy_by_rows, target, source, writes=(target,))

    def copied(self, source: View) -> View:
        """Return a copy in Fortran order."""
        made = self.temporary(source.shape, source.dtype)
        self.copy(made, source)
        return made

    @staticmethod
    def padded_head_dim(width: int, *, equal: bool = False) -> int:
        """Return the smallest head dim that cuDNN's kernels support and that is at least ``width``.

        ``equal``: the call needs equal head dims (core/support/known_bugs.py), because it has packed sequences, a block mask
        whose blocks are copied to packed sequences, or deterministic gradients. The multiple is then twice as large.
        """
        from ..support.rules import HEAD_DIM_MULTIPLE

        multiple = 2 * HEAD_DIM_MULTIPLE if equal else HEAD_DIM_MULTIPLE
        return -(-width // multiple) * multiple

    def concatenate(self, wanted: Sequence[tuple[View, Sequence[View], float]]) -> None:
        """Concatenate arrays along head_dim in one step; see :func:`.concatenation.concatenate`."""
        from ..kernels.concatenation import concatenate

        if wanted:
            self.run(concatenate, wanted, writes=[target for target, *_ in wanted])

    def row_means(
        self, target: View, stats: View, factors: tuple[View | None, View | None], mean: View | None, scale: float
    ) -> None:
        """Write each row's mean score derivative; ``factors`` are products and dout. See :func:`.row_means.row_means`."""
        from ..kernels.row_means import row_means

        self.run(row_means, target, stats, *factors, mean, scale, writes=[target])

    def fill(self, target: View, value: float) -> None:
        """Fill an array with a number."""
        if target.size:
            self.run(fill, target, value, writes=(target,))

    def add(self, target: View, source: View) -> None:
        """Add an array to another one, which may have another dtype."""
        if target.size:
            self.run(add, target, source, writes=(target,))


def fill(target: Any, value: float) -> None:
    """Fill an array with a number."""
    memory.clear(target, value)


def add(target: Any, source: Any) -> None:
    """Add an array to another one; on the GPU, a separate kernel adds bfloat16 to float32."""
    if source.dtype.name == "bfloat16" and target.dtype == np.float32 and cupy_runtime.is_array(source):
        operation = "y += __uint_as_float((unsigned)x << 16)"
        cupy_runtime.elementwise("uint16 x", "float32 y", operation, "add_bfloat16")(source.view(np.uint16).T, target.T)
        return
    total = target.T
    total += source.T  # as in copy
