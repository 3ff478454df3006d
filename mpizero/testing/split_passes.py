"""Compare the passes of a model's split blocks with those of its whole blocks, tile by tile, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from mpizero import nn
from mpizero._util.pytree import leaves_of, map_leaves, paths_of
from mpizero._util.text import Rounding, is_users, largest
from mpizero.nn.layer import fresh_integers
from mpizero.nn.models import nest, run_on
from mpizero.nn.virtual_ranks import TiledBlock, tiled_model
from mpizero.testing.differences import first_difference
from mpizero.types import Array, BlockModel, Group, ParameterSpec, Run

#: How many times further apart than the same sums in another order the numbers of two passes may be.
_OF_PASS = 64
#: A gradient that is smaller than this part of a block's largest may be nothing but rounding: its bound is this part's.
_SMALL = 0.01


class SplitPasses:
    """Check the split blocks of a model in this process: all tiles against one another and against the whole blocks.

    Raises AssertionError at the first thing that is wrong. The message names the block, the tile, what differs, and the
    line of the method that computed it. Not collective.

    Parameters
    ----------
    model : BlockModel
        The whole model.
    axis : {"tensor", "context"}
        What is split: layers or sequences.
    tiles : int
        Number of tiles.
    """

    def __init__(self, model: BlockModel, axis: str, tiles: int) -> None:
        self.model, self.axis, self.tiles = model, axis, tiles
        self.alone = cast("Group", _Alone())
        counts = (tiles, 1) if axis == "tensor" else (1, tiles)
        self.tiled: Any = tiled_model(model, self.alone, self.alone, counts, model.blocks)
        self.checks = [
            _BlockCheck(name, model.blocks[name], block, model.dtype)
            for name, block in self.tiled.blocks.items()
            if isinstance(block, TiledBlock)
        ]

    def check_parameters(self) -> None:
        """Check that the tiles' parts of the parameters make the whole ones."""
        for check in self.checks:
            check.parameters()

    def check_passes(self, named: Mapping[str, Array], batch: Any) -> None:
        """Check both passes of every block, with the input and the output's gradient that it has in the whole model.

        ``named`` are the parameters of the whole model by name, ``batch`` inputs and targets.
        """
        params, x = nn.bind(self.model, named), leaves_of(batch[0])[0]
        run = run_on(self.model, x, Run(training=True, seed=self.model.seed, count=len(x)))
        passes = _whole_passes(self.model, params, batch, run)
        if self.axis == "context":  # the positions of the first tile, then those of the next, and so on
            passes = {name: known.in_order_of(self.tiles, self.alone, x) for name, known in passes.items()}
            x = nn.cut_batch(x, x, self.alone, self.tiles)[0]
        run = self.tiled.run_on(x, run)
        for check in self.checks:
            check.passes(params[check.name], passes[check.name], run)


class _Alone(NamedTuple):
    """Stand for the group of one process, which hosts all tiles: nothing is sent."""

    size: int = 1
    rank: int = 0


class _Pass(NamedTuple):
    """Hold what a whole block takes and gives in one training pass; ``gradients`` are by local name."""

    x: Any
    y: Any
    dy: Any
    dx: Any
    gradients: dict[str, Array]

    def in_order_of(self, tiles: int, alone: Group, like: Array) -> _Pass:
        """Return it with the positions of sequences in the order in which a rank holds those of its tiles."""

        def ordered(leaf: Any) -> Any:
            cut = getattr(leaf, "shape", ())[:2] == like.shape[:2]
            return nn.cut_batch(leaf, leaf, alone, tiles)[0] if cut else leaf

        x, y, dy, dx = (map_leaves(ordered, value) for value in self[:-1])
        return _Pass(x, y, dy, dx, self.gradients)


