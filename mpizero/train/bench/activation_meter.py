"""Count the bytes that a model's blocks keep from forward to the backward pass, while a rank trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm import CommunicatorGroup
from mpizero.parallel.engine import Engine
from mpizero.parallel.execution.pipeline import PipelineRunner
from mpizero.types import Array


class CacheMeter:
    """Count the bytes of all caches that are alive; a buffer counts once, however many views of it are kept.

    Attributes
    ----------
    held, peak : int
        Bytes of the buffers counted now, and the largest number so far.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._buffers: dict[int, tuple[int, int]] = {}

    def keep(self, kept: object, but: Iterable[object] = ()) -> tuple[Array, ...]:
        """Count the buffers of ``kept`` but not those of ``but``, and return them, to be given to :meth:`drop`."""
        skipped = {id(array) for value in but for array in buffers(value)}
        found = tuple(array for array in buffers(kept) if id(array) not in skipped)
        for array in found:
            uses, size = self._buffers.get(id(array), (0, array.nbytes))
            self._buffers[id(array)] = uses + 1, size
            self.held += 0 if uses else size
        self.peak = max(self.peak, self.held)
        return found

    def drop(self, found: Iterable[Array]) -> None:
        """Stop counting the buffers that :meth:`keep` returned."""
        for array in found:
            uses, size = self._buffers.pop(id(array))
            if uses > 1:
                self._buffers[id(array)] = uses - 1, size
            else:
                self.held -= size


class _Kept(NamedTuple):
    """Hold a block's cache and the buffers in it, so that the buffers stay alive while they are counted."""

    cache: Any
    found: tuple[Array, ...]


class _MeteredLayer:
    """Wrap a layer and count its caches; with ``skip_input`` the layer's input, the samples, is not counted."""

    def __init__(self, layer: Any, meter: CacheMeter, *, skip_input: bool) -> None:
        self.layer, self.meter, self.skip_input = layer, meter, skip_input

    def forward(self, params: Any, x: Any, run: Any) -> tuple[Any, Any]:
        y, cache = self.layer.forward(params, x, run)
        if not run.training:
            return y, cache
        return y, _Kept(cache, self.meter.keep(cache, [params, *([x] if self.skip_input else [])]))

    def backward(self, params: Any, cache: _Kept, dy: Any, grads: Any) -> Any:
        dx = self.layer.backward(params, cache.cache, dy, grads)
        self.meter.drop(cache.found)
        return dx

    def backward_input(self, params: Any, cache: _Kept, dy: Any) -> tuple[Any, Any]:
        dx, pending = self.layer.backward_input(params, cache.cache, dy)
        return dx, _Kept(pending, self.meter.keep(pending, [params]))

    def backward_weights(self, params: Any, cache: _Kept, pending: _Kept, grads: Any) -> None:
        self.layer.backward_weights(params, cache.cache, pending.cache, grads)
        self.meter.drop(cache.found)
        self.meter.drop(pending.found)


class _MeteredLoss:
    """Wrap a loss and count its caches, without the targets."""

    def __init__(self, loss: Any, meter: CacheMeter) -> None:
        self.loss, self.meter = loss, meter

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        loss, weight, cache = self.loss.forward(prediction, target)
        return loss, weight, _Kept(cache, self.meter.keep(cache, [target]))

    def backward(self, cache: _Kept, scale: float = 1.0) -> Any:
        gradient = self.loss.backward(cache.cache, scale)
        self.meter.drop(cache.found)
        return gradient


def watch(engine: Engine) -> CacheMeter:
    """Wrap the blocks and the loss of this rank's engine, so that the returned meter counts their caches in training.

    Counted are the cache that a block's forward pass returns, and what ``backward_input`` keeps for
    ``backward_weights``. Parameters, samples and targets are not counted. The engine computes the same values, a
    little slower, so this is for measurements only.
    """
    meter, runner = CacheMeter(), engine.runner
    piped = isinstance(runner, PipelineRunner)
    holder: Any = runner if piped else getattr(runner, "evaluator", None)
    blocks: Any = engine.partitioned.local.blocks if piped else holder.blocks
    first = engine.partitioned.cuts[0][0]
    for name, layer in list(blocks.items()):
        blocks[name] = _MeteredLayer(layer, meter, skip_input=name == first)
    holder.criterion = _MeteredLoss(holder.criterion, meter)
    return meter


def buffers(value: object) -> list[Array]:
    """Find all arrays inside nested containers and objects, and return the arrays that own their memory, each once.

    A cache may refer to a communicator group; the buffers of that group are not searched.
    """
    found: dict[int, Array] = {}
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, np.ndarray):
            owner = _owner(item)
            found[id(owner)] = owner
        elif id(item) not in seen:
            seen.add(id(item))
            left += _inside(item)
    return list(found.values())


def _owner(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _inside(item: Any) -> list[Any]:
    if isinstance(item, str | bytes | int | float | complex | type | None) or callable(item):
        return []
    if isinstance(item, CommunicatorGroup):
        return []
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if is_dataclass(item):
        return [getattr(item, field.name) for field in fields(item)]
    return list(getattr(item, "__dict__", {}).values())
