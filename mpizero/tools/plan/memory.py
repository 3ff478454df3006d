"""Predict the memory that a rank's micro-batches need: caches of blocks, and arrays of the block that runs.

:class:`BlockTrials` runs the blocks of a model one at a time, to measure the memory, the group calls and the output of
each. So that these runs take little time, parameters and gradients are :class:`FakeArray` objects, whose matrix
products are not computed. The memory that a block allocates is traced (:func:`watched`), and the memory that it keeps
is found from the arrays that a pass returns (:func:`buffers`). :class:`ShardSizes` has the sizes of the shards of all
ranks of a stage's data group, :class:`ModelPart` the part of a model that one pipeline stage, tensor rank and context
rank holds: size, work and output. From the measurements of blocks, :class:`ChunkActivations` computes the memory that
one micro-batch needs, and :class:`StageActivations` how a rank's memory changes during a step.

[Note: trials] No formula can tell what a user's layer keeps in memory. So one block of each kind runs forward and
backward alone, on two samples and again on three. (Not on one: an array of one sample may be contiguous although an
array of several samples is not.) Blocks that differ only in the ``site`` of their dropouts, a number in the key of the
random masks, are of one kind. Parameters are zeros, in memory that is freed afterwards; matrix products with them are
not computed. Memory and messages are assumed to grow linearly with the number of samples. If a block's group calls show
that they do not, the blocks run on as many samples as the real micro-batch has.
"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mpizero import nn
from mpizero._util.pytree import SampleTree, leaves_of, map_leaves
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.comm.p2p import ArrayShape, TreeForm
from mpizero.data.source import Slab
from mpizero.errors import ConfigError, DataError
from mpizero.layout import Instruction
from mpizero.layout.fields import Cut
from mpizero.layout.flat import FlatLayout, Unit, nested, united, views
from mpizero.layout.sum_tree import cover
from mpizero.layout.tensor_parts import elements_within, tile_rows
from mpizero.nn.domain_parallel import domain_model
from mpizero.nn.layer import Operations, fresh_integers
from mpizero.sharding.config import Placement
from mpizero.sharding.params import Shard
from mpizero.sharding.partition import ParallelLayout, PartitionedModel, partition_model
from mpizero.sharding.pipeline import AHEAD
from mpizero.tools.plan.counts import FieldExtents, GroupCall, PlannedGrid, RecordingDomain, RecordingGroup
from mpizero.types import Array, BlockModel, Layer, Loss, Run

if TYPE_CHECKING:
    from mpizero.comm import ProcessGrid


class FakeArray(np.ndarray):
    """Represent an array whose values do not matter: matrix products with it return zeros, without computing.

    All other operations work as on a plain array, and return plain arrays. A product whose ``out`` is a FakeArray
    writes nothing, so that the memory of ``out`` is never touched.
    """

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        """Return zeros for a matrix product, and compute all other operations as NumPy does. Not collective."""
        operands = tuple(_plain(value) for value in inputs)
        if ufunc is np.matmul and method == "__call__" and not options and (shape := _shape(*operands)) is not None:
            return _stored(shape, np.result_type(*operands), *out)
        if out:
            options["out"] = tuple(_plain(value) for value in out)
        result = getattr(ufunc, method)(*operands, **options)
        return out[0] if len(out) == 1 else result


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, FakeArray) else value


def _shape(a: Any, b: Any) -> tuple[int, ...] | None:
    """Return the shape of the matrix product ``a @ b``; None if NumPy is to compute it or to raise an error."""
    matrices = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and min(a.ndim, b.ndim) >= 2
    if not matrices or a.shape[-1] != b.shape[-2]:
        return None
    return (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def _stored(shape: tuple[int, ...], dtype: Any, out: Array | None = None) -> Array:
    if out is None:
        return np.zeros(shape, dtype)
    if out.shape != shape:
        raise ValueError(f"a product of shape {shape} cannot be stored in an array of shape {out.shape}")
    if not isinstance(out, FakeArray):
        out[...] = 0
    return out


class PeakMemory:
    """Measure the largest growth of allocated memory, in bytes, since the start of a measurement.

    ``allocations`` counts what another library allocates (:class:`mpizero.adapters.torch.passes.Allocations`); None if
    only Python and NumPy allocate. With another library, its peak is added to the peak of Python and NumPy. This sum is
    an upper bound, because the two peaks may be reached at different times.
    """

    def __init__(self, allocations: Any) -> None:
        self._allocations = allocations
        self.begin()

    def begin(self) -> None:
        """Start a new measurement. Not collective."""
        tracemalloc.reset_peak()
        self._start = tracemalloc.get_traced_memory()[0]
        if self._allocations is not None:
            self._allocations.begin()
            self._start += self._allocations.now

    def peak(self) -> int:
        """Return the largest growth in bytes since the start of the measurement. Not collective."""
        most = 0 if self._allocations is None else self._allocations.most
        return tracemalloc.get_traced_memory()[1] + most - self._start

    def foreign(self, addresses: Iterable[int]) -> int:
        """Return the bytes that another library now has in use, without its arrays at ``addresses``. Not collective."""
        return 0 if self._allocations is None else self._allocations.now - sum(map(self.size_at, set(addresses)))

    def size_at(self, address: int) -> int:
        """Return the bytes that another library has in use at ``address``; 0 if it has allocated none there."""
        return 0 if self._allocations is None else int(self._allocations.size_at(address))


@contextmanager
def watched(computing: Any) -> Iterator[PeakMemory]:
    """Trace allocations of the block or loss ``computing``, also those of another library if ``computing`` counts them.

    Yield a :class:`PeakMemory`.
    """
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    try:
        with getattr(computing, "allocations", nullcontext)() as counted:
            yield PeakMemory(counted)
    finally:
        if not already:
            tracemalloc.stop()


def _owner(array: Array) -> Array:
    """Return the array that owns the memory of ``array``, which may be a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def nbytes_outside(tree: Any, others: frozenset[int]) -> int:
    """Return the bytes of the arrays in ``tree``, without memory whose address is in ``others``."""
    return sum(owner.nbytes for owner in buffers(tree) if _address(owner) not in others)


