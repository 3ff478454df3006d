"""Try the blocks of a model one at a time: what each keeps for its backward pass, sends to its group, and puts out.

[Note: trials] No formula knows what a user's layer keeps, so each kind of block (equal but for the number of its
dropout) runs forward and backward once, on one and on two samples, alone, with parameters of zero in memory that is
freed afterwards. What it keeps and sends is taken to grow evenly with the samples; where its calls show that it does
not, the block runs on the real micro-batch.
"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from mpizero.errors import ConfigError
from mpizero.layout.flat import views
from mpizero.parallel.costs.calls import Call, RecordingGroup
from mpizero.types import Array, Layer, Loss, Run

#: Where dropout numbers stand in a layer's text.
_SITE = re.compile(r"\bsite=\d+")


class Form(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @classmethod
    def of(cls, array: Array) -> Form:
        """Return the form of ``array``. Not collective."""
        return cls(tuple(array.shape), array.dtype.name)


class Kept(NamedTuple):
    """What lives between the passes of a block.

    Attributes
    ----------
    own : int
        Bytes of the arrays in the cache that the block has made and does not put out.
    input, output : bool
        Whether the cache keeps the block's input and output alive.
    deferred : int
        Bytes that live between input half and weight half, in place of ``own``.
    working : int
        Bytes more than that which the passes take at most while they run, output and gradients of the input included.
    """

    own: int
    input: bool
    output: bool
    deferred: int
    working: int


class Trial(NamedTuple):
    """What one block, or the loss, does with one micro-batch.

    Attributes
    ----------
    output, gradient : Form or None
        Of the output, and of the input's gradient; None where there is none.
    passes : bool
        Whether the output is (a view of) the input.
    kept : Kept
        What it keeps.
    forward, backward : tuple of Call
        What it calls its group for.
    """

    output: Form
    gradient: Form | None
    passes: bool
    kept: Kept
    forward: tuple[Call, ...]
    backward: tuple[Call, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of both passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Sample:
    """One sample as the data give it, and what a forward pass is told of a batch of them.

    Attributes
    ----------
    x, y : array
        One sample each, with its first axis.
    run : Run
        What blocks are told.
    """

    x: Array
    y: Array
    run: Run

    def batch(self, samples: int) -> tuple[Array, Array]:
        """Return the sample so many times. Not collective."""
        return np.repeat(self.x[:1], samples, axis=0), np.repeat(self.y[:1], samples, axis=0)


class Trials:
    """Tries of the blocks of one rank's part of a model.

    Parameters
    ----------
    blocks : mapping of str to Layer
        All blocks of the model, split over ``group``.
    loss : Loss
        Its loss, split likewise.
    sample : Sample
        What the first block is given.
    group : RecordingGroup
        What split layers call.
    dtype : numpy dtype
        Of the parameters.
    """

    def __init__(
        self, blocks: Mapping[str, Layer], loss: Loss, sample: Sample, group: RecordingGroup, dtype: Any
    ) -> None:
        self.blocks, self.loss, self.sample, self.group, self.dtype = dict(blocks), loss, sample, group, np.dtype(dtype)
        self._tried: dict[tuple[Any, ...], Trial] = {}
        self._found: dict[int, dict[str, Trial]] = {}

    def of(self, samples: int) -> dict[str, Trial]:
        """Return the trial of every block, and of the loss under the name "", for so many samples. Not collective."""
        if samples not in self._found:
            if samples <= 2:
                self._found[samples] = self._run(samples)
            else:
                once, twice = self.of(1), self.of(2)
                grown = {name: _grown(once[name], twice[name], samples) for name in once}
                even = {name: trial for name, trial in grown.items() if trial is not None}
                self._found[samples] = even if len(even) == len(grown) else self._run(samples)
        return self._found[samples]

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes of what one sample gives the first block, and of all parameters."""
        parameters = [tuple(spec.shape for spec in layer.specs()) for layer in self.blocks.values()]
        return self.sample.x.shape, self.sample.y.shape, parameters

    def _run(self, samples: int) -> dict[str, Trial]:
        """Try every kind of block on so many samples, each on the output of the one before."""
        x, y = self.sample.batch(samples)
        value: Any = x
        found: dict[str, Trial] = {}
        for name, layer in self.blocks.items():
            form = Form.of(value) if isinstance(value, np.ndarray) else value
            key = (_kind(layer), form)
            if key not in self._tried:
                start = value if isinstance(value, np.ndarray) else np.zeros(form.shape, form.dtype)
                try:
                    self._tried[key] = self._block(layer, start)
                except Exception as error:
                    raise ConfigError(
                        f"block {name!r} cannot be tried alone on an input of {form.dtype}{list(form.shape)}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            found[name] = self._tried[key]
            value = found[name].output
        prediction = np.zeros(value.shape, value.dtype)
        found[""] = self._loss(prediction, y)
        return found

    def _block(self, layer: Layer, x: Array) -> Trial:
        params, grads = self._parameters(layer)
        borrowed = _owners(params)
        with _watched() as watch, np.errstate(all="ignore"):
            self.group.calls.clear()
            y, cache = layer.forward(params, x, self.sample.run)
            forward = tuple(self.group.calls)
            held = _arrays(cache)
            first, last = _owner(x), _owner(y)
            own = sum(_owner(a).nbytes for a in held if id(_owner(a)) not in {*borrowed, id(first), id(last)})
            kept = {id(_owner(a)) for a in held}
            watch.mark()
            self.group.calls.clear()
            form, passes = Form.of(y), first is last
            dy = np.zeros(y.shape, y.dtype)
            del y, held
            dx, pending = layer.backward_input(params, cache, dy)
            skipped = {*borrowed, id(first), id(last), *((id(_owner(dx)),) if dx is not None else ())}
            later = sum(_owner(a).nbytes for a in _arrays((cache, pending)) if id(_owner(a)) not in skipped)
            layer.backward_weights(params, cache, pending, grads)
            backward = tuple(self.group.calls)
        gradient = None if dx is None else Form.of(dx)
        passed = Kept(own, id(first) in kept, id(last) in kept, later, max(0, watch.peak - own))
        return Trial(form, gradient, passes, passed, forward, backward)

    def _loss(self, prediction: Array, y: Array) -> Trial:
        with _watched() as watch, np.errstate(all="ignore"):
            self.group.calls.clear()
            _, _, cache = self.loss.forward(prediction, y)
            calls = tuple(self.group.calls)
            mine = {id(_owner(prediction)), id(_owner(y))}
            own = sum(_owner(a).nbytes for a in _arrays(cache) if id(_owner(a)) not in mine)
            keeps = id(_owner(prediction)) in {id(_owner(a)) for a in _arrays(cache)}
            watch.mark()
            self.group.calls.clear()
            gradient = self.loss.backward(cache)
            backward = tuple(self.group.calls)
        kept = Kept(own, keeps, False, own, max(0, watch.peak - own))
        return Trial(Form((), "float64"), Form.of(gradient), False, kept, calls, backward)

    def _parameters(self, layer: Layer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return parameters of zero, which take no memory while they are only read, and room for gradients."""
        specs = [(spec.name, spec.shape, spec.size) for spec in layer.specs()]
        size = sum(count for _, _, count in specs)
        starts = np.concatenate([[0], np.cumsum([count for _, _, count in specs])]).tolist()
        placed = [(name, start, shape) for (name, shape, _), start in zip(specs, starts, strict=False)]
        return views(np.zeros(size, self.dtype), placed), views(np.empty(size, self.dtype), placed)


def _kind(layer: Layer) -> str:
    """Return a text that is the same for blocks which differ in the numbers of their dropouts only."""
    return _SITE.sub("site", repr(layer))


def _grown(once: Trial, twice: Trial, samples: int) -> Trial | None:
    """Continue what one and two samples take to more; None if it does not grow evenly."""
    forward, backward = (
        _calls(a, b, samples) for a, b in ((once.forward, twice.forward), (once.backward, twice.backward))
    )
    if forward is None or backward is None:
        return None
    own, deferred, working = (
        getattr(once.kept, name) + (samples - 1) * (getattr(twice.kept, name) - getattr(once.kept, name))
        for name in ("own", "deferred", "working")
    )
    kept = Kept(own, twice.kept.input, twice.kept.output, deferred, max(0, working))
    output = _form(once.output, twice.output, samples)
    gradient = None
    if once.gradient is not None and twice.gradient is not None:
        gradient = _form(once.gradient, twice.gradient, samples)
    return Trial(output, gradient, twice.passes, kept, forward, backward)


def _form(once: Form, twice: Form, samples: int) -> Form:
    return Form(tuple(a + (samples - 1) * (b - a) for a, b in zip(once.shape, twice.shape, strict=True)), twice.dtype)


def _calls(once: Sequence[Call], twice: Sequence[Call], samples: int) -> tuple[Call, ...] | None:
    if [(c.kind, c.sizes, c.itemsize) for c in once] != [(c.kind, c.sizes, c.itemsize) for c in twice]:
        return None
    return tuple(
        b._replace(unit=a.unit + (samples - 1) * (b.unit - a.unit), outer=a.outer + (samples - 1) * (b.outer - a.outer))
        for a, b in zip(once, twice, strict=True)
    )


class _Watch:
    """The most memory that Python and NumPy have taken since the start, in bytes."""

    def __init__(self) -> None:
        self._start = tracemalloc.get_traced_memory()[0]
        self.peak = 0

    def mark(self) -> None:
        """Note the peak so far. Not collective."""
        self.peak = max(self.peak, tracemalloc.get_traced_memory()[1] - self._start)


@contextmanager
def _watched() -> Iterator[_Watch]:
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    tracemalloc.reset_peak()
    watch = _Watch()
    try:
        yield watch
        watch.mark()
    finally:
        if not already:
            tracemalloc.stop()


def _owner(array: Array) -> Array:
    """Return the array that owns an array's memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _owners(tree: Any) -> frozenset[int]:
    return frozenset(id(_owner(array)) for array in _arrays(tree))


def _arrays(value: Any) -> list[Array]:
    """List the arrays in nested containers, one for each owner of memory."""
    found: dict[int, Array] = {}
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, np.ndarray):
            found.setdefault(id(_owner(item)), item)
        elif id(item) not in seen:
            seen.add(id(item))
            left += _inside(item)
    return list(found.values())


def _inside(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in fields(item)]
    if isinstance(item, RecordingGroup | type) or callable(item):
        return []
    return list(getattr(item, "__dict__", {}).values())
