"""Repeat the kernels of a block's passes from a recording, in place of the Python code that calls them.

With few samples, the passes of a block spend more time in Python than in kernels. In every step they call the same
kernels with the same memory, provided that input and parameters have not moved. So :class:`RecordedBlock` records the
calls of a pass (:mod:`mpizero.kernels.recording`), and repeats them.

Only layers of classes that are known to compute by nothing but kernels and recorded calls have recordings
(:data:`KNOWN`), and each recording is tried before it is used: see [Note: proof of a recording] in
mpizero/kernels/recording.py.

[Note: whose memory] The output of a recorded pass, and the gradient of its input, lie in the same arrays in every step.
Such an array is valid until the pass is repeated, and the next block reads it where it lies. To be kept longer it is
copied (:meth:`RecordedBlocks.released`). An input, or a gradient of the output, that does not lie in an array of a
recording is copied to one. A training pass is not repeated before its backward pass has ended; if other micro-batches
are in flight meanwhile, their passes have recordings of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import get_ident
from typing import Any

import numpy as np

from mpizero._util.pytree import leaves_of
from mpizero.errors import CollectiveError, PeerFailure
from mpizero.kernels.recording import WARM_UP, Recording, rebased_run, recording_is_on
from mpizero.layout.flat import flat_names
from mpizero.nn import fields, layers, transformer
from mpizero.nn.layer import Wrapper
from mpizero.types import EVALUATE, Array, Layer, Params, Run

#: Layers that compute by kernels and recorded calls alone, from nothing but the input, the gradient of the output, the
#: parameters, and what a Run holds (seed, step, indices of samples).
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
        layers.Dropout,
        layers.Sequential,
        layers.Frozen,
        layers.PartlyFrozen,
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
#: Most bytes of memory of a block's recordings. The kernels of a block with more take so long that the time in Python
#: does not matter.
LIMIT = 4 << 20
#: Most forward passes of a block that are recorded; also the most backward passes of each of these, and for each of
#: those the most sets of arrays that gradients are written to.
_MOST_PASSES = 64


def unrecordable(layer: Any) -> str:
    """Return the name of the class that keeps a layer from being recorded, its own or a child's; "" if none does."""
    if type(layer) not in KNOWN:
        return type(layer).__name__
    parts = [layer.layer] if isinstance(layer, Wrapper) else layer.children().values()
    return next(filter(None, map(unrecordable, parts)), "")


class RecordedBlocks(dict[str, Any]):
    """Hold a model's blocks by name; each block that can be recorded is wrapped in a :class:`RecordedBlock`.

    With the environment variable MPIZERO_REPLAY=0, no block is recorded. ``loss`` is the loss that follows the blocks.

    Attributes
    ----------
    owned : dict
        The outputs of recorded passes and the gradients of their inputs, which recordings own, by their ``id``.
    workspaces : dict
        The temporary memory of all recordings.
    thread : int
        Identifier of the thread that has made the model. Only passes in this thread are recorded, because other threads
        may compute passes at the same time.
    """

    def __init__(self, blocks: Mapping[str, Any], loss: Any = None) -> None:
        self.owned: dict[int, Array] = {}
        self.workspaces: dict[str, Array] = {}
        self.thread = get_ident()
        self._units: list[RecordedUnit] = []
        off = "" if recording_is_on() else "MPIZERO_REPLAY=0"
        self._reasons = {name: off or unrecordable(layer) for name, layer in blocks.items()}
        known = [not reason for reason in self._reasons.values()]
        ours = type(loss).__module__.startswith("mpizero.")
        neighbours = zip(blocks.items(), known, [False, *known], [*known[1:], ours], strict=False)
        super().__init__(
            {
                name: RecordedBlock(layer, self, copies=(not after, not before)) if here else layer
                for (name, layer), here, before, after in neighbours
            }
        )

    def __setitem__(self, name: str, block: Any) -> None:
        """Replace a block, by one that observes it, for example."""
        super().__setitem__(name, block)
        self.forget_units()

    def key(self, params: Params, array: Any) -> Any:
        """Return what a backward pass with these parameters, and ``array`` as gradient of the output, is found by."""
        if id(array) in self.owned:
            return id(params), id(array)
        return id(params), (array.shape, array.dtype.num) if type(array) is np.ndarray else None

    def of_unit(self, names: Sequence[str]) -> RecordedUnit:
        """Return an object that repeats the recordings of successive blocks together."""
        blocks = {name: self[name] for name in names}
        known = all(isinstance(block, RecordedBlock) for block in blocks.values())
        self._units.append(RecordedUnit(blocks if known else {}, self))
        return self._units[-1]

    def forget_units(self) -> None:
        """Drop what was made of the recordings of several blocks, because one was replaced, or refuses recordings."""
        for unit in self._units:
            unit.passes.clear()

    def released(self, value: Any) -> Any:
        """Return ``value``, copied if it is an array that a recording owns and overwrites."""
        return value.copy() if id(value) in self.owned else value

    @property
    def bytes(self) -> int:
        """Bytes of all arrays that recordings use, without parameters and their gradients."""
        used: dict[int, int] = {}
        for block in self.values():
            used |= block.memory if isinstance(block, RecordedBlock) else {}
        return sum(used.values())

    def status(self) -> dict[str, str]:
        """Return, for each block, how its last training pass was computed: "repeated", "called", or "called: <why>"."""
        return {
            name: f"called: {reason}" if reason else getattr(self[name], "status", "called")
            for name, reason in self._reasons.items()
        }


