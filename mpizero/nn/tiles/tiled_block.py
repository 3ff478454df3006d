"""Run a split block for each tile of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import combine_leaves, map_leaves
from mpizero.kernels.matmul_tile import fold
from mpizero.layout import Partition
from mpizero.nn.arrays import namespace
from mpizero.nn.context.ring import Zigzag
from mpizero.nn.integers import layer_integers
from mpizero.nn.layer import Layer
from mpizero.nn.operations import Operations
from mpizero.nn.tiles.coroutines import run_in_turns
from mpizero.nn.tiles.tile_parameters import TileParameters, copied, require_equal_integers
from mpizero.types import EVALUATE, Array, IntegerSpec, ParameterSpec, Params, Run


class Hosted(NamedTuple):
    """Describe the tiles of one axis that a rank hosts: their numbers, and the number of tiles of all ranks."""

    own: range
    tiles: int


@dataclass(frozen=True)
class TileGrid:
    """Number the tiles of a rank: tiles along sequences (context), and in each of these tiles of layers (tensor).

    With n tensor tiles on this rank, tile ``c * n + t`` is its tensor tile t of its context tile c. Of the activations
    between blocks a rank holds those of its context tiles, one after the other along the axis of positions; each of
    these consists of the parts of its tensor tiles, one after the other along the axis that they are cut along.

    Parameters
    ----------
    tensor, context : Hosted
        The tiles of each axis.
    """

    tensor: Hosted
    context: Hosted

    @property
    def across(self) -> int:
        """Number of tensor tiles of this rank."""
        return len(self.tensor.own)

    @property
    def along(self) -> int:
        """Number of context tiles of this rank."""
        return len(self.context.own)

    def cut(self, x: Any, length: int, axis: int | None) -> list[Any]:
        """Return each tile's part of ``x``, which the rank holds: an array, or a tree if tensor tiles do not cut it.

        ``length`` is the number of positions of the whole sequences; it is not used if the rank has one context tile.
        ``axis`` is the axis that is cut over the tensor tiles, or None if each of them holds the whole.
        """
        if self.along == 1:
            return [x] * self.across if axis is None else _parts(x, axis, Partition(x.shape[axis], self.across).sizes())
        whole = Zigzag(length, self.context.tiles).sizes
        places = [self._places(whole[tile], axis) for tile in self.context.own]
        found: list[Any] = []
        for row, sizes in zip(_rows(x, [sum(sizes) for sizes in places]), places, strict=True):
            if axis is None:
                found += [row] * self.across
            else:
                found += _parts(row, axis, sizes if axis == 1 else Partition(row.shape[axis], self.across).sizes())
        return found

    def runs(self, run: Run) -> list[Run]:
        """Return ``run`` for each tile: with the tile's own positions, if the rank has several context tiles."""
        if self.along == 1:
            return [run] * self.across
        whole = Zigzag(run.length, self.context.tiles)
        rows = [replace(run, ranges=whole.ranges(tile)) for tile in self.context.own]
        return [row for row in rows for _ in range(self.across)]

    def _places(self, positions: int, axis: int | None) -> tuple[int, ...]:
        """Return how many of a context tile's positions this rank holds, for each part that they are cut into."""
        if axis != 1:
            return (positions,)
        sizes = Partition(positions, self.tensor.tiles).sizes()
        return tuple(sizes[tile] for tile in self.tensor.own)

    def join(self, parts: Sequence[Any], axis: int | None) -> Any:
        """Return what the rank holds from the parts of its tiles; the inverse of :meth:`cut`."""
        rows = [parts[start : start + self.across] for start in range(0, len(parts), self.across)]
        held = [row[0] if axis is None else _joined(row, axis) for row in rows]
        return held[0] if len(held) == 1 else combine_leaves(partial(_joined, axis=1), held)


class _Cache(NamedTuple):
    """Hold what the backward pass of a tiled block needs: the length of the sequences, and the tiles' caches."""

    length: int
    caches: list[Any]


