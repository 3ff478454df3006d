"""Count the bytes that a rank's blocks and loss keep from the forward pass for the backward pass of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mpizero.planning.traced_memory import buffers
from mpizero.sharding.engine import Engine
from mpizero.sharding.pipeline import PipelineRunner
from mpizero.types import Array


class CacheMeter:
    """Count the bytes of all arrays that forward passes have kept and backward passes have not freed yet.

    A cache is what a forward pass returns for its backward pass. An array that owns its memory counts once, however
    many caches contain it or views of it.

    Attributes
    ----------
    held, peak : int
        Bytes of the arrays counted now, and the largest number so far.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._buffers: dict[int, tuple[int, int]] = {}

    def keep(self, kept: object, but: Iterable[object] = ()) -> tuple[Array, ...]:
        """Start counting the arrays inside ``kept`` that are not inside ``but``, and return them, for :meth:`drop`."""
        skipped = {id(array) for value in but for array in buffers(value)}
        found = tuple(array for array in buffers(kept) if id(array) not in skipped)
        for array in found:
            uses, size = self._buffers.get(id(array), (0, array.nbytes))
            self._buffers[id(array)] = uses + 1, size
            self.held += 0 if uses else size
        self.peak = max(self.peak, self.held)
        return found

    def drop(self, found: Iterable[Array]) -> None:
        """Stop counting the arrays ``found`` that a call of :meth:`keep` returned, unless another call keeps them."""
        for array in found:
            uses, size = self._buffers.pop(id(array))
            if uses > 1:
                self._buffers[id(array)] = uses - 1, size
            else:
                self.held -= size


class _Kept(NamedTuple):
    """Hold the cache of a block or loss, and the arrays counted in it, so that they stay alive while counted."""

    cache: Any
    found: tuple[Array, ...]


class _MeteredLayer:
    """Wrap a layer and count its caches in ``meter``.

    With ``skip_input`` the layer's input is not counted. That is for the first layer, whose input is the samples.
    """

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
    """Wrap a loss and count in ``meter`` the arrays that it keeps for its backward pass, except the targets."""

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
    """Wrap the blocks and the loss of this rank's engine, and return a meter that counts their caches in training.

    The meter counts the cache that a forward pass returns, and what ``backward_input`` keeps for
    ``backward_weights``. It does not count parameters, samples and targets. The wrapped engine computes the same
    values, a little slower. Call this for measurements only.
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