class RecordedBlock:
    """Run a block's passes, repeated from recordings where there are any; has the methods of a layer that runners call.

    Parameters
    ----------
    layer : Layer
        The block, for which :func:`unrecordable` returns "".
    model : RecordedBlocks
        All blocks of the model.
    copies : (bool, bool)
        Whether the output is copied, and whether the gradient of the input is. Code of the user must get a copy,
        because it may keep the array.

    Attributes
    ----------
    stands_for : Layer
        The layer.
    refused : str
        Why the block is no longer recorded; "" if it may still be recorded.
    status : str
        "repeated" if the last forward pass of a training step was repeated from a recording, else "called", and why if
        the block is no longer recorded.
    memory : dict of int to int
        The bytes of each array that the recordings use, by its ``id``; without parameters and their gradients.
    """

    def __init__(self, layer: Layer, model: RecordedBlocks, copies: tuple[bool, bool]) -> None:
        self.stands_for, self.model = layer, model
        self._copies_output, self._copies_gradient = copies
        self.refused, self.status = "", "called"
        self._counts: dict[Any, float] = {}
        self._free: dict[Any, list[_Pass]] = {}
        self.memory: dict[int, int] = {}
        self._passes = 0

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the output for ``x``, and the cache that the backward pass takes."""
        if not self.refused and type(x) is np.ndarray and get_ident() == self.model.thread:
            form = (x.shape, x.dtype.num, run.length, run.ranges, run.training)
            key = (form, id(params), id(x) if id(x) in self.model.owned else 0)
            if free := self._free.get(key):
                y, cache = free[-1].repeat(x, run)
                if run.training:
                    free.pop()
                self.status = "repeated" if run.training else self.status
                return self.finished(y), cache
            if self._may_record(form) and (recorded := self._record(key, params, x, run)) is not None:
                return recorded
        if run.training:
            self.status = f"called: {self.refused}" if self.refused else "called"
        y, cache = self.stands_for.forward(params, x, run)
        return y, (None, cache)

    def backward(self, params: Params, cache: Any, dy: Any, grads: Params) -> Any:
        """Write the gradients of the parameters to ``grads``; return the gradient of the input."""
        if cache[0] is None:
            return self.stands_for.backward(params, cache[1], dy, grads)
        dx, pending = self.backward_input(params, cache, dy)
        self.backward_weights(params, cache, pending, grads)
        return dx

    def backward_input(self, params: Params, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of the input, and what :meth:`backward_weights` needs."""
        recorded, inner = cache
        if recorded is None:
            return self.stands_for.backward_input(params, inner, dy)
        dx, pending = recorded.backward_input(params, dy)
        return self.finished_backward(dx), pending

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Write the gradients of the parameters to ``grads``."""
        recorded, inner = cache
        if recorded is None:
            self.stands_for.backward_weights(params, inner, pending, grads)
            return
        recorded.backward_weights(params, pending, grads)
        if not self.refused:
            self._free.setdefault(recorded.key, []).append(recorded)

    def _may_record(self, form: Any) -> bool:
        """Count a pass that is not repeated, with input of this form (shape, dtype, ...); tell whether to record it."""
        self._counts[form] = count = self._counts.get(form, 0) + 1
        return count > WARM_UP and self._passes < _MOST_PASSES

    def _record(self, key: Any, params: Params, x: Array, run: Run) -> tuple[Any, Any] | None:
        """Compute and record a forward pass, and return its results; None if a trial refuses the recording.

        The trial (:meth:`_Pass.prove`) compares the recording with the layer for another input.
        """
        self._passes += 1
        recorded = _Pass(self, key, params, x if id(x) in self.model.owned else x.copy(), run)
        y, inner = recorded.y, recorded.cache
        used = self.memory | recorded.calls.memory(*(value for _, value in flat_names(params)))
        if sum(used.values()) > LIMIT or type(y) is not np.ndarray:
            self._counts[key[0]] = -math.inf  # never again
            return y, (None, inner)
        self.memory = used
        recorded.prove()
        if self.refused:
            return None
        self.model.owned[id(y)] = y
        if not run.training:
            self._free.setdefault(key, []).append(recorded)
        return self.finished(y), (recorded, inner)

    def refuse(self, why: str) -> None:
        """Record nothing from now on, for the reason ``why``."""
        self.refused = why
        self.model.forget_units()

    def take(self, recorded: _Pass) -> None:
        """Let no other pass use the memory of ``recorded`` until its backward pass has ended."""
        if recorded in (free := self._free.get(recorded.key, [])):
            free.remove(recorded)

    def finished(self, y: Array) -> Array:
        """Return the output ``y`` of a recorded pass, copied where code of the user gets it."""
        return y.copy() if self._copies_output else y

    def finished_backward(self, dx: Any) -> Any:
        """Return the gradient of the input, copied where code of the user gets it."""
        return dx.copy() if self._copies_gradient and dx is not None else dx


class RecordedUnit:
    """Repeat the recordings of a unit's blocks together, once each block has repeated its own.

    A block hands its output to the next one in the same array in every step ([Note: whose memory]), and so it does with
    the gradient of its input. So the calls of all blocks are one list. The recordings are those of the blocks, each of
    which has been tried.

    Parameters
    ----------
    blocks : dict of str to RecordedBlock
        The blocks by name, in their order; none if one of the unit's blocks has no recordings.
    model : RecordedBlocks
        All blocks of the model.

    Attributes
    ----------
    passes : dict
        The forward passes of all blocks together, by form of the input, memory of the parameters, and input.
    """

    def __init__(self, blocks: Mapping[str, RecordedBlock], model: RecordedBlocks) -> None:
        self.passes: dict[Any, UnitPass] = {}
        self._blocks, self._model = blocks, model

    def find(self, params: Params, x: Any, run: Run) -> UnitPass | None:
        """Return the passes of all blocks for the input ``x``, if they can be repeated together."""
        if not self.passes or type(x) is not np.ndarray or get_ident() != self._model.thread:
            return None
        return self.passes.get(self._key(params, x, run))

    def link(self, params: Params, x: Any, run: Run, caches: Mapping[str, Any]) -> None:
        """Let the passes that the blocks have just made, which returned ``caches``, be repeated together from now on.

        Nothing is done unless each of them was repeated and begins with the array that the one before ends with. ``x``
        is the input of the first.
        """
        if not self._blocks or any(self._model[name] is not block for name, block in self._blocks.items()):
            return
        passes = {name: caches[name][0] for name in self._blocks}
        repeated = all(isinstance(one, _Pass) and one.repeated for one in passes.values())
        if repeated and all(after.x is before.y for before, after in pairwise(passes.values())):
            if len(self.passes) >= _MOST_PASSES:
                self.passes.clear()
            self.passes[self._key(params, x, run)] = UnitPass(params, passes, self._blocks, self._model)

    def _key(self, params: Params, x: Array, run: Run) -> Any:
        form = x.shape, x.dtype.num, run.length, run.ranges, run.training
        return form, id(params), id(x) if id(x) in self._model.owned else 0


class UnitPass:
    """Repeat the passes of a unit's blocks together, forward and backward.

    ``params`` are the parameters of the forward pass. The parameters of a sharded model may lie elsewhere in the
    backward pass.
    """

    def __init__(
        self, params: Params, passes: dict[str, _Pass], blocks: Mapping[str, RecordedBlock], model: RecordedBlocks
    ) -> None:
        self._params = params  # kept, so that no other parameters have their id
        self._passes, self._blocks, self._model = passes, blocks, model
        self._first, self._last = next(iter(passes)), next(reversed(passes))
        self._calls = Recording.joined([one.calls for one in passes.values()])
        self._backward: dict[Any, _UnitBackward] = {}
        self._run = EVALUATE

    def forward(self, x: Array, run: Run) -> Array | None:
        """Repeat the forward passes with the input ``x``, and return the output of the last block.

        Return None if a block raises an error, which its own pass then raises again; only errors of communication are
        raised here.
        """
        self._run = run
        if x is not (own := self._passes[self._first].x):
            np.copyto(own, x)
        try:
            self._calls.repeat(run)
        except (CollectiveError, PeerFailure):
            raise
        except Exception:
            return None
        for block in self._blocks.values() if run.training else ():
            block.status = "repeated"
        return self._blocks[self._last].finished(self._passes[self._last].y)

    def backward(self, params: Params, d: Any, grads: Params) -> Iterator[tuple[str, Any]] | None:
        """Return an iterator that repeats the backward passes, of the last block first; None if they are not recorded.

        The iterator yields the name of each block, and the gradient of its input. ``d`` is the gradient of the output,
        ``params`` and ``grads`` are the parameters of all blocks and the views that their gradients are written to.
        """
        found = self._backward.get((self._model.key(params, d), id(grads)))
        return None if found is None else self._repeat_backward(found, d)

    def _repeat_backward(self, found: _UnitBackward, d: Array) -> Iterator[tuple[str, Any]]:
        if d is not found.dy:
            np.copyto(found.dy, d)
        for block, dx, calls in found.steps:
            calls.repeat(self._run)
            yield block, self._blocks[block].finished_backward(dx)

    def separate(self) -> dict[str, Any]:
        """Return the caches of the blocks' own passes, whose backward passes are then called block by block."""
        for name, one in self._passes.items():
            one.run = self._run
            self._blocks[name].take(one)
        return {name: (one, None) for name, one in self._passes.items()}

    def link_backward(self, params: Params, d: Any, grads: Params) -> None:
        """Let the backward passes that the blocks have just made be repeated together from now on.

        The arguments are those of :meth:`backward`.
        """
        key, dy, steps = (self._model.key(params, d), id(grads)), None, []
        for name in reversed(self._passes):
            back = self._passes[name].recorded_backward(params[name], d)
            if back is None or (weights := back.weights.get(id(grads[name]))) is None:
                return
            steps.append((name, back.dx, Recording.joined([back.calls, weights[1]])))
            dy, d = back.dy if dy is None else dy, back.dx
        if len(self._backward) >= _MOST_PASSES:
            self._backward.clear()
        if dy is not None:
            self._backward[key] = _UnitBackward(params, grads, dy, steps)