def _whole_passes(model: BlockModel, params: Mapping[str, Any], batch: Any, run: Run) -> dict[str, _Pass]:
    """Run the whole model forward and backward; return what each block takes and gives, by name."""
    y, target = batch
    forward: dict[str, tuple[Any, Any, Any]] = {}
    for name, block in model.blocks.items():
        x = y
        y, cache = block.forward(params[name], x, run)
        forward[name] = x, y, cache
    dy: Any = model.loss.backward(model.loss.forward(y, target)[2])
    found = {}
    for name, (x, y, cache) in reversed(forward.items()):
        block, above = model.blocks[name], dy
        grads = _new_gradients(block, model.dtype)
        dy = block.backward(params[name], cache, above, grads)
        found[name] = _Pass(x, y, above, dy, {spec.name: _at(grads, spec.name) for spec in _trained(block)})
    return dict(reversed(found.items()))


class _Recorder:
    """Run the form of a block for one tile, and keep copies of what its passes give by the name of the value."""

    def __init__(self, form: Any) -> None:
        self.form, self.seen = form, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.form, name)

    def forward(self, params: Any, x: Any, run: Run) -> Any:
        y, cache = self.form.forward(params, x, run)
        self.seen = dict(_leaves("output", y))
        return y, cache

    def backward(self, params: Any, cache: Any, dy: Any, grads: Any) -> Any:
        dx = self.form.backward(params, cache, dy, grads)
        self.seen |= _leaves("gradient of the input", dx)
        self.seen |= {f"gradient of {spec.name!r}": _at(grads, spec.name).copy() for spec in _trained(self.form)}
        return dx


