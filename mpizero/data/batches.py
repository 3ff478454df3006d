"""Choose the samples of each global batch, and those of them on which this rank trains.

:func:`batches` checks its arguments on all ranks and returns :class:`Batches`, an iterator whose whole state is the
number of samples consumed. The samples of a global batch follow from the sample order of the source alone, and the
grains determine which of them a rank reads. So the ranks exchange no messages, and a background thread
(:class:`ReadAhead`) may read batches before they are asked for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.checks import seed as whole_seed
from mpizero._util.names import explains
from mpizero._util.pytree import join, paths_of
from mpizero._util.text import notice_once
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.comm.communicator import Communicator
from mpizero.data.online import OnlineBatches, OnlineSource
from mpizero.data.source import WHOLE, Indices, Slab, Source, TransformedSource, epochs, source_for
from mpizero.errors import ArgumentError, ConfigError, DataError, MpizeroError
from mpizero.layout.batch import GrainRule, Grains
from mpizero.layout.fields import Cut
from mpizero.types import Run


class GrainSizes(Protocol):
    """Define the method from which :class:`Batches` computes the samples of each rank."""

    def grain_size(self, global_batch: int) -> int:
        """Return the number of samples of one grain, for a global batch of ``global_batch`` samples."""


class Ranks(Protocol):
    """Define the attribute of a :class:`~mpizero.sharding.mesh.Mesh` that :func:`batches` uses."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of all ranks, over which :func:`batches` is collective."""


class RankedModel(GrainSizes, Protocol):
    """Define the attributes that :func:`batches` uses of a sharded model."""

    @property
    def mesh(self) -> Any:
        """The mesh of the model's ranks."""

    @property
    def batch_group(self) -> Communicator:
        """The communicator over whose ranks a global batch is divided."""


#: Number of reads of each block in an epoch from which :func:`batches` prints a notice.
COSTLY_READS = 4