@dataclass
class _UnitBackward:
    """Hold the recordings of the backward passes of a unit's blocks.

    ``dy`` is the gradient of the last block's output. ``steps`` has for each block, the last one first, its name, the
    gradient of its input, and the recording.
    """

    params: Params
    grads: Params
    dy: Array
    steps: list[tuple[str, Any, Recording]]


@dataclass
class _Backward:
    """Hold the recording of a call of ``backward_input``, with its arguments and results.

    ``weights`` has the recordings of the calls of ``backward_weights`` that follow it, one for each ``grads`` that was
    passed: by the ``id`` of ``grads``, the pair of ``grads`` and the recording.
    """

    params: Params
    dy: Array
    dx: Any
    pending: Any
    calls: Recording
    weights: dict[int, tuple[Params, Recording]]


class _Pass:
    """Record a forward pass with the input ``x``, and the backward passes that follow it.

    Attributes
    ----------
    calls : Recording
        The recording of the forward pass.
    x, y : Array
        The input and the output of the forward pass.
    run : Run
        What the last pass got besides its input.
    repeated : bool
        Whether the forward pass was repeated at least once.
    """

    def __init__(self, block: RecordedBlock, key: Any, params: Params, x: Array, run: Run) -> None:
        self.key, self.calls = key, Recording(block.model.workspaces, run)
        self._block, self._layer, self._params, self.x = block, block.stands_for, params, x
        self._recorded = self.run = run
        self.repeated = False
        self._backward: dict[Any, _Backward] = {}
        with self.calls:
            self.y, self._cache = self._layer.forward(params, x, run)

    @property
    def cache(self) -> Any:
        """The cache of the last pass."""
        return self._cache if self.run is self._recorded else _rebased(self._cache, self._recorded, self.run)

    def repeat(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Repeat the recorded pass with the input ``x``; return its output, and the cache of the block's pass."""
        self.run = run
        if x is not self.x:
            np.copyto(self.x, x)
        self.calls.repeat(run)
        self.repeated = True
        return self.y, (self, None)

    def recorded_backward(self, params: Params, dy: Any) -> _Backward | None:
        """Return the recording of the backward pass with the gradient ``dy`` of the output, if there is one."""
        return self._backward.get(self._block.model.key(params, dy))

    def backward_input(self, params: Params, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of the input, and a :class:`_Backward` if recorded, else the layer's second result."""
        owned = self._block.model.owned
        if (back := self.recorded_backward(params, dy)) is not None:
            if dy is not back.dy:
                np.copyto(back.dy, dy)
            back.calls.repeat(self.run)
            return back.dx, back
        if type(dy) is not np.ndarray or len(self._backward) >= _MOST_PASSES:
            return self._layer.backward_input(params, self.cache, dy)
        key = self._block.model.key(params, dy)
        dy, calls = dy if id(dy) in owned else dy.copy(), Recording(self._block.model.workspaces, self.run)
        with calls:
            dx, pending = self._layer.backward_input(params, self.cache, dy)
        back = self._backward[key] = _Backward(params, dy, dx, pending, calls, {})
        self._block.memory |= calls.memory(*(value for _, value in flat_names(params)))
        if dx is not None:
            owned[id(dx)] = dx
        return dx, back

    def backward_weights(self, params: Params, pending: Any, grads: Params) -> None:
        """Write the gradients of the parameters; ``pending`` is the second result of :meth:`backward_input`."""
        if not isinstance(pending, _Backward):
            self._layer.backward_weights(params, self.cache, pending, grads)
        elif params is not pending.params:
            self._layer.backward_weights(params, self.cache, pending.pending, grads)
        elif (target := pending.weights.get(id(grads))) is not None:
            target[1].repeat(self.run)
        else:
            with (calls := Recording(self._block.model.workspaces, self.run)):
                self._layer.backward_weights(params, self.cache, pending.pending, grads)
            if len(pending.weights) < _MOST_PASSES:
                pending.weights[id(grads)] = grads, calls
                self._block.memory |= calls.memory(*(value for _, value in flat_names({"p": params, "g": grads})))
                self._prove_backward(pending, grads, calls)

    def prove(self) -> None:
        """Give up recording if the recording and the layer's forward pass give different results for another input.

        See [Note: proof of a recording] in mpizero/kernels/recording.py.
        """
        x, before, run = self.x, self.x.copy(), self.run
        other = replace(run, step=run.step + 1, first_sample=run.first_sample + len(x))
        with self._trial([(x, before)]):
            x[...] = _trial_values(x)
            y, cache = self._layer.forward(self._params, x.copy(), other)
            self.y.fill(np.nan)
            self.calls.repeat(other)
            self._compare([("the output", y, self.y)])
            self._compare([("the cache", *pair) for pair in zip(_arrays(cache), _arrays(self.cache), strict=True)])
        if not self._block.refused:
            self.calls.repeat(run)

    def _prove_backward(self, back: _Backward, grads: Params, calls: Recording) -> None:
        """Give up recording if the recorded backward pass and the layer's give different results for another ``dy``."""
        views = dict(flat_names(grads))
        with self._trial([(array, array.copy()) for array in (back.dy, *views.values())]):
            back.dy[...] = _trial_values(back.dy)
            for view in views.values():
                view.fill(np.nan)  # what the layer does not write, because it is frozen, the recording must not, either
            dx = self._layer.backward(back.params, self.cache, back.dy.copy(), grads)
            expected = [view.copy() for view in views.values()]
            for array in (*views.values(), *([] if dx is None else [back.dx])):
                array.fill(np.nan)
            back.calls.repeat(self.run)
            calls.repeat(self.run)
            if dx is not None:
                self._compare([("the gradient of the input", dx, back.dx)])
            pairs = zip(views.items(), expected, strict=True)
            self._compare([(f"the gradient of {name}", array, view) for (name, view), array in pairs])
        if not self._block.refused:
            back.calls.repeat(self.run)  # the gradient of the input is still needed
        elif (dx := self._layer.backward(back.params, self.cache, back.dy, grads)) is not None:
            back.dx[...] = dx

    @contextmanager
    def _trial(self, contents: Sequence[tuple[Array, Array]]) -> Iterator[None]:
        """Restore the contents of arrays after a trial with made-up numbers; give up recording if the trial raises.

        ``contents`` has each array with a copy of its contents. Only errors of communication, which a poll may raise,
        are passed on to the caller.
        """
        try:
            yield
        except (CollectiveError, PeerFailure):
            raise
        except Exception as error:
            self._block.refuse(f"a trial of {type(self._layer).__name__} raises {type(error).__name__}")
        finally:
            for array, before in contents:
                array[...] = before

    def _compare(self, results: Sequence[tuple[str, Array, Array]]) -> None:
        for what, expected, repeated in results:
            if not self._block.refused and expected.tobytes() != repeated.tobytes():
                self._block.refuse(f"{what} of {type(self._layer).__name__} differs when its kernels are repeated")


def _rebased(cache: Any, old: Run, new: Run) -> Any:
    """Return a cache of the pass with the Run ``old``, changed to what the pass with the Run ``new`` would return.

    Only the Runs in the cache are replaced; its arrays are the same.
    """
    if isinstance(cache, Run):
        return rebased_run(cache, old, new)
    if isinstance(cache, tuple) and not hasattr(cache, "_fields"):
        return tuple(_rebased(part, old, new) for part in cache)
    return [_rebased(part, old, new) for part in cache] if isinstance(cache, list) else cache


def _arrays(cache: Any) -> list[Array]:
    return [leaf for leaf in leaves_of(cache) if isinstance(leaf, np.ndarray)]


def _trial_values(x: Array) -> Array:
    """Return other numbers than those in ``x``: the same in reverse order; floats also halved, with a ramp added."""
    turned = x.reshape(-1)[::-1].reshape(x.shape)
    if x.dtype.kind != "f":
        return turned
    ramp = np.linspace(-1, 1, x.size, dtype=x.dtype).reshape(x.shape)
    values: Array = turned * x.dtype.type(0.5) + ramp
    return values
