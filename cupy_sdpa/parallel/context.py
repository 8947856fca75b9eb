"""Attention of a group: every member passes its part of q, k and v, and gets its part of the results."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from .. import Unsupported
from ..attention_functions import attention_backward
from ..extend import Axes, Builder, Call, CallKey, ReadCall, View, cupy_runtime, read_flag, results_of, takes_options
from .agreement import Agreement
from .channel import Channel
from .configuration import Request
from .convert import as_exchanger
from .group_arguments import CU_SEQLENS, HostOffsets, abbreviated, check_engine, packed_lengths, read_length
from .group_report import ParallelReport, report
from .member_steps import MemberSteps
from .shards import ShardLayout


def context_parallel(group: Any = None, *, method: str | None = None, check: bool = True) -> ContextParallel:
    """Create attention over the members of a group, one GPU each, which split every sequence among them.

    Args:
        group: the group; see :class:`ContextParallel`. None for a single member.
        method: ``"ring"``, ``"all_gather"`` or ``"all_to_all"``. Default None: chosen for each call.
        check: whether members compare their shapes and options: once for every new configuration, which synchronizes, and by a
            checksum in every call, which does not. Default True.

    Returns:
        An object with ``attention``, ``attention_backward`` and ``attention_vjp``.

    Raises:
        TypeError, ValueError: the group or the method is not supported.

    >>> import numpy as np, cupy_sdpa
    >>> from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (np.asfortranarray(rng.standard_normal((16, 2, 100, 1))) for _ in range(3))
    >>> def member(group):
    ...     cp = context_parallel(group)
    ...     out = cp.attention(*(cp.shard(x) for x in (q, k, v)), causal=True, seqlen_q=100)
    ...     return cp.unshard(out, seqlen=100)
    >>> outs = run_threads(Loopback(4).members, member)
    >>> bool(np.allclose(outs[0], cupy_sdpa.attention(q, k, v, causal=True)))
    True
    """
    return ContextParallel(group, method=method, check=check)


F = TypeVar("F", bound=Callable[..., Any])
#: The refusal of gradients of the log-sum-exp.
_NO_STATS_GRADIENT = "{}, and a group has no gradients of the log-sum-exp: compute them on one GPU"


def _collective(function: F) -> F:
    """Return a method that all members call: if this member's arguments raise an error, the others also raise."""

    @functools.wraps(function)
    def call(self: ContextParallel, *arrays: Any, **options: Any) -> Any:
        try:
            self._agreement.begin((*arrays, *options.values()))
            return function(self, *arrays, **options)
        except BaseException as failure:
            self._agreement.fail(failure)
            raise

    return cast("F", call)


