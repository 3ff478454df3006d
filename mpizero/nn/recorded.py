"""Repeat the kernels of a block's passes from a recording, in place of the Python code that calls them.

A block of few samples takes longer in Python than in its kernels. Its passes call the same kernels in every step, with
the same memory, if input and parameters lie where they lay: so :class:`RecordedBlock` records the calls of a pass
(:mod:`mpizero.kernels.recording`), and repeats them.

[Note: proof of a recording] A recording that misses something that the layer computes would give wrong numbers. So
only layers whose classes are known to compute by kernels alone are recorded (:data:`KNOWN`), and each recording is
tried before it is used. The layer and the recording compute the same block from input and gradient that the recording
has not seen, and all results must have the same bits. Otherwise the block is computed as before, which
:attr:`RecordedBlock.refused` says.

[Note: whose memory] The output of a recorded pass, and the gradient of its input, lie in the same arrays in every step.
Such an array is valid until the block's next forward pass begins, and the block after this one reads it where it lies.
Any other input is copied to memory that the recording owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero.kernels.recording import RUNS, Recording, recording_is_on
from mpizero.layout.flat import flat_names
from mpizero.nn import fields, layers, transformer
from mpizero.types import EVALUATE, Array, Layer, Params, Run

#: Layers whose passes depend on input, gradient and parameters only, and compute by kernels and recorded calls alone.
KNOWN: frozenset[type] = frozenset(
    {
        layers.Linear,
        layers.Projection,
        layers.GELU,
        layers.SiLU,
        layers.ReLU,
        layers.Tanh,
        layers.LayerNorm,
        layers.RMSNorm,
        layers.Sequential,
        fields.Residual,
        transformer.Embedding,
        transformer.Position,
        transformer.TokenEmbedding,
        transformer.CausalSelfAttention,
        transformer.FeedForward,
        transformer.TransformerBlock,
        transformer.LanguageHead,
    }
)
#: Bytes that the recordings of a block may hold. Blocks that compute with more take too long for Python to matter.
LIMIT = 8 << 20
#: Recordings of a block: one for each place of its input, of its output's gradient and of its parameters' gradients.
_PLACES = 64


def is_known(layer: Any) -> bool:
    """Tell whether the passes of a layer, and of all layers that it is made of, can be recorded."""
    if type(layer) not in KNOWN or getattr(layer, "dropout", 0):
        return False
    return all(map(is_known, layer.children().values()))


def recorded_blocks(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's blocks, those that can be recorded as :class:`RecordedBlock`; with MPIZERO_REPLAY=0, none."""
    if not recording_is_on():
        return dict(blocks)
    owned: dict[int, Array] = {}
    workspaces: dict[str, Array] = {}
    return {
        name: RecordedBlock(layer, owned, workspaces) if is_known(layer) else layer for name, layer in blocks.items()
    }