def addresses(tree: Any) -> frozenset[int]:
    """Return the addresses of the memory of all arrays in ``tree``."""
    return frozenset(_address(array) for array in buffers(tree))


def _address(array: Array) -> int:
    """Return the memory address of ``array``, which may be a view; it is valid until the array is freed."""
    return int(_owner(array).ctypes.data)


def buffers(value: object) -> list[Array]:
    """Return the arrays in nested containers and objects, each once; for a view, the array that owns its memory.

    Groups of ranks, to which a cache may refer, are not searched.
    """
    owners: dict[int, Array] = {}
    visited: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, np.ndarray):
            owner = _owner(item)
            owners[id(owner)] = owner
        elif id(item) not in visited:
            visited.add(id(item))
            left += _inside(item)
    return list(owners.values())


def _inside(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in fields(item)]
    if isinstance(item, FunctionType):  # a loss may keep arrays in a function, as a cache
        values = [cell.cell_contents for cell in item.__closure__ or ()]
        return [value for value in values if isinstance(value, np.ndarray | list | tuple | FunctionType)]
    if isinstance(item, RecordingGroup | CommunicatorGroup | type) or callable(item):
        return []
    return list(getattr(item, "__dict__", {}).values())


def leaf_addresses(tree: Any) -> list[int]:
    """Return the memory address of each array of ``tree``, an array or nested containers of arrays."""
    return [_address(array) for array in leaves_of(tree) if array is not None]


#: Number of samples in the smaller of the two trials.
FEW = 2
#: Matches the number of a dropout in a layer's ``repr``.
_SITE = re.compile(r"\bsite=\d+")


class SavedMemory(NamedTuple):
    """Describe the arrays that a block keeps between its passes.

    Attributes
    ----------
    cached : int
        Bytes of the arrays in the cache that are neither the block's input nor its output nor parameters.
    deferred : int
        Bytes of such arrays that the block keeps from its backward pass for inputs to its backward pass for weights.
    input, output : tuple of bool
        For each array of the block's input, and of its output, whether the cache keeps it.
    """

    cached: int
    deferred: int
    input: tuple[bool, ...]
    output: tuple[bool, ...]


class PassPeaks(NamedTuple):
    """Hold the peak memory in bytes of each pass of a block; only memory that the pass has allocated counts.

    Attributes
    ----------
    forward : int
        In the forward pass, including the output.
    input : int
        In the backward pass for inputs, including the gradients of output and input.
    weights : int
        In the backward pass for weights.
    """

    forward: int
    input: int
    weights: int


class BlockTrial(NamedTuple):
    """Hold what was measured in a trial run of one block, or of the loss, on one micro-batch.

    Attributes
    ----------
    output, gradient : TreeForm or None
        Forms (structure, shapes and dtypes) of the output and of the input's gradient; ``gradient`` is None if the
        block computes none.
    passes : tuple of (int or None)
        For each array of the output, the index of the input array that it is or is a view of; None if there is none.
    saved : SavedMemory
        The arrays that the block keeps between its passes.
    peaks : PassPeaks
        The most memory that each pass allocates while it runs.
    calls : tuple of GroupCall
        The block's calls of its tensor and context group in the forward and backward pass.
    """

    output: TreeForm
    gradient: TreeForm | None
    passes: tuple[int | None, ...]
    saved: SavedMemory
    peaks: PassPeaks
    calls: tuple[GroupCall, ...]

    @property
    def is_loss(self) -> bool:
        """Tell whether this is the trial of the loss, which alone returns one number instead of an array of samples."""
        return self.output.structure == "*" and not self.output.shapes[0].dims

    @property
    def backward_peak(self) -> int:
        """The most bytes that a whole backward pass needs at any moment, in addition to ``saved.cached``."""
        ends = self.output.nbytes + (0 if self.gradient is None else self.gradient.nbytes)
        return max(self.peaks.input, self.saved.deferred - self.saved.cached + ends + self.peaks.weights)


#: Trials of blocks by name (which may be "" for a module that is one block), and the trial of the loss under None.
Trials = dict[str | None, BlockTrial]


@dataclass(frozen=True)
class TrialSample:
    """Hold one sample of the data, and the ``Run`` that blocks are given with it.

    Attributes
    ----------
    x, y : array
        Inputs and targets, of which only the first sample is used.
    run : Run
        The argument ``run`` of the blocks' forward passes.
    """

    x: Array
    y: Array
    run: Run

    def batch(self, samples: int) -> tuple[Array, Array]:
        """Return input and target of a batch that repeats the first sample ``samples`` times. Not collective."""
        return np.repeat(self.x[:1], samples, axis=0), np.repeat(self.y[:1], samples, axis=0)