class ContextParallel:
    """Compute attention over the members of a group; created by :func:`context_parallel`.

    Member r of P holds the chunks r and 2 P - 1 - r of every sequence, which is cut into 2 P chunks (:meth:`shard`). Every call
    is collective: all members make it, in the same order, with the same options. Pass the options of the call on one GPU:
    arrays such as ``bias``, ``alibi_slopes`` or ``tensors`` are for whole sequences and all heads, and functions see the
    positions in the whole sequence. ``cu_seqlens_q`` and ``cu_seqlens_kv`` are numpy arrays for the whole sequences.

    Args:
        group: ``cupy.cuda.nccl.NcclCommunicator``, ``cupyx.distributed.NCCLBackend``, a communicator of nccl4py or mpi4py, a
            member of a :class:`Loopback` group, or any object with ``rank``, ``size``, ``send(array, peer)`` and
            ``receive(array, peer)``. None for a single member.
        method, check: see :func:`context_parallel`.

    Attributes:
        rank: this member.
        size: P, the number of members.

    Raises:
        TypeError: the group is of another kind, or ``check`` is not a Boolean.
        ValueError: there is no such method.

    >>> import numpy as np
    >>> from cupy_sdpa.parallel import ContextParallel
    >>> cp = ContextParallel()  # a group of one member
    >>> q = np.ones((8, 2, 4, 1), np.float32, order="F")
    >>> cp.rank, cp.size, cp.attention(q, q, q, causal=True).shape
    (0, 1, (8, 2, 4, 1))
    """

    def __init__(self, group: Any = None, *, method: str | None = None, check: bool = True) -> None:
        self._channel = Channel(as_exchanger(group))
        self.rank, self.size = self._channel.rank, self._channel.size
        self._agreement = Agreement(self._channel, method, check=read_flag("check", check))
        #: The programs of its calls, which refer to the group.
        self._programs = CallKey.new_programs()

    @_collective
    @takes_options(name="ContextParallel")
    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        return_stats: bool = False,
        method: str | None = None,
        seqlen_q: int | None = None,
        seqlen_kv: int | None = None,
        **options: Any,
    ) -> Any:
        """Compute :func:`cupy_sdpa.attention` of sequences that are split among the members; collective.

        Args:
            q, k, v: the member's parts, ``(D, Hq, Sq_r, B)``, ``(D, Hkv, Skv_r, B)`` and ``(Dv, Hkv, Skv_r, B)``; packed
                ``(D, Hq, Tq_r)``, ``(D, Hkv, Tkv_r)`` and ``(Dv, Hkv, Tkv_r)``. :meth:`shard` cuts them.
            return_stats: also return the log-sum-exp of the member's queries, ``(Sq_r, Hq, B)`` or ``(Hq, Tq_r)``, float32
                (float64 for float64 arrays), which the backward pass needs. Default False.
            method: ``"ring"``, ``"all_gather"`` or ``"all_to_all"``. Default None: the context's method, or chosen.
            seqlen_q, seqlen_kv: the lengths of whole sequences, Sq and Skv, of dense arrays. Default None: the local length
                times P, which must be right for all members: pass them if 2 P does not divide the length.
            options: the options of :func:`cupy_sdpa.attention` except ``page_table``, ``num_splits``, ``bucket`` and
                ``batch_invariant``; ``dropout_p`` on the CPU only. ``block_mask``, for whole sequences, is computed as a dense
                mask.

        Returns:
            The output of the member's queries, ``(Dv, Hq, Sq_r, B)``, or ``(out, stats)``.

        Raises:
            TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`.
            ValueError: members pass different shapes or options, or arrays are not the member's part of ``seqlen_q`` and
                ``seqlen_kv``.
            Unsupported: the method cannot run, or a group does not take the option.
            GroupError: a member failed, or did not call in time.

        >>> import numpy as np, cupy_sdpa
        >>> from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
        >>> q = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 8, 1)))
        >>> def member(group):
        ...     cp = context_parallel(group)
        ...     own = cp.shard(q)
        ...     out, stats = cp.attention(own, own, own, window=(2, 0), return_stats=True)
        ...     return cp.unshard(out), cp.unshard(stats, axis=0)
        >>> out, stats = run_threads(Loopback(2).members, member)[0]
        >>> expected = cupy_sdpa.attention(q, q, q, window=(2, 0), return_stats=True)
        >>> bool(np.allclose(out, expected[0])), bool(np.allclose(stats, expected[1]))
        (True, True)
        """
        return_stats = read_flag("return_stats", return_stats)
        out, stats = results_of(self._call({"q": q, "k": k, "v": v}, options, Request(False, method, seqlen_q, seqlen_kv)))
        return (out, stats) if return_stats else out

    @_collective
    @takes_options(name="ContextParallel")
    def attention_backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        stats: Any,
        *,
        method: str | None = None,
        seqlen_q: int | None = None,
        seqlen_kv: int | None = None,
        deterministic: bool = False,
        return_dsinks: bool = False,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Compute :func:`cupy_sdpa.attention_backward` of sequences that are split among the members; collective.

        Args:
            dout: the gradient of the member's output, ``(Dv, Hq, Sq_r, B)``.
            q, k, v, method, seqlen_q, seqlen_kv: as for :meth:`attention`.
            out, stats: the results of :meth:`attention`.
            deterministic: as for :func:`cupy_sdpa.attention_backward`. The gradients of keys and values of the members are
                added in one order in any case. Default False.
            return_dsinks: also return the gradient of the sinks, ``(Hq,)`` float32, the same for all members. Other gradients
                cannot be requested. Default False.
            options: as for :meth:`attention`.

        Returns:
            ``(dq, dk, dv)`` of the member's positions, with the shapes of q, k and v; and the gradient of the sinks if
            requested.

        Raises:
            TypeError, ValueError, Unsupported, CudnnError, GroupError: as :meth:`attention`.
            ValueError: ``return_dsinks`` is True without ``sinks``.
            Unsupported: another gradient is requested, or ``dstats`` is passed.

        >>> import numpy as np, cupy_sdpa
        >>> from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
        >>> q = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 8, 1)))
        >>> def member(group):
        ...     cp = context_parallel(group)
        ...     own = cp.shard(q)
        ...     out, stats = cp.attention(own, own, own, return_stats=True)
        ...     dq, dk, dv = cp.attention_backward(out, own, own, own, out, stats)  # the gradient of (out**2).sum() / 2
        ...     return cp.unshard(dq)
        >>> out, stats = cupy_sdpa.attention(q, q, q, return_stats=True)
        >>> dq, dk, dv = cupy_sdpa.attention_backward(out, q, q, q, out, stats)
        >>> bool(np.allclose(run_threads(Loopback(2).members, member)[0], dq))
        True
        """
        of = Request(True, method, seqlen_q, seqlen_kv, deterministic, return_dsinks)
        of = _read_requests(of, options)
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "stats": stats}
        return tuple(results_of(self._call(arrays, options, of)))

    @_collective
    @takes_options(name="ContextParallel")
    def attention_vjp(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        method: str | None = None,
        seqlen_q: int | None = None,
        seqlen_kv: int | None = None,
        deterministic: bool = False,
        return_dsinks: bool = False,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Compute attention, and return it with a function that computes the gradients (the vector-Jacobian product).

        Args:
            q, k, v, method, seqlen_q, seqlen_kv: as for :meth:`attention`.
            deterministic, return_dsinks, options: as for :meth:`attention_backward`.

        Returns:
            ``(out, pullback)``; ``dq, dk, dv = pullback(dout)``. Both are collective. The pullback uses the score and mask
            functions of the forward pass, even if they have changed since.

        Raises:
            TypeError, ValueError, Unsupported, CudnnError, GroupError: as :meth:`attention`.
            Unsupported: ``return_stats`` is passed, or another gradient than that of the sinks is requested.

        >>> import numpy as np
        >>> from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
        >>> q = np.ones((8, 2, 8, 1), np.float32, order="F")
        >>> def member(group):
        ...     cp = context_parallel(group)
        ...     own = cp.shard(q)
        ...     out, pullback = cp.attention_vjp(own, own, own, causal=True)
        ...     return [gradient.shape for gradient in pullback(np.ones_like(out))]
        >>> run_threads(Loopback(2).members, member)[0]
        [(8, 2, 4, 1), (8, 2, 4, 1), (8, 2, 4, 1)]
        """
        of = Request(True, method, seqlen_q, seqlen_kv, deterministic, return_dsinks)
        of = _read_requests(of, options)
        if options.pop("return_stats", False) is not False:
            raise Unsupported(_NO_STATS_GRADIENT.format("return_stats is passed to attention_vjp"))
        arrays = {"q": q, "k": k, "v": v}
        forward = self._call(arrays, options, Request(False, method, seqlen_q, seqlen_kv)).snapshot()
        out, stats = results_of(forward)

        def pullback(self: ContextParallel, q: Any, dout: Any) -> tuple[Any, ...]:  # an error is sent from q's device
            of_pass = {**arrays, "dout": dout, "out": out, "stats": stats}
            return tuple(results_of(self._call(of_pass, forward.key.options, of)))

        return out, functools.partial(_collective(pullback), self, q)

    @takes_options(name="ContextParallel")
    def explain(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        method: str | None = None,
        seqlen_q: int | None = None,
        seqlen_kv: int | None = None,
        **options: Any,
    ) -> ParallelReport:
        """Report which method :meth:`attention` would use and why, this member's calls and memory, and the bytes that it sends.

        Nothing is computed or exchanged, so a single member can call it. On a GPU the plans of both passes are built and
        cached.

        Args:
            q, k, v, method, seqlen_q, seqlen_kv, options: as for :meth:`attention`.

        Returns:
            The report, which prints as text.

        Raises:
            TypeError, ValueError, Unsupported, CudnnError: as :meth:`attention`.

        >>> import numpy as np
        >>> from cupy_sdpa.parallel import Loopback, context_parallel
        >>> cp = context_parallel(Loopback(2).members[0])
        >>> q = np.ones((8, 2, 8, 1), np.float32, order="F")
        >>> cp.explain(q, q, q, window=(2, 0)).method
        'all_to_all'
        """
        arrays = {"q": q, "k": k, "v": v}
        forward = self._call(arrays, options, Request(False, method, seqlen_q, seqlen_kv))
        missing = ("dout", "out", "stats")
        backward = self._call({**arrays, **dict.fromkeys(missing)}, options, Request(True, method, seqlen_q, seqlen_kv))
        of_forward = forward.read()
        member = self._agreement.member
        assert member
        return report(member.config, member.choice, of_forward, backward.read(missing=missing))

    def _call(self, arrays: Mapping[str, Any], options: Mapping[str, Any], of: Request) -> Call:
        """Return a call as a value."""
        if "cu_seqlens_q" in options or "cu_seqlens_kv" in options:  # the key contains the values of offsets on the host
            options = {name: HostOffsets.of(value) if name in CU_SEQLENS else value for name, value in options.items()}
        key = CallKey(of, (*arrays,), (*arrays.values(),), options, self._programs)
        parse = functools.partial(self._agreement.parse, of)
        check = functools.partial(check_engine, options)
        return Call(key, parse, of.results, self._agreement.decided, check=check)

    def shard(self, x: Any, *, axis: int | None = None, cu_seqlens: Any = None) -> Any:
        """Return this member's part of an array that every member has.

        Args:
            x: the array, with whole sequences along ``axis``.
            axis: the axis of the positions: 1 for ``layout="bshd"``, 2 for ``"bhsd"``, 0 for ``"thd"``, for tokens and for the
                log-sum-exp ``(S, ...)``. Default None: 2, as in q ``(D, Hq, Sq, B)``; an array with the strides of another
                layout raises ValueError.
            cu_seqlens: the offsets of packed sequences. Default None: one sequence.

        Returns:
            A dense copy, with its axes in the same order in memory.

        Raises:
            TypeError: ``x`` is not an array, ``axis`` is not an integer, or the offsets are not integers ``(B + 1,)`` on the
                host.
            ValueError: the offsets do not fit ``x``, there is no such axis, or ``axis`` is needed.

        >>> import numpy as np
        >>> from cupy_sdpa.parallel import Loopback, context_parallel
        >>> x = np.arange(8.0).reshape(1, 1, 8, 1, order="F")
        >>> [context_parallel(member).shard(x).ravel().tolist() for member in Loopback(2).members]
        [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 4.0, 5.0]]
        """
        along = _axis_of(x, axis)
        layout = self._layout(x.shape[along], cu_seqlens)
        if layout.total != x.shape[along]:
            raise ValueError(
                f"x has shape {x.shape}, {x.shape[along]} positions along axis {along}; cu_seqlens has {layout.total}"
            )
        shape = (*x.shape[:along], layout.share(self.rank), *x.shape[along + 1 :])
        with cupy_runtime.device_context(x):
            arrays = {"q": x, "own": _new_like(x, shape)}
            whole, own = (View.of(name, array) for name, array in arrays.items())
            builder = Builder(whole.storage.device)
            for local, positions in layout.slices(self.rank):
                builder.copy_part(own[_slices(along, local)], whole[_slices(along, positions)])
            return ReadCall(builder.build(), arrays, {"own": own}).run()[0]

    @_collective
    def unshard(self, x: Any, *, axis: int | None = None, seqlen: int | None = None, cu_seqlens: Any = None) -> Any:
        """Return the whole array from the parts of all members; collective.

        Args:
            x: this member's part.
            axis, cu_seqlens: as for :meth:`shard`.
            seqlen: the length of whole sequences. Default None: the local length times P.

        Returns:
            The array on every member, dense, with the axes of ``x`` in the same order in memory.

        Raises:
            TypeError: as :meth:`shard`.
            ValueError: ``x`` is not the member's part, there is no such axis, ``axis`` is needed, or members disagree.
            GroupError: a member failed, or did not call in time.

        >>> import numpy as np
        >>> from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
        >>> x = np.arange(7.0).reshape(1, 1, 7, 1, order="F")
        >>> def member(group):
        ...     cp = context_parallel(group)
        ...     return cp.unshard(cp.shard(x), seqlen=7).ravel().tolist()
        >>> run_threads(Loopback(2).members, member)[1]
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        """
        along = _axis_of(x, axis)
        layout = self._layout(x.shape[along] * self.size if seqlen is None else seqlen, cu_seqlens)
        if x.shape[along] != layout.share(self.rank):
            raise ValueError(
                f"x has shape {x.shape}; of {layout.total} positions member {self.rank} of {self.size} holds "
                f"{layout.share(self.rank)}: pass seqlen= or cu_seqlens="
            )
        others, lengths = (*x.shape[:along], *x.shape[along + 1 :]), abbreviated(layout.lengths)
        text = f"unshard, axis {along} of {layout.total} positions, lengths {lengths}, others {others} {x.dtype}"
        self._agreement.agree(text)
        with cupy_runtime.device_context(x):
            shapes = [
                (*x.shape[:along], positions, *x.shape[along + 1 :])
                for positions in (*map(layout.share, range(self.size)), layout.total)
            ]
            arrays = {"q": x, "whole": _new_like(x, shapes.pop())}
            own, whole = (View.of(name, array) for name, array in arrays.items())
            steps = MemberSteps(Builder(own.storage.device), self._channel)
            messages = steps.gather(steps.message_of([own]), [[(shape, x.dtype)] for shape in shapes], "unshard")
            for peer, message in enumerate(messages):
                for local, positions in layout.slices(peer):
                    steps.builder.copy_part(whole[_slices(along, positions)], message.arrays[0][_slices(along, local)])
            return ReadCall(steps.builder.build(), arrays, {"whole": whole}).run()[0]

    def position_ids(self, seqlen: int | None = None, *, cu_seqlens: Any = None) -> Any:
        """Return the positions of this member's elements within their sequences, for rotary or position embeddings.

        Args:
            seqlen: the length of the sequence.
            cu_seqlens: the offsets of packed sequences, instead of ``seqlen``.

        Returns:
            numpy array int64, as long as the member's part.

        Raises:
            TypeError: the offsets are not integers ``(B + 1,)`` on the host.
            ValueError: both arguments are passed, or none; the length is not an integer, or negative; or offsets decrease or do
                not begin with 0.

        >>> from cupy_sdpa.parallel import Loopback, ContextParallel
        >>> [ContextParallel(member).position_ids(8).tolist() for member in Loopback(2).members]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        if (seqlen is None) == (cu_seqlens is None):
            raise ValueError(f"seqlen is {seqlen} and cu_seqlens is {cu_seqlens}: pass one of them")
        return self._layout(0 if seqlen is None else seqlen, cu_seqlens).positions(self.rank)

    def check(self) -> None:
        """Raise GroupError if a member failed. CuPy arrays are valid only if this does not raise after synchronization.

        Raises:
            GroupError: a member failed, or made another call at the same time.

        >>> from cupy_sdpa.parallel import context_parallel
        >>> context_parallel().check()
        """
        self._channel.check()

    def _layout(self, length: Any, cu_seqlens: Any) -> ShardLayout:
        if cu_seqlens is not None:
            return ShardLayout(packed_lengths("cu_seqlens", cu_seqlens), self.size, packed=True)
        return ShardLayout((read_length("seqlen", length),), self.size)


#: The flags of gradients that a group does not sum over its members.
_REFUSED_REQUESTS = {
    name for name in inspect.signature(attention_backward).parameters if name.startswith("return_d") and name != "return_dsinks"
}


def _read_requests(of: Request, options: dict[str, Any]) -> Request:
    """Check the flags of a backward pass, and remove the requests for other gradients from the options.

    Raises:
        TypeError, ValueError, Unsupported: as :meth:`ContextParallel.attention_backward`.
    """
    if not type(of.deterministic) is type(of.return_dsinks) is bool:
        of = of._replace(
            deterministic=read_flag("deterministic", of.deterministic),
            return_dsinks=read_flag("return_dsinks", of.return_dsinks),
        )
    if not _REFUSED_REQUESTS.isdisjoint(options):
        _drop_requests(options)
    if options.pop("dstats", None) is not None:
        raise Unsupported(_NO_STATS_GRADIENT.format("dstats is passed"))
    if of.return_dsinks and options.get("sinks") is None:
        raise ValueError("return_dsinks is True and sinks is None: pass sinks=, or remove return_dsinks")
    return of


def _drop_requests(options: dict[str, Any]) -> None:
    """Remove all gradient flags except ``return_dsinks``; raises Unsupported if a removed flag is not False."""
    for name in _REFUSED_REQUESTS:
        if (value := options.pop(name, False)) is not False:
            raise Unsupported(
                f"{name} is {value!r}, which a group does not support: every member has a part of this gradient, and only the "
                "gradient of the sinks is summed over the members: compute it on one GPU"
            )


def _axis_of(x: Any, axis: int | None) -> int:
    """Return the positions' axis, 0 or more; for None q's axis, and the strides are checked."""
    if not hasattr(x, "shape"):
        raise TypeError(f"x is a {type(x).__module__}.{type(x).__qualname__}; it must be a numpy or CuPy array")
    if axis is None:
        Axes.check_strides("x", x, remedy=". Or name the positions: axis=1 for 'bshd', axis=2 for 'bhsd', axis=0 for 'thd'")
        axis = 2
    if not isinstance(axis, numbers.Integral):
        raise TypeError(f"axis is {axis!r}; it must be an integer")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}; x has {x.ndim} axes, shape {x.shape}")
    return axis % int(x.ndim)


def _new_like(x: Any, shape: tuple[int, ...]) -> Any:
    """Return a new dense array with its axes in memory ordered like the axes of ``x``, so that calls can tell layouts apart."""
    axes = sorted(range(x.ndim), key=lambda axis: (x.strides[axis] == 0, abs(x.strides[axis])))  # broadcast axes are last
    made = cupy_runtime.new_result(x, tuple(shape[axis] for axis in axes), x.dtype)
    return made.transpose([axes.index(axis) for axis in range(x.ndim)])


def _slices(axis: int, part: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, part)
