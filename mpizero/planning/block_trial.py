"""Run the blocks of a model one at a time, to measure the memory, the group calls and the output of each.

[Note: trials] No formula knows what a user's layer keeps. So one block of each kind runs forward and backward alone, on
two samples and again on three. (Not on one: an array of one sample may be contiguous where one of several is not.)
Blocks that differ only in the ``site`` of their dropouts are of one kind. Parameters are zeros, in memory that is freed
afterwards; matrix products with them are not computed. Memory and messages are assumed to grow linearly with the number
of samples. If a block's group calls show that they do not, the blocks run on as many samples as the real micro-batch
has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import map_leaves
from mpizero.comm.p2p import ArrayShape, TreeForm
from mpizero.errors import ConfigError
from mpizero.layout.flat import nested, united, views
from mpizero.nn.layer import fresh_integers
from mpizero.planning.byte_counts import GroupCall
from mpizero.planning.fake_array import FakeArray
from mpizero.planning.traced_memory import held, leaf_places, places, watched
from mpizero.types import Array, Layer, Loss, Run

#: Number of samples in the smaller of the two trials.
FEW = 2
#: Matches the number of a dropout in a layer's ``repr``.
_SITE = re.compile(r"\bsite=\d+")


class KeptMemory(NamedTuple):
    """Describe the arrays that a block keeps between its passes.

    Attributes
    ----------
    own : int
        Bytes of the arrays in the cache that are neither the block's input nor its output nor parameters.
    deferred : int
        Bytes of such arrays that the block keeps from the backward pass for inputs to that for weights.
    input, output : tuple of bool
        For each array of the block's input, and of its output, whether the cache keeps it.
    """

    own: int
    deferred: int
    input: tuple[bool, ...]
    output: tuple[bool, ...]


class PassPeaks(NamedTuple):
    """Hold, for each pass of a block, the most bytes in use at once that were allocated since the pass began.

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
        Forms of the output and of the input's gradient; ``gradient`` is None if the block computes none.
    passes : tuple of (int or None)
        For each array of the output: the number of the array of the input that it is, or is a view of; else None.
    kept : KeptMemory
        The arrays that the block keeps between its passes.
    peaks : PassPeaks
        The most memory that each pass allocates while it runs.
    calls : tuple of GroupCall
        The block's calls of its tensor and context group in the forward and backward pass.
    """

    output: TreeForm
    gradient: TreeForm | None
    passes: tuple[int | None, ...]
    kept: KeptMemory
    peaks: PassPeaks
    calls: tuple[GroupCall, ...]

    @property
    def is_loss(self) -> bool:
        """Tell whether this is the trial of the loss, which alone returns one number instead of an array of samples."""
        return self.output.structure == "*" and not self.output.shapes[0].dims

    @property
    def backward_peak(self) -> int:
        """The most bytes that a whole backward pass needs at once, in addition to ``kept.own``."""
        ends = self.output.nbytes + (0 if self.gradient is None else self.gradient.nbytes)
        return max(self.peaks.input, self.kept.deferred - self.kept.own + ends + self.peaks.weights)


#: Trials by the name of the block, which may be "" for a module that is one block; that of the loss under None.
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
    """Run the blocks of a model as one rank has them, one block of each kind ([Note: trials]).

    Parameters
    ----------
    blocks : mapping of str to Layer
        All blocks of the model, split over tensor and context group.
    loss : Loss
        The model's loss, split over these groups.
    sample : TrialSample
        The sample that the first block is given.
    calls : list of GroupCall
        The list to which the groups append the calls of split layers and loss.
    dtype : numpy dtype
        The dtype of the parameters.
    """

    def __init__(
        self, blocks: Mapping[str, Layer], loss: Loss, sample: TrialSample, calls: list[GroupCall], dtype: Any
    ) -> None:
        self.blocks, self.loss, self.sample, self.calls, self.dtype = dict(blocks), loss, sample, calls, np.dtype(dtype)
        self._tried: dict[tuple[str, TreeForm], BlockTrial] = {}
        self._warmed: set[str] = set()
        self._found: dict[int, Trials] = {}

    def of(self, samples: int) -> Trials:
        """Return the trial of each block by name, and of the loss under None, for ``samples`` samples.

        For more than three samples, bytes and messages are extrapolated from trials on two and three samples. If a
        block makes other group calls in the one than in the other, all blocks are run on ``samples`` samples instead.
        Not collective.
        """
        if samples not in self._found:
            if samples <= FEW + 1:
                self._found[samples] = self._run(samples)
            else:
                some, more = self.of(FEW), self.of(FEW + 1)
                grown = {name: _grown(some[name], more[name], samples) for name in some}
                even = {name: trial for name, trial in grown.items() if trial is not None}
                self._found[samples] = even if len(even) == len(grown) else self._run(samples)
        return self._found[samples]

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the sample's input and target, and of all parameters."""
        parameters = [tuple(spec.shape for spec in layer.specs()) for layer in self.blocks.values()]
        return self.sample.x.shape, self.sample.y.shape, parameters

    def _run(self, samples: int) -> Trials:
        """Run one block of each kind on ``samples`` samples, on zeros of the shape that the block before returned.

        Returns the trials by block name, with the loss under None. The first block runs on the sample itself.
        """
        x, y = self.sample.batch(samples)
        value: Any = x
        form = TreeForm.of(x, "x")
        found: Trials = {}
        for name, layer in self.blocks.items():
            key = (_kind(layer), form)
            if key not in self._tried:
                start = _zeros(form) if value is None else value
                try:
                    self._warm(layer, key[0], partial(self._block, layer), start)
                    self._tried[key] = self._block(layer, start)
                except Exception as error:
                    raise ConfigError(
                        f"block {name!r} cannot be tried alone on an input of {form}: {type(error).__name__}: {error}"
                    ) from error
            found[name] = self._tried[key]
            form, value = found[name].output, None
        prediction = _zeros(form)
        self._warm(self.loss, "", lambda given: self._loss(*given), (prediction, y))
        found[None] = self._loss(prediction, y)
        return found

    def _warm(self, computing: Any, kind: str, attempt: Callable[[Any], Any], given: Any) -> None:
        """Call ``attempt`` before the first trial of blocks of this kind, with one sample, without measuring it.

        In a first call, imports and compilation allocate memory that stays. A block that counts another library's
        memory is called with all samples, before each trial, until it is not looked at any more.
        """
        if hasattr(computing, "allocations"):
            for _ in range(computing.allocations.looks):
                attempt(given)
        elif kind not in self._warmed:
            self._warmed.add(kind)
            attempt(map_leaves(lambda array: array[:1], given))

    def _block(self, layer: Layer, x: Any) -> BlockTrial:
        params, grads = self._parameters(layer)
        self.calls.clear()
        with watched(layer) as watch, np.errstate(all="ignore"):
            y, cache = layer.forward(params, x, self.sample.run)
            forward = watch.peak()
            into, out, given = leaf_places(x), leaf_places(y), places((params, x))
            own, kept = held(cache, given | {*out}) + watch.foreign(out), places(cache)
            form = TreeForm.of(y, "the output")
            del y
            kept |= {place for place in out if watch.size_at(place)}  # a graph of another library keeps them
            results = kept & {*out}
            watch.begin()
            dy = _zeros(form, gradient=True)
            dx, pending = layer.backward_input(params, cache, dy)
            half = watch.peak()
            deferred = held((cache, pending), given | results | places(dx)) + watch.foreign(results | places(dx))
            gradient = None if dx is None else TreeForm.of(dx, "the gradient of the input")
            del dx, dy
            watch.begin()
            layer.backward_weights(params, cache, pending, grads)
            peaks = PassPeaks(forward, half, watch.peak())
        memory = KeptMemory(own, deferred, *(tuple(one in kept for one in side) for side in (into, out)))
        sources = {one: place for place, one in enumerate(into)}
        passes = tuple(sources.get(one) for one in out)
        return BlockTrial(form, gradient, passes, memory, peaks, tuple(self.calls))

    def _loss(self, prediction: Any, y: Array) -> BlockTrial:
        self.calls.clear()
        with watched(self.loss) as watch, np.errstate(all="ignore"):
            _, _, cache = self.loss.forward(prediction, y)
            forward = watch.peak()
            own, kept = held(cache, places((prediction, y))) + watch.foreign(()), places(cache)
            watch.begin()
            gradient = TreeForm.of(self.loss.backward(cache), "the gradient of the prediction")
            peaks = PassPeaks(forward, watch.peak(), 0)
        memory = KeptMemory(own, 0, tuple(one in kept for one in leaf_places(prediction)), (False,))
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
    """Extrapolate trials on ``FEW`` and on ``FEW + 1`` samples to ``samples``; None if calls do not grow linearly."""
    calls = _calls(few.calls, more.calls, samples)
    if calls is None:
        return None
    own, deferred = (_line(getattr(few.kept, n), getattr(more.kept, n), samples) for n in ("own", "deferred"))
    peaks = PassPeaks(*(max(0, _line(a, b, samples)) for a, b in zip(few.peaks, more.peaks, strict=True)))
    gradient = None
    if few.gradient is not None and more.gradient is not None:
        gradient = _form(few.gradient, more.gradient, samples)
    kept = more.kept._replace(own=own, deferred=deferred)
    return BlockTrial(_form(few.output, more.output, samples), gradient, more.passes, kept, peaks, calls)