class BlockTrials:
    """Run one block of each kind of a model, with the part of each block that one rank has ([Note: trials]).

    Parameters
    ----------
    blocks : mapping of str to Layer
        All blocks of the model, split over tensor and context group.
    loss : Loss
        The model's loss, split over tensor and context group.
    sample : TrialSample
        The sample that the first block is given.
    calls : list of GroupCall
        The list to which the groups append the calls of split layers and loss.
    dtype : numpy dtype
        The dtype of the parameters.
    extents : FieldExtents or None
        With a domain, the extents of whole fields; then each block is run, because blocks whose parts of fields have
        equal shapes may belong to whole fields of different extents.
    """

    def __init__(
        self,
        blocks: Mapping[str, Layer],
        loss: Loss,
        sample: TrialSample,
        calls: list[GroupCall],
        dtype: Any,
        *,
        extents: FieldExtents | None = None,
    ) -> None:
        self.blocks, self.loss, self.sample, self.calls, self.dtype = dict(blocks), loss, sample, calls, np.dtype(dtype)
        self.extents = extents
        self._tried: dict[tuple[str, TreeForm], BlockTrial] = {}
        self._warmed: set[str] = set()
        self._results: dict[int, Trials] = {}

    def of(self, samples: int) -> Trials:
        """Return the trial of each block by name, and of the loss under None, for ``samples`` samples.

        For more than three samples, bytes and messages are extrapolated from trials on two and three samples. If a
        block's group calls differ between these trials, all blocks are run on ``samples`` samples instead. Not
        collective.
        """
        if samples not in self._results:
            if samples <= FEW + 1:
                self._results[samples] = self._run(samples)
            else:
                some, more = self.of(FEW), self.of(FEW + 1)
                grown = {name: _grown(some[name], more[name], samples) for name in some}
                even = {name: trial for name, trial in grown.items() if trial is not None}
                self._results[samples] = even if len(even) == len(grown) else self._run(samples)
        return self._results[samples]

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the sample's input and target, and of all parameters."""
        parameters = [tuple(spec.shape for spec in layer.specs()) for layer in self.blocks.values()]
        return self.sample.x.shape, self.sample.y.shape, parameters

    def _run(self, samples: int) -> Trials:
        """Run one block of each kind on ``samples`` samples, zeros with the shape of the previous block's output.

        Returns the trials by block name, with the loss under None. The first block runs on copies of the real sample.
        """
        x, y = self.sample.batch(samples)
        value: Any = x
        form = TreeForm.of(x, "x")
        trials: Trials = {}
        for name, layer in self.blocks.items():
            kind = _kind(layer)
            key = (kind if self.extents is None else name, form)
            if key not in self._tried:
                start = _zeros(form) if value is None else value
                self._begin(name)
                try:
                    self._warm(layer, kind, partial(self._block, layer), start)
                    self._tried[key] = self._block(layer, start)
                except Exception as error:
                    raise ConfigError(
                        f"block {name!r} cannot be tried alone on an input of {form}: {type(error).__name__}: {error}"
                    ) from error
            trials[name] = self._tried[key]
            form, value = trials[name].output, None
        prediction = _zeros(form)
        self._begin(None)
        self._warm(self.loss, "", lambda arguments: self._loss(*arguments), (prediction, y))
        trials[None] = self._loss(prediction, y)
        return trials

    def _begin(self, block: str | None) -> None:
        if self.extents is not None:
            self.extents.begin(block)

    def _warm(self, computing: Any, kind: str, attempt: Callable[[Any], Any], argument: Any) -> None:
        """Call ``attempt``, a block's passes, with one sample before blocks of this kind are tried; measure nothing.

        In a first call, imports and compilation allocate memory that stays. A block whose attribute ``allocations``
        counts the memory of another library is called ``allocations.looks`` times before each trial, with all samples,
        because an adapter may check the block in that number of first calls, which takes memory.
        """
        if hasattr(computing, "allocations"):
            for _ in range(computing.allocations.looks):
                attempt(argument)
        elif kind not in self._warmed:
            self._warmed.add(kind)
            attempt(map_leaves(lambda array: array[:1], argument))

    def _block(self, layer: Layer, x: Any) -> BlockTrial:
        params, grads = self._parameters(layer)
        self.calls.clear()
        with watched(layer) as watch, np.errstate(all="ignore"):
            y, cache = layer.forward(params, x, self.sample.run)
            forward = watch.peak()
            into, out, outside = leaf_addresses(x), leaf_addresses(y), addresses((params, x))
            cached, saved = nbytes_outside(cache, outside | {*out}) + watch.foreign(out), addresses(cache)
            form = TreeForm.of(y, "the output")
            del y
            saved |= {address for address in out if watch.size_at(address)}  # kept by a graph of another library
            results = saved & {*out}
            watch.begin()
            dy = _zeros(form, gradient=True)
            dx, pending = layer.backward_input(params, cache, dy)
            half = watch.peak()
            deferred = nbytes_outside((cache, pending), outside | results | addresses(dx)) + watch.foreign(
                results | addresses(dx)
            )
            gradient = None if dx is None else TreeForm.of(dx, "the gradient of the input")
            del dx, dy
            watch.begin()
            layer.backward_weights(params, cache, pending, grads)
            peaks = PassPeaks(forward, half, watch.peak())
        memory = SavedMemory(cached, deferred, *(tuple(one in saved for one in side) for side in (into, out)))
        sources = {one: address for address, one in enumerate(into)}
        passes = tuple(sources.get(one) for one in out)
        return BlockTrial(form, gradient, passes, memory, peaks, tuple(self.calls))

    def _loss(self, prediction: Any, y: Array) -> BlockTrial:
        self.calls.clear()
        with watched(self.loss) as watch, np.errstate(all="ignore"):
            _, _, cache = self.loss.forward(prediction, y)
            forward = watch.peak()
            cached, saved = nbytes_outside(cache, addresses((prediction, y))) + watch.foreign(()), addresses(cache)
            watch.begin()
            gradient = TreeForm.of(self.loss.backward(cache), "the gradient of the prediction")
            peaks = PassPeaks(forward, watch.peak(), 0)
        memory = SavedMemory(cached, 0, tuple(one in saved for one in leaf_addresses(prediction)), (False,))
        number = TreeForm.of(np.float64(), "the loss")
        return BlockTrial(number, gradient, (None,), memory, peaks, tuple(self.calls))

    def _parameters(self, layer: Layer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a layer's parameters and gradients, nested by name.

        Parameters are zeros that occupy no memory while they are only read; gradients are uninitialized.
        """
        specs = layer.specs()
        starts = list(accumulate((spec.size for spec in specs), initial=0))
        placed, size = [(spec.name, start, spec) for spec, start in zip(specs, starts, strict=False)], starts[-1]
        params, grads = (made(size, self.dtype).view(FakeArray) for made in (np.zeros, np.empty))
        integers = nested(fresh_integers(layer))
        return united(views(params, placed), integers), united(views(grads, placed), integers)


def _kind(layer: Layer) -> str:
    """Return a text that is equal for blocks which differ only in the ``site`` of their dropouts."""
    return _SITE.sub("site", repr(layer))


def _grown(few: BlockTrial, more: BlockTrial, samples: int) -> BlockTrial | None:
    """Extrapolate two trials of a block to ``samples`` samples; None if its group calls do not grow linearly."""
    calls = _calls(few.calls, more.calls, samples)
    if calls is None:
        return None
    cached, deferred = (_line(getattr(few.saved, n), getattr(more.saved, n), samples) for n in ("cached", "deferred"))
    peaks = PassPeaks(*(max(0, _line(a, b, samples)) for a, b in zip(few.peaks, more.peaks, strict=True)))
    gradient = None
    if few.gradient is not None and more.gradient is not None:
        gradient = _form(few.gradient, more.gradient, samples)
    saved = more.saved._replace(cached=cached, deferred=deferred)
    return BlockTrial(_form(few.output, more.output, samples), gradient, more.passes, saved, peaks, calls)


def _line(few: int, more: int, samples: int) -> int:
    return few + (samples - FEW) * (more - few)


def _form(few: TreeForm, more: TreeForm, samples: int) -> TreeForm:
    dims = (zip(a.dims, b.dims, strict=True) for a, b in zip(few.shapes, more.shapes, strict=True))
    grown = (tuple(_line(a, b, samples) for a, b in axes) for axes in dims)
    shapes = tuple(ArrayShape(d, shape.dtype) for d, shape in zip(grown, more.shapes, strict=True))
    return replace(more, shapes=shapes)


def _zeros(form: TreeForm, *, gradient: bool = False) -> Any:
    """Return a tree of zeros; with ``gradient``, None stands for arrays of integers, which have no gradient."""
    present = [not gradient or np.dtype(shape.dtype).kind in "fc" for shape in form.shapes]
    return form.build([np.zeros(*shape) if keep else None for keep, shape in zip(present, form.shapes, strict=True)])


def _calls(few: Sequence[GroupCall], more: Sequence[GroupCall], samples: int) -> tuple[GroupCall, ...] | None:
    if [(c.axis, c.kind, c.sizes, c.itemsize) for c in few] != [(c.axis, c.kind, c.sizes, c.itemsize) for c in more]:
        return None
    return tuple(
        b._replace(unit=_line(a.unit, b.unit, samples), outer=_line(a.outer, b.outer, samples))
        for a, b in zip(few, more, strict=True)
    )


@dataclass(frozen=True)
class ShardSizes:
    """Compute the sizes of the shards into which a data group of ``parts`` ranks divides a layout.

    Attributes
    ----------
    layout : FlatLayout
        The parameters that one pipeline stage and tensor rank holds.
    parts : int
        Number of ranks of the data group.
    """

    layout: FlatLayout
    parts: int

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of each data rank."""
        return tuple(Shard(self.layout, rank, self.parts) for rank in range(self.parts))

    @cached_property
    def gradients(self) -> tuple[tuple[int, ...], ...]:
        """The number of gradient elements that a data rank owns in a unit, as ``gradients[rank][unit]``."""
        return tuple(tuple(sum(s.size for s in spans) for spans in shard.gradient_spans) for shard in self.shards)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """For each data rank, the number of its elements that an optimizer trains; a tied parameter counts once."""
        owned = (sum(spans[0].size for spans in shard.gradient_spans) for shard in self.shards)
        averaged = (sum(span.size for span, average in shard.gradient_kinds if average) for shard in self.shards)
        return tuple(count - average for count, average in zip(owned, averaged, strict=True))

    def gathered(self, rank: int, unit: Unit) -> tuple[int, ...]:
        """Return how many elements data rank ``rank`` sends in each message when ``unit`` is gathered. Not collective.

        The first message carries the unit's own parameters. Each further message carries a parameter that the unit uses
        but another unit owns, such as a token table that is both embedding and head.
        """
        spans = self.shards[rank].spans
        homes = [(entry, self.layout.by_name[str(entry.spec.tied)].unit) for entry in unit.aliases]
        return (spans[unit.index].size, *(entry.span.intersect(spans[home]).size for entry, home in homes))

    def squares(self, rank: int) -> int:
        """Count the partial sums of squares that data rank ``rank`` sends when a norm is computed. Not collective."""
        count = 0
        for unit, span in zip(self.layout.units, self.shards[rank].spans, strict=True):
            for entry in unit.entries:
                part = entry.span.intersect(span)
                if part.size and entry.spec.optimized and entry.spec.tied is None:
                    start = part.start - entry.offset
                    for rows in tile_rows(entry.spec):
                        covered = elements_within(rows, start, start + part.size)
                        count += len(cover(covered.start, covered.stop, rows.size))
        return count


@dataclass(frozen=True)
class ModelPart:
    """Describe one rank's part of a model; it is the same for all ranks of a data group with the same context rank.

    Attributes
    ----------
    partitioned : PartitionedModel
        The blocks on the rank's stage, and the cut of the whole model.
    trials : BlockTrials or None
        Trial runs of the blocks of all stages; None if they cannot be tried.
    untried : str
        Why the trials do not determine the memory of the blocks; "" if they do.
    length_calls : tuple of GroupCall
        The calls of the context group before a chunk's forward pass, which exchange the length of sequences.
    shape : tuple of int
        Shape of one whole sample.
    layouts : mapping of int to FlatLayout
        For every stage, the layout of the parameters that this tensor rank would hold there.
    parts : int
        Number of ranks of the data group.
    share : float
        The share of the positions of a field that the rank has; 1 without a domain.
    """

    partitioned: PartitionedModel
    trials: BlockTrials | None
    untried: str
    length_calls: tuple[GroupCall, ...]
    shape: tuple[int, ...]
    layouts: dict[int, FlatLayout]
    parts: int
    share: float = 1.0

    @classmethod
    def build(
        cls,
        model: Any,
        grid: PlannedGrid,
        parallel_layout: ParallelLayout,
        sample: TrialSample,
        row: Placement,
        minimum_unit: int,
        *,
        known: BlockTrials | None = None,
        extents: FieldExtents | None = None,
        tries: bool = True,
    ) -> ModelPart:
        """Return the part of the model that the rank of ``grid`` would hold in a run. Not collective.

        ``known`` are the :meth:`even_trials` of another part. If inputs and parameters of that part have the same
        shapes, its trials are used, and blocks are not run again. With a domain, ``extents`` are those that
        :func:`field_extents` returns. With ``tries=False`` no block is run at all.

        Raises
        ------
        ConfigError
            The model cannot be split over the tensor or context group, or cannot be cut into stages.
        """
        slab = Slab(Cut(parallel_layout.domain), grid.context.rank) if parallel_layout.domain else Slab()

        def group_for(group: Any) -> Any:
            if slab.cut is None or group is not grid.context_group:
                return group
            return RecordingDomain(slab.cut, slab.rank, grid.group_calls, extents or FieldExtents())

        partitioned = partition_model(model, cast("ProcessGrid", grid), parallel_layout, group_for)
        layouts = {
            stage: partitioned.layout(stage, one_unit=row.one_unit, minimum_unit=minimum_unit)
            for stage in range(grid.pipeline.size)
        }
        none = None, "no block has been run", ()
        tried = (partitioned, grid, sample, known if slab.cut is None else None)
        trials, untried, length_calls = _try_blocks(*tried, slab, extents) if tries else none
        first = SampleTree.of(x=sample.x).leaves[0]
        share = slab.of((first, first))[0].size / max(1, first.size)
        return cls(partitioned, trials, untried, length_calls, tuple(first.shape[1:]), layouts, grid.data.size, share)

    @cached_property
    def layout(self) -> FlatLayout:
        """The layout of the parameters on this part's stage."""
        return self.layouts[self.partitioned.stage]

    @cached_property
    def shards(self) -> ShardSizes:
        """The sizes of the shards of all ranks of this part's data group."""
        return ShardSizes(self.layout, self.parts)

    def blocks(self, chunk: int) -> tuple[str, ...]:
        """Return the names of the blocks of a chunk, which is counted from 0 in the whole model. Not collective."""
        return self.partitioned.cuts[chunk]

    @property
    def unseen(self) -> str:
        """Description of the memory that blocks take in another library and trials do not count; "" if none."""
        layers = getattr(self.partitioned.split, "blocks", {}).values()
        counters = (getattr(layer, "allocations", None) for layer in layers)
        return next((counter.unseen for counter in counters if counter is not None), "")

    @property
    def _trials(self) -> BlockTrials:
        assert self.trials is not None  # a model whose blocks cannot be tried is not split
        return self.trials

    def tried(self, chunk: int, samples: int) -> list[BlockTrial]:
        """Return the trial runs of a chunk's blocks, and of the loss if it is the last chunk. Not collective.

        ``samples`` is the number of samples of the micro-batch.
        """
        trials = self._trials.of(samples)
        names = [*self.blocks(chunk), *([None] if chunk == len(self.partitioned.cuts) - 1 else [])]
        return [trials[name] for name in names]

    def calls(self, chunk: int, samples: int) -> list[GroupCall]:
        """Return the calls of the tensor and context group for one micro-batch of ``samples`` samples on a chunk.

        Not collective.
        """
        return [*self.length_calls, *(call for trial in self.tried(chunk, samples) for call in trial.calls)]

    def output(self, chunk: int, samples: int) -> TreeForm:
        """Return structure, shapes and dtypes of a chunk's output for ``samples`` samples. Not collective."""
        return self._trials.of(samples)[self.blocks(chunk)[-1]].output

    def gradient(self, chunk: int, samples: int) -> TreeForm:
        """Return structure, shapes and dtypes of the gradient of a chunk's input, for ``samples`` samples.

        There is no array if the chunk's first block computes no such gradient. Not collective.
        """
        form = self._trials.of(samples)[self.blocks(chunk)[0]].gradient
        return TreeForm.of(None, "") if form is None else form

    @cached_property
    def operations(self) -> dict[str, Operations] | None:
        """For each block, the floating-point operations for one sample; None if a block does not count them."""
        shape: tuple[int, ...] = self.shape
        result: dict[str, Operations] = {}
        for name, layer in getattr(self.partitioned.split, "blocks", {}).items():
            if not isinstance(layer, nn.Layer) or not _counts(layer):
                return None
            try:
                counts = layer.operations(shape)
                result[name] = counts if self.share == 1 else Operations(*(round(n * self.share) for n in counts))
                shape = layer.output_shape(shape)
            except NotImplementedError:
                return None
        return result or None

    def work(self, chunk: int) -> Operations:
        """Return the floating-point operations of a chunk for one sample; 0 if blocks do not count them.

        Not collective.
        """
        counted = self.operations or {}
        return sum((counted.get(name, Operations()) for name in self.blocks(chunk)), Operations())

    def even_trials(self, samples: int) -> BlockTrials | None:
        """Return the trial runs if they hold for other ranks of the tensor and context group, too; else None.

        The trials hold for all ranks if no group call, with at most ``samples`` samples, cuts an array into unequal
        parts. Not collective.
        """
        if self.trials is None:
            return None
        tried = self.trials.of(min(FEW, samples)).values()
        return self.trials if all(len(set(call.sizes)) <= 1 for trial in tried for call in trial.calls) else None

    def on(self, stage: int) -> ModelPart:
        """Return the part that the same tensor and context rank holds on another stage. Not collective."""
        return replace(self, partitioned=replace(self.partitioned, stage=stage))


def _try_blocks(
    partitioned: PartitionedModel,
    grid: PlannedGrid,
    sample: TrialSample,
    known: BlockTrials | None,
    slab: Slab,
    extents: FieldExtents | None,
) -> tuple[BlockTrials | None, str, tuple[GroupCall, ...]]:
    """Return trials of blocks, why these do not determine memory ("" if they do), and group calls before blocks run.

    Not collective. The blocks of a split model must be tried, because their outputs are messages.

    Raises
    ------
    ConfigError
        If the model is split, and a block cannot be tried.
    """
    model = partitioned.split
    if not isinstance(model, BlockModel):
        return None, f"{type(model).__name__} is a black box: what its function allocates and computes is its own", ()
    try:
        if not all(isinstance(part, np.ndarray) for part in (sample.x, sample.y)):
            raise ConfigError("blocks cannot be tried alone on samples that are trees of arrays")
        local, length_calls = _local(sample, partitioned, grid)
        x, y = slab.of((local.x, local.y))
        local = replace(local, x=x, y=y)
        trials = BlockTrials(model.blocks, model.loss, local, grid.group_calls, model.dtype, extents=extents)
        if known is not None and known.shapes == trials.shapes:
            trials = known
        trials.of(FEW)
    except ConfigError as error:
        if partitioned.parallel_layout.pipeline > 1 or partitioned.splits_layers:
            raise
        return None, str(error), ()
    foreign = ((name, getattr(layer, "memory_of", "")) for name, layer in model.blocks.items())
    reason = next((f"block {name!r} keeps them in the memory of {whose}" for name, whose in foreign if whose), "")
    return trials, reason, length_calls


def field_extents(model: BlockModel, axes: int, sample: TrialSample) -> FieldExtents:
    """Run each block of a model once, on whole fields with ``axes`` axes of space, to know how large its fields are.

    Not collective.

    Raises
    ------
    ConfigError
        If a block cannot be split over a domain, or cannot be tried.
    """
    extents, cut, calls = FieldExtents(), Cut((1,) * axes), list[GroupCall]()
    whole = domain_model(model, cut, RecordingDomain(cut, 0, calls, extents))
    BlockTrials(whole.blocks, whole.loss, sample, calls, whole.dtype, extents=extents).of(1)
    return extents


def _counts(layer: nn.Layer) -> bool:
    """Tell whether a layer's count of operations is reliable.

    The count is unreliable if a user's layer has a matrix but keeps the default count of :class:`~mpizero.nn.Layer`,
    which assumes a layer without matrix products.
    """
    is_users = not type(layer).__module__.startswith("mpizero.nn.")
    if is_users and type(layer).operations is not nn.Layer.operations:
        return True
    if children := layer.children():
        return all(_counts(child) for child in children.values())
    return not (is_users and any(len(spec.shape) > 1 for spec in layer.specs()))


def _local(
    sample: TrialSample, partitioned: PartitionedModel, grid: PlannedGrid
) -> tuple[TrialSample, tuple[GroupCall, ...]]:
    """Return the part of a sample that a rank's first block is given, and the group calls made before the blocks run.

    Not collective.
    """
    x, y, run = sample.x[:1], sample.y[:1], sample.run
    length = x.shape[1] if partitioned.cuts_sequences else 0
    x, y = partitioned.cut_batch(x, y)
    grid.group_calls.clear()
    with suppress(DataError):  # a context group asks for lengths, and there are no other ranks
        partitioned.run_on(x, run)
    length_calls = tuple(grid.group_calls)
    return TrialSample(x, y, partitioned.run_on(x, replace(run, length=length))), length_calls


class _BorderArray(NamedTuple):
    """Describe an array that blocks pass on: the first border that it crosses, its index there, its bytes.

    A border ([Note: borders]) is the place between two blocks; the index counts the arrays that cross it together.
    """

    border: int
    position: int
    nbytes: int


def _bytes_of(arrays: Iterable[_BorderArray], border: int) -> int:
    """Return the bytes of those ``arrays`` that cross ``border``, but none before it; each array counts once."""
    return sum(array.nbytes for array in frozenset(arrays) if array.border == border)


@dataclass(frozen=True)
class ChunkActivations:
    """Compute the memory that one micro-batch needs on a chunk, from trial runs of the chunk's blocks.

    [Note: borders] A border is the place between two neighbouring blocks of a chunk, before the first one, or after the
    last one. What one block passes to the next crosses it: an array, or the arrays of a tree. Each array is counted
    once, at the first border that it crosses, and stays in memory as long as one of the blocks keeps it. The input of
    the model's first block is not counted; it belongs to the data.

    Attributes
    ----------
    trials : tuple of BlockTrial
        The results of the trial runs of the chunk's blocks. For the model's last chunk, the result of the loss follows.
    entry : TreeForm or None
        The chunk's input; None if it is not counted.
    """

    trials: tuple[BlockTrial, ...]
    entry: TreeForm | None

    @cached_property
    def _arrays(self) -> tuple[tuple[_BorderArray, ...], ...]:
        """For each border (place before the first block, or after a block), the arrays that blocks pass across it."""
        count = len(self.trials[0].saved.input)
        sizes = [0] * count if self.entry is None else [shape.nbytes for shape in self.entry.shapes]
        borders = [tuple(_BorderArray(0, index, size) for index, size in enumerate(sizes))]
        for number, trial in enumerate(self.trials, 1):
            sources = zip(trial.passes, trial.output.shapes, strict=True)
            borders.append(
                tuple(
                    _BorderArray(number, index, shape.nbytes) if source is None else borders[-1][source]
                    for index, (source, shape) in enumerate(sources)
                )
            )
        return tuple(borders)

    @cached_property
    def _borders(self) -> tuple[int, ...]:
        """For each border (place before or after a block), the bytes of arrays that cross it but no earlier border."""
        return tuple(_bytes_of(arrays, number) for number, arrays in enumerate(self._arrays))

    @cached_property
    def _saved_borders(self) -> tuple[int, ...]:
        """For each border (place before or after a block), the bytes of kept arrays that cross no border before it."""
        return self._borders_saved_by(self.trials)

    def _borders_saved_by(self, trials: Sequence[BlockTrial]) -> tuple[int, ...]:
        saved = {array for number, trial in enumerate(trials) for array in self._saved_by(number, trial)}
        return tuple(_bytes_of(saved, number) for number in range(len(self._arrays)))

    def _saved_by(self, number: int, trial: BlockTrial) -> set[_BorderArray]:
        """Return those arrays of the input and the output of block ``number`` that its cache kept in ``trial``."""
        sides = zip(self._arrays[number : number + 2], (trial.saved.input, trial.saved.output), strict=True)
        return {array for arrays, saved in sides for array, keeps in zip(arrays, saved, strict=True) if keeps}

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that the chunk keeps from its forward pass to its backward pass."""
        return sum(trial.saved.cached for trial in self.trials) + sum(self._saved_borders)

    @cached_property
    def deferred(self) -> int:
        """Bytes that the chunk keeps from its backward pass for inputs to its backward pass for weights."""
        blocks = [trial for trial in self.trials if not trial.is_loss]
        return sum(trial.saved.deferred for trial in blocks) + sum(self._borders_saved_by(blocks))

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        """For each block, the bytes that all blocks before it keep, except its input; last, those of all blocks."""
        each = (trial.saved.cached + border for trial, border in zip(self.trials, self._saved_borders, strict=False))
        return tuple(accumulate(each, initial=0))

    @cached_property
    def forward_peak(self) -> int:
        """The most bytes that the chunk needs at any moment of the forward pass."""
        parts = zip(self._levels, self._borders, self.trials, strict=False)
        return max(level + border + trial.peaks.forward for level, border, trial in parts)

    @cached_property
    def backward_peak(self) -> int:
        """The most bytes that the chunk needs at any moment of a whole backward pass.

        Each block frees its cache at the end of its own backward pass.
        """
        parts = enumerate(zip(self._levels[1:], self.trials, strict=True))
        return max(
            level + _bytes_of(self._saved_by(number, trial), number + 1) + trial.backward_peak
            for number, (level, trial) in parts
        )

    @cached_property
    def input_peak(self) -> int:
        """The most bytes that the chunk needs at any moment of the backward pass for inputs.

        During this pass each block's cache is replaced by what the block keeps for the backward pass for weights.
        """
        more = accumulate((t.saved.deferred - t.saved.cached for t in reversed(self.trials)), initial=0)
        peaks = (extra + trial.peaks.input for extra, trial in zip(more, reversed(self.trials), strict=False))
        return self.saved_bytes + max(peaks)

    @cached_property
    def weights_peak(self) -> int:
        """The most bytes that the chunk needs at any moment of the backward pass for weights."""
        return self.deferred + max(trial.peaks.weights for trial in self.trials)

    @property
    def ends(self) -> int:
        """Bytes of the model's prediction and of the arrays that the loss keeps."""
        return self._borders[-2] + self.trials[-1].saved.cached

    def peak(self, kind: str) -> int:
        """Return the most bytes that an instruction needs at any moment for this micro-batch. Not collective.

        ``kind`` is "forward", "backward", "backward_input" or "backward_weights".
        """
        result: int = getattr(self, f"{kind.removeprefix('backward_')}_peak")
        return result


class ActivationPeaks(NamedTuple):
    """Hold the largest amounts of memory that a rank needs for its micro-batches at any moment of a step.

    Attributes
    ----------
    saved : int
        The most bytes that are kept for backward passes.
    caches : int
        The most caches that are kept at the same time. A cache is what the forward pass of one micro-batch through one
        chunk keeps for the backward pass.
    most : int
        The most bytes in use while a block runs: those kept for backward passes, and those of the block.
    total : int
        The most bytes in use, including those of messages in flight.
    """

    saved: int
    caches: int
    most: int
    total: int


class StageActivations:
    """Simulate how one rank's memory changes with the instructions of a step.

    Parameters
    ----------
    part : ModelPart
        The rank's part of the model.
    jobs : sequence of int
        The number of samples in each of the rank's micro-batches; 0 for a micro-batch that only other replicas have.
    program : sequence of Instruction
        The forward and backward passes of the micro-batches, in order.
    """

    def __init__(self, part: ModelPart, jobs: Sequence[int], program: Sequence[Instruction]) -> None:
        self.part, self.jobs, self.program = part, jobs, program
        self._chunks: dict[tuple[int, int], ChunkActivations] = {}

    def chunk(self, chunk: int, samples: int) -> ChunkActivations:
        """Return the memory that a micro-batch of ``samples`` samples needs on a chunk. Not collective."""
        if (chunk, samples) not in self._chunks:
            entry = self.part.output(chunk - 1, samples) if chunk else None
            self._chunks[chunk, samples] = ChunkActivations(tuple(self.part.tried(chunk, samples)), entry)
        return self._chunks[chunk, samples]

    @cached_property
    def peaks(self) -> ActivationPeaks:
        """The largest amounts of memory that the micro-batches need at any moment of a step."""
        if self.part.trials is None:
            return ActivationPeaks(0, 0, 0, 0)
        saved: dict[tuple[int, int], int] = {}
        peak = caches = most = total = 0
        alone = self.part.partitioned.parallel_layout.pipeline == 1
        for number, (kind, chunk, micro) in enumerate(self.program):
            if not self.jobs[micro]:
                continue
            flow = self.chunk(chunk, self.jobs[micro])
            others = sum(size for key, size in saved.items() if key != (chunk, micro))
            # Without a pipeline, prediction and loss live until the backward pass ends.
            in_use = others + flow.peak(kind) + (flow.ends if alone and kind == "backward" else 0)
            if kind == "forward":
                saved[chunk, micro] = flow.saved_bytes
                caches = max(caches, len(saved))
            elif kind == "backward_input":
                saved[chunk, micro] = flow.deferred
            else:
                del saved[chunk, micro]
            peak = max(peak, sum(saved.values()))
            most, total = max(most, peak, in_use), max(total, peak, in_use + self._messages(number))
        return ActivationPeaks(0, caches, 0, 0) if self.part.untried else ActivationPeaks(peak, caches, most, total)

    def _messages(self, number: int) -> int:
        """Return the bytes of messages in flight while instruction number ``number`` runs.

        Messages in flight are the receives that are posted early, and the send of the previous instruction.
        """
        if self.part.partitioned.parallel_layout.pipeline == 1:
            return 0
        ahead = sum(self._moved(instruction, -1) for instruction in self.program[number + 1 : number + AHEAD])
        return ahead + (self._moved(self.program[number - 1], 1) if number else 0)

    def _moved(self, instruction: Instruction, way: int) -> int:
        """Return the bytes that an instruction receives from another stage (``way`` is -1) or sends to another (1)."""
        kind, chunk, micro = instruction
        samples, stages, forward = self.jobs[micro], self.part.partitioned.parallel_layout.chunks, kind == "forward"
        other = chunk + way if forward else chunk - way
        source = other if way < 0 else chunk
        if not samples or kind == "backward_weights" or not 0 <= other < len(stages):
            return 0
        if stages[other] == self.part.partitioned.stage:
            return 0
        return (self.part.output(source, samples) if forward else self.part.gradient(source, samples)).nbytes