@dataclass(frozen=True)
class TiledBlock(Layer):
    """Run the split forms of a block for all tiles of a rank, in turns.

    Parameters
    ----------
    forms : tuple of Layer
        The split form of the block for each tile of the rank; see :class:`TileGrid` for their order.
    grid : TileGrid
        Numbers of tiles.
    entry, exit : int or None
        The axis of the input and of the output that is cut over the tensor tiles; None if each of them has the whole.
    takes_parts, gives_parts : bool
        Whether the input and the output are tuples of the tiles' parts, and not joined: the block before, or after,
        is tiled and on this rank, too.
    """

    forms: tuple[Layer, ...]
    grid: TileGrid
    entry: int | None
    exit: int | None
    takes_parts: bool = False
    gives_parts: bool = False

    @cached_property
    def _parameters(self) -> TileParameters:
        return TileParameters(tuple(form.specs() for form in self.forms[: self.grid.across]))

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the parameters that this rank holds: of a split one, the parts of all of its tiles."""
        return self._parameters.specs

    @property
    def stands_for(self) -> Layer:
        """The layer that errors name: the split form of the first tile."""
        return self.forms[0]

    def integers(self) -> tuple[IntegerSpec, ...]:
        """Describe the block's integer arrays. Not collective."""
        return layer_integers(self.forms[0])

    @cached_property
    def _has_integers(self) -> bool:
        return bool(self.integers())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the block forward for all tiles. Collective over the groups that the block is split over."""
        inputs: Any = x if self.takes_parts else self.grid.cut(x, run.length, self.entry)
        tiles = zip(self.forms, self._views(params), inputs, self.grid.runs(run), strict=True)
        found = run_in_turns([bound(form.forward, p, part, r) for form, p, part, r in tiles])
        parts = [y for y, _ in found]
        output: Any = tuple(parts) if self.gives_parts else self.grid.join(parts, self.exit)
        return output, _Cache(run.length, [cache for _, cache in found])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of the input for all tiles. Collective over the groups."""
        return self._inputs(self._views(params), cache, dy)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients; those of the context tiles are added in the tree's order. Collective."""
        self._weights(self._views(params), cache, pending, grads)

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Overwrite the gradients, and return the gradient of the input. Collective over the groups."""
        views = self._views(params)
        if self._has_halves:
            dx, pending = self._inputs(views, cache, dy)
            self._weights(views, cache, pending, grads)
            return dx
        with self._gradients(grads) as targets:
            tiles = zip(self.forms, views, cache.caches, self._above(dy, cache), targets, strict=True)
            found = run_in_turns([bound(form.backward, p, c, d, g) for form, p, c, d, g in tiles])
        gradient: Array | None = self._input_gradient(found)
        return gradient

    @cached_property
    def _has_halves(self) -> bool:
        """Tell whether the halves of a backward pass run one after the other: context tiles need less memory then.

        Each has gradients of its own, which are there in the second half only.
        """
        return self.grid.along > 1 and all(hasattr(form, "backward_input") for form in self.forms)

    def _inputs(self, views: list[Params], cache: _Cache, dy: Array) -> tuple[Array | None, Any]:
        tiles = zip(self.forms, views, cache.caches, self._above(dy, cache), strict=True)
        found = run_in_turns([bound(form.backward_input, p, c, d) for form, p, c, d in tiles])
        return self._input_gradient([dx for dx, _ in found]), [pending for _, pending in found]

    def _weights(self, views: list[Params], cache: _Cache, pending: Any, grads: Params) -> None:
        with self._gradients(grads) as targets:
            tiles = zip(self.forms, views, cache.caches, pending, targets, strict=True)
            run_in_turns([bound(form.backward_weights, p, c, w, g) for form, p, c, w, g in tiles])

    @contextmanager
    def _gradients(self, grads: Params) -> Iterator[list[Params]]:
        """Give each tile arrays for its gradients, and collect these in ``grads`` at the end."""
        held = [grads, *(copied(grads) for _ in range(self.grid.along - 1))]
        found = [self._parameters.gradients(one) for one in held]
        targets = [target for row, _ in found for target in row]
        yield targets
        if self._has_integers:
            require_equal_integers(targets)
        for _, copies in found:
            self._parameters.collect(copies)
        if len(held) > 1:
            _add_up(held)

    def _views(self, params: Params) -> list[Params]:
        return self._parameters.parameters(params) * self.grid.along

    def _above(self, dy: Any, cache: _Cache) -> Any:
        return dy if self.gives_parts else self.grid.cut(dy, cache.length, self.exit)

    def _input_gradient(self, parts: list[Any]) -> Any:
        if parts[0] is None:
            return None
        return tuple(parts) if self.takes_parts else self.grid.join(parts, self.entry)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit block's output shape for one sample of ``shape``. Not collective."""
        return self.forms[0].output_shape(shape)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of the tiles' operations for one sample of ``shape``. Not collective."""
        return sum((form.operations(shape) for form in self.forms), Operations())


def bound(method: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Return a function without arguments that calls ``method`` with the given ones."""
    return lambda: method(*arguments)


def _rows(x: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut all arrays of a tree along axis 1 into parts of the given sizes, as contiguous arrays."""
    starts = list(accumulate(sizes, initial=0))
    return [map_leaves(partial(_slice, start=a, stop=b), x) for a, b in pairwise(starts)]


def _slice(x: Array, start: int, stop: int) -> Array:
    part: Array = namespace(x).ascontiguousarray(x[:, start:stop])
    return part


def _parts(x: Array, axis: int, sizes: Sequence[int]) -> list[Array]:
    """Cut ``x`` along ``axis`` into parts of the given sizes, as contiguous arrays."""
    xp = namespace(x)
    return [xp.ascontiguousarray(part) for part in xp.split(x, list(accumulate(sizes))[:-1], axis=axis)]


def _joined(parts: Sequence[Array], axis: int) -> Array:
    whole: Array = namespace(parts[0]).concatenate(parts, axis=axis)
    return whole


def _add_up(trees: Sequence[Any]) -> None:
    """Write the sum of the arrays of all trees, in the tree's order, to those of the first."""
    for name, value in trees[0].items():
        below = [tree[name] for tree in trees]
        if isinstance(value, dict):
            _add_up(below)
        elif value.size and value.dtype.kind in "fc":
            fold(np.add, [array.reshape(-1) for array in below], value.reshape(-1))