def _line(few: int, more: int, samples: int) -> int:
    return few + (samples - FEW) * (more - few)


def _form(few: TreeForm, more: TreeForm, samples: int) -> TreeForm:
    dims = (zip(a.dims, b.dims, strict=True) for a, b in zip(few.shapes, more.shapes, strict=True))
    grown = (tuple(_line(a, b, samples) for a, b in axes) for axes in dims)
    shapes = tuple(ArrayShape(d, shape.dtype) for d, shape in zip(grown, more.shapes, strict=True))
    return replace(more, shapes=shapes)


def _zeros(form: TreeForm, *, gradient: bool = False) -> Any:
    """Return a tree of zeros; with ``gradient`` it has None in place of whole numbers, which have no gradient."""
    kept = [not gradient or np.dtype(shape.dtype).kind in "fc" for shape in form.shapes]
    return form.build([np.zeros(*shape) if keep else None for keep, shape in zip(kept, form.shapes, strict=True)])


def _calls(few: Sequence[GroupCall], more: Sequence[GroupCall], samples: int) -> tuple[GroupCall, ...] | None:
    if [(c.axis, c.kind, c.sizes, c.itemsize) for c in few] != [(c.axis, c.kind, c.sizes, c.itemsize) for c in more]:
        return None
    return tuple(
        b._replace(unit=_line(a.unit, b.unit, samples), outer=_line(a.outer, b.outer, samples))
        for a, b in zip(few, more, strict=True)
    )