@dataclass(frozen=True)
class _BlockCheck:
    """Check the split form of one block against the whole block."""

    name: str
    whole: Any
    tiled: TiledBlock
    dtype: np.dtype[Any]

    def parameters(self) -> None:
        """Check that the tiles' parts of the parameters make the whole ones."""
        wanted = {spec.name: spec for spec in self.whole.specs()}
        for number, form in enumerate(self.tiled.forms):
            if (names := [spec.name for spec in form.specs()]) != list(wanted):
                self.fail("specs", f"tile {number} has the parameters {names}, the whole block {list(wanted)}")
            for spec in form.specs():
                if (shape := spec.shape if spec.part is None else spec.part.shape) != wanted[spec.name].shape:
                    told = f"the shape {shape} of the whole {spec.name!r}, which is {wanted[spec.name].shape}"
                    self.fail("specs", f"tile {number} declares {told}: say by Part which part a tile holds")
        for spec in self.tiled.specs():
            if spec.part is not None and spec.part.ranges != (expected := ((0, spec.part.shape[spec.part.axis]),)):
                told = f"{spec.part.ranges} along axis {spec.part.axis}, not {expected}"
                self.fail("specs", f"the tiles together hold of {spec.name!r} the indices {told}")

    def passes(self, params: Any, known: _Pass, run: Run) -> None:
        """Run both passes of all tiles, and compare what they give between tiles and with the whole block."""
        recorders = [_Recorder(form) for form in self.tiled.forms]
        tiled = replace(self.tiled, forms=cast("Any", tuple(recorders)))
        first, _ = tiled.forward(params, known.x, run)
        y, cache = tiled.forward(params, known.x, run)
        for (place, again), (_, before) in zip(_leaves("output", y), _leaves("output", first), strict=True):
            if difference := first_difference(again, before, f"the {place} of a second pass on the same input"):
                self.fail("forward", f"{difference}: a layer must keep no state from call to call")
        if self.tiled.exit is None:
            self._equal(recorders, "forward", lambda place: place.startswith("output"))
        self._close("forward", _leaves("output", y), _leaves("output", known.y), known)
        grads = _new_gradients(tiled, self.dtype)
        dx = tiled.backward(params, cache, known.dy, grads)
        if self.tiled.entry is None:
            self._equal(recorders, "backward_input", lambda place: place.startswith("gradient of the input"))
        held = {f"gradient of {spec.name!r}" for spec in self.tiled.specs() if spec.part is None}
        self._equal(recorders, "backward_weights", held.__contains__)
        self._close(
            "backward_input", _leaves("gradient of the input", dx), _leaves("gradient of the input", known.dx), known
        )
        for name, expected in known.gradients.items():
            place = f"gradient of {name!r}"
            self._close("backward_weights", [(place, _at(grads, name))], [(place, expected)], known)

    def _equal(self, recorders: list[_Recorder], method: str, which: Callable[[str], bool]) -> None:
        """Require that the tensor tiles of each context tile give the same bits of what must be whole on each."""
        across = self.tiled.grid.across
        for number, recorder in enumerate(recorders):
            first = number // across * across
            for place, value in recorder.seen.items():
                if which(place) and (told := first_difference(value, recorders[first].seen[place], f"the {place}")):
                    self.fail(
                        method,
                        f"{told} of tile {first}: it must be whole and the same on every tile; is a sum over the group "
                        "missing (all_reduce), or does something depend on group.rank?",
                        number,
                    )

    def _close(self, method: str, found: Any, known: Any, passed: _Pass) -> None:
        """Require that the tiles together give what the whole block gives, within rounding."""
        sums = Rounding(str(self.dtype), float(max((spec.size for spec in self.whole.specs()), default=1)))
        least = _SMALL * max((largest(value) for value in passed.gradients.values()), default=0.0)
        for (place, value), (_, expected) in zip(found, known, strict=True):
            if value is None or expected is None:
                if value is not expected:
                    self.fail(method, f"there is {'no' if value is None else 'a'} {place}, unlike the whole block's")
                continue
            a, b = np.asarray(value), np.asarray(expected)
            if a.shape != b.shape:
                self.fail(method, f"the {place} has the shape {a.shape}, the whole block's {b.shape}")
            bound = _OF_PASS * sums.of_sums * max(largest(b), least)
            apart = np.abs(a - b).reshape(-1)
            if apart.size and not apart.max() <= bound:
                worst = int(np.argmax(apart))
                factor = sums.factor([a], [b], summed=True)
                told = "" if factor is None else f", {factor:.6g} times it"
                self.fail(
                    method,
                    f"the {place} is not the whole block's{told}: {a.reshape(-1)[worst]!s} at {worst}, expected "
                    f"{b.reshape(-1)[worst]!s} ({np.count_nonzero(apart > bound)} of {a.size} elements differ)",
                )

    def fail(self, method: str, text: str, tile: int | None = None) -> None:
        """Raise AssertionError; the message names the block, the tile, and the line where ``method`` is defined."""
        form = self.tiled.forms[tile or 0]
        code = getattr(getattr(type(form), method, None), "__code__", None)
        line = f", {Path(code.co_filename).name}:{code.co_firstlineno}" if code and is_users(code.co_filename) else ""
        tiles = f"{len(self.tiled.forms)} tiles" + ("" if tile is None else f", tile {tile}")
        raise AssertionError(f"block {self.name!r} in {tiles} ({type(form).__name__}.{method}{line}): {text}")


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return copies of the arrays of a tree by their places, which begin with ``name``; a value None stays None."""
    return [(path, leaf if leaf is None else np.array(leaf)) for path, leaf in paths_of(**{name: value})]


def _trained(layer: Any) -> Iterator[ParameterSpec]:
    return (spec for spec in layer.specs() if spec.trainable)


def _new_gradients(layer: Any, dtype: Any) -> dict[str, Any]:
    """Return arrays of NaN for the gradients of a layer, nested by name."""
    arrays = {spec.name: np.full(spec.shape, np.nan, spec.element_type(dtype)) for spec in layer.specs()}
    return nest([*arrays.items(), *fresh_integers(layer).items()])


def _at(tree: Any, name: str) -> Array:
    for step in name.split("."):
        tree = tree[step]
    found: Array = tree
    return found