class RecordedBlock:
    """Run a block's passes from recordings where it can; it has the methods of the layer that a runner calls.

    Parameters
    ----------
    layer : Layer
        The block; :func:`is_known` is true of it.
    owned : dict
        The arrays that recordings of the same model's blocks own, by their identity: see [Note: whose memory].
    workspaces : dict
        The temporary memory of the recordings of the same model.

    Attributes
    ----------
    stands_for : Layer
        The layer.
    refused : str
        Why the block is no longer recorded; "" if it is.
    """

    def __init__(self, layer: Layer, owned: dict[int, Array], workspaces: dict[str, Array]) -> None:
        self.stands_for = layer
        self.refused = ""
        self.owned, self.workspaces = owned, workspaces
        self._seen: dict[Any, int] = {}
        self._free: dict[Any, list[_Recorded]] = {}
        self._held = 0

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the output for ``x``, and the cache that :meth:`backward` takes."""
        if run.training and not self.refused and type(x) is np.ndarray and not getattr(params, "gathered", False):
            place = id(x) if id(x) in self.owned else 0
            key = (id(params), x.shape, x.dtype.num, place, run.length, run.ranges)
            if free := self._free.get(key):
                return free.pop().repeat(x)
            if self._may_record(key):
                return self._record(key, params, x, run)
        y, cache = self.stands_for.forward(params, x, run)
        return y, (None, cache)

    def backward(self, params: Params, cache: Any, dy: Any, grads: Params) -> Any:
        """Write the gradients of the parameters to ``grads``; return the gradient of the input."""
        recorded, inner = cache
        if recorded is None:
            return self.stands_for.backward(params, inner, dy, grads)
        dx = recorded.backward(params, dy, grads)
        if not self.refused:
            self._free.setdefault(recorded.key, []).append(recorded)
        return dx

    def _may_record(self, key: Any) -> bool:
        """Count a pass that is not recorded, and tell whether to record it."""
        self._seen[key] = seen = self._seen.get(key, 0) + 1
        return seen > RUNS and len(self._seen) <= _PLACES and self._held <= LIMIT

    def _record(self, key: Any, params: Params, x: Array, run: Run) -> tuple[Any, Any]:
        own = x if id(x) in self.owned else x.copy()
        with Recording(self.workspaces) as calls:
            y, inner = self.stands_for.forward(params, own, run)
        self._held += calls.held_bytes(*(value for _, value in flat_names(params)))
        if self._held > LIMIT or type(y) is not np.ndarray:
            return y, (None, inner)
        self.owned[id(y)] = y
        return y, (_Recorded(self, key, (params, own, run), calls, y, inner), inner)


class _Recorded:
    """Hold the recording of a forward pass, and those of the backward passes that follow it.

    ``given`` are the arguments of the forward pass, of which the input is an array that stays where it is.
    """

    def __init__(
        self, block: RecordedBlock, key: Any, given: tuple[Params, Array, Run], calls: Recording, y: Array, cache: Any
    ) -> None:
        self.key = key
        self._block, self._given, self._calls, self._y, self._cache = block, given, calls, y, cache
        self._backward: dict[tuple[int, int], _Backward] = {}

    def repeat(self, x: Array) -> tuple[Array, Any]:
        """Compute the output for ``x``; return it and the cache of the block."""
        if x is not (own := self._given[1]):
            np.copyto(own, x)
        self._calls.repeat()
        return self._y, (self, self._cache)

    def backward(self, params: Params, dy: Any, grads: Params) -> Any:
        """Do as :meth:`RecordedBlock.backward`, by a recording if there is one for the places of the arrays."""
        place = (id(dy) if id(dy) in self._block.owned else 0, id(grads))
        recorded = self._backward.get(place)
        if recorded is not None:
            if dy is not recorded.dy:
                np.copyto(recorded.dy, dy)
            recorded.calls.repeat()
            return recorded.dx
        layer = self._block.stands_for
        if type(dy) is not np.ndarray or params is not self._given[0] or len(self._backward) >= _PLACES:
            return layer.backward(params, self._cache, dy, grads)
        own = dy if place[0] else dy.copy()
        with Recording(self._block.workspaces) as calls:
            dx = layer.backward(params, self._cache, own, grads)
        made = _Backward(own, grads, dx, calls)
        if wrong := self._wrong(made):
            self._block.refused = wrong
        self._backward[place] = made
        if dx is not None:
            self._block.owned[id(dx)] = dx
        return dx

    def _wrong(self, made: _Backward) -> str:
        """Say what differs between the layer's results and those of the recordings; "" if nothing does.

        See [Note: proof of a recording]. All arrays but the output have their contents of before when this returns.
        """
        (params, x, run), layer = self._given, self._block.stands_for
        written = {f"the gradient of {name}": view for name, view in flat_names(made.grads)}
        results = {"the output": self._y, **written}
        if made.dx is not None:
            results["the gradient of the input"] = made.dx
        before = [(array, array.copy()) for array in (x, made.dy, *results.values())]
        for array in (x, made.dy):
            array[...] = _others(array)
        y, cache = layer.forward(params, x.copy(), run)
        dx = layer.backward(params, cache, made.dy.copy(), made.grads)
        expected = [y, *(view.copy() for view in written.values()), *([] if dx is None else [dx])]
        for array in results.values():
            array.fill(np.nan)
        self._calls.repeat()
        made.calls.repeat()
        wrong = [name for (name, a), b in zip(results.items(), expected, strict=True) if a.tobytes() != b.tobytes()]
        for array, contents in before:
            array[...] = contents
        return "" if not wrong else f"{type(layer).__name__}: {wrong[0]} differs when its kernels are repeated"


@dataclass
class _Backward:
    """Hold the recording of a backward pass, and the arrays that it reads and writes."""

    dy: Array
    grads: Params
    dx: Array | None
    calls: Recording


def _others(x: Array) -> Array:
    """Return other numbers of the kind of those in ``x``: integers in another order, floats with a ramp added."""
    turned = x.reshape(-1)[::-1].reshape(x.shape)
    if x.dtype.kind != "f":
        return turned
    ramp = np.linspace(-1, 1, x.size, dtype=x.dtype).reshape(x.shape)
    return turned * x.dtype.type(0.5) + ramp
