"""Give each tile of a rank its part of the rank's parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.errors import LayoutError
from mpizero.layout.flat import nested
from mpizero.nn.arrays import namespace
from mpizero.types import Array, ParameterSpec, Params, as_reals

#: Half-open ranges of indices along the axis of a parameter that is split.
Ranges = tuple[tuple[int, int], ...]


class TileViews(dict[str, Any]):
    """Hold the parameters of a tile by name, with the ``poll`` and ``gathered`` of the rank's parameters, if any."""

    __slots__ = ("gathered", "poll")

    def __init__(self, views: Mapping[str, Any], source: Any) -> None:
        super().__init__(views)
        self.poll, self.gathered = getattr(source, "poll", None), getattr(source, "gathered", False)


class _Cut(NamedTuple):
    """Say where the tiles of a rank lie in the array of a parameter that the rank holds, seen as a matrix.

    Each tile has ranges of the matrix's columns; its rows are the axes before the one that is split.

    Attributes
    ----------
    rows, columns : int
        Shape of the matrix.
    in_one : bool
        Whether the part of each tile is one range.
    firsts : tuple
        For each tile, the index of its first range in the array.
    shapes : tuple of tuple of int
        Shape of each tile's part.
    places : tuple of int
        Where the tiles' parts begin in one array that holds all of them, and at the end the size of that array.
    ranges : ndarray
        What the kernels ``split_columns`` and ``join_columns`` take.
    """

    rows: int
    columns: int
    in_one: bool
    firsts: tuple[tuple[slice, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    ranges: Any

    def arrays(self, array: Array) -> list[Array]:
        """Return the tiles' parts of ``array`` as contiguous arrays: views if possible, else copies."""
        return self.views(array) if self.in_one and self.rows == 1 else self.parts(self.copied(array))

    def views(self, array: Array) -> list[Array]:
        """Return the first range of each tile in ``array``, as views."""
        return [array[index] for index in self.firsts]

    def copied(self, array: Array) -> Array:
        """Return an array with copies of the tiles' parts of ``array``, one after the other."""
        xp = namespace(array)
        found: Array = xp.empty(self.places[-1], array.dtype)
        if array.size:
            matrix, ranges, parts = self._as_reals(xp.ascontiguousarray(array), found)
            kernels.backend(array).copy.split_columns(matrix, ranges, parts)
        return found

    def parts(self, copied: Array) -> list[Array]:
        """Return the tiles' parts as views of an array that :meth:`copied` has returned."""
        found = zip(self.places[:-1], self.shapes, strict=True)
        return [copied[place : place + prod(shape)].reshape(shape) for place, shape in found]

    def write_back(self, copied: Array, array: Array) -> None:
        """Copy the tiles' parts from an array that :meth:`copied` has returned to ``array``."""
        whole = namespace(array).ascontiguousarray(array)
        if array.size:
            matrix, ranges, parts = self._as_reals(whole, copied)
            kernels.backend(array).copy.join_columns(parts, ranges, matrix)
        if whole is not array:
            array[...] = whole

    def _as_reals(self, whole: Array, copied: Array) -> tuple[Array, Any, Array]:
        """Return the matrix, its ranges and the parts; of complex numbers, those of their real and imaginary parts."""
        size = 2 if whole.dtype.kind == "c" else 1
        return as_reals(whole).reshape(self.rows, size * self.columns), size * self.ranges, as_reals(copied)


class _Copied(NamedTuple):
    """Hold copies of the tiles' parts of a gradient: by which cut, the copies, and the gradient."""

    cut: _Cut
    parts: Array
    array: Array


@dataclass(frozen=True)
class TileParameters:
    """Divide the parameters of a block that a rank holds among the rank's tiles.

    Parameters
    ----------
    declared : tuple of tuple of ParameterSpec
        For each tile, the parameters of its split form.
    """

    declared: tuple[tuple[ParameterSpec, ...], ...]

    @cached_property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """The parameters that the rank holds: of a split one, the union of the tiles' parts."""
        return tuple(_union(specs) for specs in zip(*self.declared, strict=True))

    @cached_property
    def _cuts(self) -> dict[str, Any]:
        """For each parameter its cut, or None if every tile holds it whole; nested by name as parameters are."""
        return nested({spec.name: None if spec.part is None else _cut(spec) for spec in self.specs})

    @cached_property
    def _split(self) -> bool:
        return any(spec.part is not None for spec in self.specs)

    def parameters(self, params: Params) -> list[Params]:
        """Return each tile's parameters, as contiguous arrays: views of ``params`` where possible, else copies."""
        tiles = len(self.declared)
        return [*_parameters(self._cuts, params, tiles)] if self._split else [params] * tiles

    def gradients(self, grads: Params) -> tuple[list[Params], list[_Copied]]:
        """Return arrays that each tile writes its gradients to, and what :meth:`collect` needs.

        They are views of ``grads``, or copies, from which :meth:`collect` copies back. From the second tile on, those
        of the parameters that every tile holds whole are new arrays, as all tiles compute the same gradients of these;
        so are integer arrays, which hold the old values.
        """
        tiles = len(self.declared)
        copies: list[_Copied] = []
        if tiles == 1 and not self._split:
            return [grads], copies
        return [_like(grads, views) for views in _gradients(self._cuts, grads, tiles, copies)], copies

    def collect(self, copies: Sequence[_Copied]) -> None:
        """Copy to the gradients what tiles have written to copies."""
        for cut, parts, array in copies:
            cut.write_back(parts, array)


def _parameters(cuts: Mapping[str, Any], params: Any, tiles: int) -> list[TileViews]:
    views = [TileViews(params, params) for _ in range(tiles)]
    for name, cut in cuts.items():
        if cut is not None:
            array = params[name]
            parts: list[Any] = _parameters(cut, array, tiles) if type(cut) is dict else cut.arrays(array)
            for tile, part in enumerate(parts):
                views[tile][name] = part
    return views


def _gradients(cuts: Mapping[str, Any], grads: Any, tiles: int, copies: list[_Copied]) -> list[dict[str, Any]]:
    views = [dict(grads) for _ in range(tiles)]
    for name, array in grads.items():
        cut = cuts.get(name)
        if isinstance(array, dict):
            parts: list[Any] = _gradients(cut or {}, array, tiles, copies)
        elif cut is None:
            parts = [array, *(_own(array) for _ in range(tiles - 1))]
        elif cut.in_one:
            parts = cut.views(array)
        else:
            copies.append(_Copied(cut, cut.copied(array), array))
            parts = cut.parts(copies[-1].parts)
        for tile, part in enumerate(parts):
            views[tile][name] = part
    return views


def _own(array: Array) -> Array:
    """Return a new array for a tile's gradient, or for the new value of an integer array, which starts as the old."""
    return array.copy() if array.dtype.kind in "iub" else namespace(array).empty_like(array)


def copied(grads: Any) -> Any:
    """Return new arrays for gradients, which hold what these hold wherever that may be a mark.

    By marks, which are NaN, it is found that a layer does not write a gradient. Copying all would cost a pass.
    """
    if isinstance(grads, Mapping):
        return _like(grads, {name: copied(value) for name, value in grads.items()})
    plain = isinstance(grads, np.ndarray) and grads.dtype.kind in "fc" and grads.size
    return np.empty_like(grads) if plain and not np.isnan(grads.flat[0]) else grads.copy()


def _like(grads: Any, views: dict[str, Any]) -> Params:
    return type(grads)(views) if isinstance(grads, dict) else views


def require_equal_integers(targets: Sequence[Any], path: str = "") -> None:
    """Raise :class:`LayoutError` if tiles have written different new values to an integer array.

    ``targets`` are what the tiles wrote their gradients to; ``path`` precedes the names of their arrays.
    """
    for name, value in targets[0].items():
        if isinstance(value, Mapping):
            require_equal_integers([target[name] for target in targets], f"{path}{name}.")
        elif value.dtype.kind in "iub":
            for tile, target in enumerate(targets):
                if (target[name] != value).any():
                    raise LayoutError(
                        f"the new value of integer array {path + name!r} differs between tiles: {value.tolist()} on "
                        f"the first tile of this rank, {target[name].tolist()} on tile {tile} after it; it must follow "
                        "from the value that each is given, not from the tile"
                    )


def _cut(spec: ParameterSpec) -> _Cut:
    part = spec.part
    assert part is not None
    before, after = spec.shape[: part.axis], spec.shape[part.axis + 1 :]
    rows, inner = prod(before), prod(after)
    firsts, shapes, places, ranges = [], [], [0], []
    for own in part.tiles:
        local = _local(own, part.ranges) or ((0, 0),)
        width = sum(stop - start for start, stop in local)
        starts = accumulate((stop - start for start, stop in local), initial=0)
        ranges += [
            (start * inner, (stop - start) * inner, places[-1] + first * inner, width * inner)
            for (start, stop), first in zip(local, starts, strict=False)
        ]
        firsts.append((*(slice(None),) * part.axis, slice(*local[0])))
        shapes.append((*before, width, *after))
        places.append(places[-1] + _aligned(rows * width * inner))
    in_one = all(len(own) == 1 for own in part.tiles)
    columns = spec.shape[part.axis] * inner
    return _Cut(rows, columns, in_one, tuple(firsts), tuple(shapes), tuple(places), np.array(sorted(ranges)))


def _aligned(size: int) -> int:
    """Return the next multiple of 16 numbers, so that every tile's part begins as the first does in a cache line."""
    return -size // 16 * -16


def _union(specs: Sequence[ParameterSpec]) -> ParameterSpec:
    """Return the spec of the union of the parts that the tiles hold of one parameter."""
    first = specs[0]
    parts = [spec.part for spec in specs if spec.part is not None]
    if not parts:
        return first
    if len(parts) < len(specs) or any((part.shape, part.axis) != (parts[0].shape, parts[0].axis) for part in parts):
        raise LayoutError(f"parameter {first.name!r} is split in another way on some of a rank's {len(specs)} tiles")
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(r for part in parts for r in part.ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    part = replace(parts[0], ranges=tuple(merged), tiles=tuple(part.ranges for part in parts))
    axis = part.axis
    held = sum(stop - start for start, stop in merged)
    return replace(first, shape=(*part.shape[:axis], held, *part.shape[axis + 1 :]), part=part)


def _local(own: Ranges, held: Ranges) -> Ranges:
    """Return where the ranges ``own`` lie in the concatenation of the ranges ``held``, which contain them."""
    found = []
    for start, stop in own:
        before = 0
        for a, b in held:
            if a <= start and stop <= b:
                found.append((before + start - a, before + stop - a))
                break
            before += b - a
        else:  # nothing, on a rank of which some or all tiles hold nothing
            found.append((0, 0))
    return tuple(found)