class Batches:
    """Iterate over this rank's samples ``(x, y)`` of successive global batches; made by :func:`batches`.

    Attributes
    ----------
    consumed : int
        Number of samples of all global batches that the iterator has passed, over all ranks. It is the whole state of
        the iterator: ``batches(..., consumed=consumed)`` on any number of ranks continues with the next global batch.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(6.0), np.arange(6))
    >>> with mz.ShardingConfig(comm="self", micro_batch=2) as config:
    ...     with mz.data.batches(source, config, global_batch=4, steps=3, prefetch=1) as stream:
    ...         sizes = [len(x) for x, y in stream]
    >>> type(stream).__name__, sizes, stream.consumed, stream.epoch
    ('Batches', [4, 4, 4], 12, 1)
    """

    def __init__(
        self,
        source: Source,
        sizes: GrainSizes,
        global_batch: int,
        seed: int,
        steps: int | None,
        consumed: int,
        *,
        group: Communicator,
        prefetch: int = 0,
        slab: Slab = WHOLE,
    ) -> None:
        self.consumed = consumed
        self._source = source
        self._batch = global_batch
        self._seed = seed
        self._left = steps
        self._sizes, self._group, self._slab = sizes, group, slab
        self._prefetch = prefetch
        self._unchecked_reader = _user_reader(source)
        self._ahead: ReadAhead[tuple[Any, Any]] | None = None
        self._start, self._told = (consumed, _updates(sizes)), False

    def __iter__(self) -> Self:
        return self

    @property
    def epoch(self) -> int:
        """The epoch (from 0) to which the first sample of the last returned global batch belongs.

        Pass it to ``model.train(x, y, epoch=...)``.
        """
        return max(0, self.consumed - self._batch) // len(self._source)

    def __next__(self) -> tuple[Any, Any]:
        self._tell_repetition()
        if self._left == 0:
            self.close()
            raise StopIteration
        samples = self._read_next()
        self.consumed += self._batch
        if self._left is not None:
            self._left -= 1
        return samples

    def _read_next(self) -> tuple[Any, Any]:
        if not self._prefetch:
            return self._read(self.consumed)
        if self._ahead is None:
            start = self.consumed
            self._ahead = ReadAhead(lambda number: self._read(start + number * self._batch), self._prefetch, self._left)
        try:
            return self._ahead.next()
        except BaseException:
            self.close()
            raise

    def _read(self, start: int) -> tuple[Any, Any]:
        """Read this rank's samples of the global batch that begins after ``start`` samples. Not collective."""
        local = self._local_samples()
        order = self._source.sample_order(start + local.start, start + local.stop, len(self._source), self._seed)

        def read() -> tuple[Any, Any]:
            if self._source.takes_run:
                return self._samples_with_run(order, start, local.start)
            return self._slab.samples(self._source, order)

        if not (self._unchecked_reader and order.size):
            return read()
        samples = _read_twice(self._unchecked_reader, self._source.origin(order), read)
        self._unchecked_reader = ""
        return samples

    def _local_samples(self) -> slice:
        """Return which samples of a global batch this rank reads."""
        grains = Grains(self._batch, self._sizes.grain_size(self._batch))
        return grains.samples_of(self._group.rank, self._group.size)

    def tell_cost(self, comm: Communicator) -> Self:
        """Return ``self``; print a notice on rank 0 if each stored block of samples is read many times an epoch.

        Not collective.
        """
        local, size = self._local_samples(), self._source.block_samples
        count, blocks = max(1, local.stop - local.start), -(-len(self._source) // size)
        # Of b blocks m random samples are in b (1 - (1 - 1/b)^m) of them, on average.
        times = len(self._source) / count * (1 - (1 - 1 / blocks) ** count)
        if comm.rank == 0 and size > 1 and times >= COSTLY_READS:
            notice_once(
                f"batches: the data is stored in blocks of {size} samples, and shuffled batches read, and decompress, "
                f"each of its {blocks} blocks about {times:.0f} times an epoch; mpizero.data.cached and "
                "mpizero.data.BlockShuffledSource read it once (docs/data.md)"
            )
        return self

    def _tell_repetition(self) -> None:
        """Print a notice if an earlier iterator has trained the model on the same batches. Not collective."""
        first, updates = self._start
        if updates is None or self._told or (_updates(self._sizes) or 0) <= updates:
            return
        self._told = True
        trained = _TRAINED.setdefault(self._source, {})
        key = first, self._batch, self._seed, id(self._sizes)
        model, before = trained.get(key, (None, 0))
        trained[key] = weakref.ref(self._sizes), updates
        if (
            model is not None
            and model() is self._sizes
            and before < updates
            and self._sizes.mesh.communicator.rank == 0
        ):
            notice_once(
                "batches: the model is trained again by the same samples in the same order, with the same random "
                "changes: a new iterator begins anew; let one go over all epochs, steps=epochs * len(source) // "
                "global_batch, or give the next consumed=stream.consumed"
            )

    def close(self) -> None:
        """End the thread that reads ahead, if there is one; a continued iteration starts a new thread.

        Not collective. The thread also ends with the iteration, and after an error in it.
        """
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Call :meth:`close`."""
        self.close()

    def _samples_with_run(self, order: Indices, start: int, offset: int) -> tuple[Any, Any]:
        """Read this rank's samples of a global batch, with indices ``order``, from a source that takes ``run``.

        Samples of different epochs are read by separate calls. ``start`` is the number of samples consumed before the
        global batch, ``offset`` the number of the batch's samples before this rank's first one.
        """
        first, length, parts = start + offset, len(self._source), list[Any]()
        for epoch, part in [*epochs(first, first + order.size, length)] or [(first // length, slice(0, 0))]:
            count = part.stop - part.start
            run = Run(True, self._seed, start // self._batch, offset + part.start, count=count, epoch=epoch)
            parts.append(self._slab.samples(self._source, order[part], run=run))
        x, y = join(parts)
        return x, y


#: For each source, the iterations over its batches by which a model was trained (start, global batch, seed, model), and
#: the number of updates of the model before each of these.
_TRAINED: weakref.WeakKeyDictionary[Source, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _updates(model: Any) -> int | None:
    """Return the number of updates of a sharded model's parameters; None if it has no optimizer."""
    with suppress(MpizeroError):
        count: int | None = getattr(getattr(model, "optimizer", None), "step_count", None)
        return count
    return None


T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Return the results of ``make(0)``, ``make(1)`` and so on, in order, computed in one background thread.

    The thread is at most ``depth`` calls ahead of :meth:`next`. ``make`` must not call MPI. An error of ``make`` is
    raised by the :meth:`next` that would have returned its result.

    Parameters
    ----------
    make : callable
        Called with the number of the result.
    depth : int
        Number of results that are computed, or being computed, before :meth:`next` returns them.
    count : int or None
        Number of results; None for an unlimited number.
    """

    def __init__(self, make: Callable[[int], T], depth: int, count: int | None) -> None:
        self._make, self._depth, self._count = make, depth, count
        self._started = 0
        self._waiting: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mpizero-read-ahead")
        self._fill()

    def _fill(self) -> None:
        while len(self._waiting) < self._depth and (self._count is None or self._started < self._count):
            self._waiting.append(self._thread.submit(self._make, self._started))
            self._started += 1

    def next(self) -> T:
        """Return the next result; wait until it is computed. Not collective."""
        result = self._waiting.popleft().result()
        self._fill()
        return result

    def close(self) -> None:
        """End the thread after its current call of ``make``; drop results not yet returned. Not collective."""
        self._waiting.clear()
        self._count = 0
        self._thread.shutdown(wait=True, cancel_futures=True)


def _user_reader(source: Source) -> str:
    """Return the name of the user's function that makes a source's samples; "" if this library makes them."""
    inner: Any = source
    while isinstance(inner, Source):
        if isinstance(inner, TransformedSource):
            return inner.name
        if not type(inner).__module__.startswith("mpizero."):
            return f"{type(inner).__name__}.read"
        inner = getattr(inner, "source", None)
    return ""


def _read_twice(reader: str, numbers: Indices, read: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Call ``read``, which returns the samples ``numbers``, twice; raise DataError if the results differ in a bit.

    Samples that differ between calls depend on what was read before, and so on the number of ranks.
    """
    before = _bytes_of(read())
    after = _bytes_of(samples := read())
    for path, rows in before.items():
        if differing := [n for n, one, two in zip(numbers.tolist(), rows, after[path], strict=True) if one != two]:
            raise DataError(
                f"{reader} gives other numbers in {path} of sample {differing[0]} when it is called again with the "
                "same arguments, so results would depend on the ranks: let it depend on these alone, and draw by what "
                "they tell (run.seed, run.epoch and the index in read; random in the function of a TransformedSource)"
            )
    return samples


def _bytes_of(samples: tuple[Any, Any]) -> dict[str, list[bytes]]:
    """Return the bytes of each sample of every array, by the array's path."""
    named = paths_of(**dict(zip("xy", samples, strict=True)))
    return {path: [row.tobytes() for row in leaf] for path, leaf in named if isinstance(leaf, np.ndarray)}


@explains
def batches(
    source: Source | OnlineSource,
    ranks: Ranks | RankedModel,
    global_batch: int,
    seed: int = 0,
    steps: int | None = None,
    consumed: int = 0,
    *,
    group: Communicator | None = None,
    prefetch: int = 0,
) -> Batches | OnlineBatches:
    """Return an iterator over this rank's samples ``(x, y)`` of successive global batches.

    A global batch is the next ``global_batch`` samples of ``source.sample_order``; it may contain the end of one epoch
    and the start of the next. The batch is cut into grains, slices whose size does not depend on the ranks. Each rank
    is assigned a contiguous range of grains, in the order of the ranks, or no grain. The ranks of a domain get their
    parts of the same fields (docs/fields.md). This call is collective over the ``ranks``; the iteration is not.

    Parameters
    ----------
    source : Source or OnlineSource
        The data, the same on every rank. Samples of an OnlineSource are used once, in the order of ``docs/online.md``:
        ``seed`` has no effect, and the iteration is collective.
    ranks : sharded model, Mesh or ShardingConfig
        The ranks. With a DDP or ZeRO-1 model, each rank gets the samples of the grains that it computes. With another
        model, or a mesh, which does not know the size of a model's grains (``docs/concepts.md``), ``train`` may send
        samples to the ranks that compute them; the results are the same.
    global_batch : int
        Number of samples of one training step, over all ranks.
    seed : int
        Seed of the random sample order, from 0 to 2**64 - 1.
    steps : int or None
        Number of global batches to return, counted from ``consumed`` on. With None the iteration never ends.
    consumed : int
        Number of samples already used, over all ranks: the attribute ``consumed`` of an earlier iterator.
    group : Communicator or None
        The ranks among which a global batch is divided: the ``batch_group`` of a model. None means that of the model
        given as ``ranks``, or all ranks of the mesh; if the mesh has a domain, those ranks that hold the same part of
        the fields as this rank.
    prefetch : int
        Number of this rank's batches that a background thread, which sends no message, reads ahead; ``source`` must
        allow reading in a thread. An error in the thread is raised when its batch is requested, and ends the thread.

    Raises
    ------
    ConfigError
        If ``global_batch``, ``seed``, ``steps``, ``consumed`` or ``prefetch`` is out of range.
    DataError
        If ``source`` is neither a :class:`Source` nor an :class:`OnlineSource`, or is a source without samples.
    MpizeroError
        If ranks have different data or arguments.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.Mesh("self") as mesh:
    ...     stream = mz.data.batches(mz.data.digits(), mesh, global_batch=1000, seed=0, steps=2)
    ...     print([(x.shape, stream.consumed, stream.epoch) for x, y in stream])
    [((1000, 64), 1000, 0), ((1000, 64), 2000, 0)]
    """
    settings = {"global_batch": global_batch, "seed": seed, "steps": steps, "consumed": consumed, "prefetch": prefetch}
    comm, group = ranks_of(ranks, group)
    with all_ranks(comm):
        _check_arguments(source, comm, settings)
    agree_equal(comm, lambda: _described_arguments(source, settings), "agree batches")
    if isinstance(source, OnlineSource):
        return OnlineBatches(source, _grains_of(ranks), global_batch, steps, consumed, group, slab=slab_of(ranks))
    with all_ranks(comm):
        choose_grains(ranks, source, global_batch)
    sizes, slab = _grains_of(ranks), slab_of(ranks)
    made = Batches(source, sizes, global_batch, seed, steps, consumed, group=group, prefetch=prefetch, slab=slab)
    return made.tell_cost(comm)


def _check_arguments(source: Source | OnlineSource, comm: Communicator, settings: dict[str, Any]) -> None:
    """Raise an error if the arguments of :func:`batches` cannot be used. Not collective."""
    if not isinstance(source, Source | OnlineSource):
        raise DataError(
            f"expected a source of samples such as TextSource, got {type(source).__name__}{source_for(source)}"
        )
    checks = {"global_batch": whole(1), "seed": whole_seed}
    for name, value in settings.items():
        if value is not None or name != "steps":
            require(name, value, checks.get(name, whole(0)))
    if isinstance(source, OnlineSource):
        source.check_ranks(comm)
        if settings["prefetch"]:
            raise ConfigError(
                f"prefetch={settings['prefetch']}: samples of an OnlineSource come by messages, which are not read "
                "ahead: leave it out"
            )
    elif not len(source):
        raise DataError("the source has no samples to train on")


def _described_arguments(source: Source | OnlineSource, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the source and the arguments, which must be equal on all ranks, for error messages."""
    if isinstance(source, OnlineSource):
        return {"the arguments of batches": {"source": vars(source.form), **settings}}
    described = {"class": type(source).__name__, "samples": len(source), **source.describe()}
    return {"the arguments of batches": {"source": described, **settings}}


def ranks_of(ranks: Any, group: Communicator | None) -> tuple[Communicator, Communicator]:
    """Return the communicator of all ranks, and the one over whose ranks a global batch is divided."""
    mesh = getattr(ranks, "mesh", ranks)
    comm = getattr(mesh, "communicator", None)
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"expected a sharded model or a mpizero.Mesh for the ranks, got {ranks!r:.80}")
    if group is None and getattr(mesh, "domain", None) and not hasattr(ranks, "batch_group"):
        group = mesh.grid.batch  # the ranks of a domain get parts of the same samples
    return comm, getattr(ranks, "batch_group", comm) if group is None else group


def slab_of(ranks: Any) -> Slab:
    """Return the part of fields that this rank of a sharded model or a mesh gets: without a domain, whole fields."""
    mesh = getattr(ranks, "mesh", ranks)
    domain = getattr(mesh, "domain", None)
    return Slab(Cut(domain), mesh.axes.coordinates(mesh.rank).context) if domain else WHOLE


def _grains_of(ranks: Any) -> GrainSizes:
    return ranks if hasattr(ranks, "grain_size") else GrainRule(None, 1)


def choose_grains(ranks: Any, source: Source, global_batch: int) -> None:
    """Let a sharded model of PyTorch or JAX choose its default grain size, in samples; do nothing for other models.

    Not collective; every rank calls it.
    """
    if hasattr(getattr(ranks, "wrapped_model", None), "efficient_samples"):
        ranks.grain_size(global_batch, source.samples(np.zeros(1, np.int64)))


#: Number of samples that :func:`full_batch` reads twice, to compare them, before it reads all.
READ_TWICE = 64


def full_batch(source: Source, ranks: Ranks | RankedModel, *, group: Communicator | None = None) -> tuple[Any, Any]:
    """Read and return this rank's part ``(x, y)`` of the global batch of all samples, in the order of the source.

    Collective over ``ranks``. ``ranks`` and ``group`` are as for :func:`batches`.
    """
    comm, group = ranks_of(ranks, group)
    local = Grains(len(source), _grains_of(ranks).grain_size(len(source))).samples_of(group.rank, group.size)
    indices = np.arange(local.start, local.stop)
    with all_ranks(comm):
        if reader := _user_reader(source):
            _read_twice(reader, source.origin(indices[:READ_TWICE]), lambda: source.samples(indices[:READ_TWICE]))
        x, y = slab_of(ranks).samples(source, indices)
    return x, y
