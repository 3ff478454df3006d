"""Give each tile of a rank its part of the rank's parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpizero.errors import LayoutError
from mpizero.nn.layer import namespace
from mpizero.types import Array, ParameterSpec, Params

#: Half-open ranges of indices along the axis of a parameter that is split.
Ranges = tuple[tuple[int, int], ...]


class TileViews(dict[str, Any]):
    """Hold the parameters of a tile by name, with the ``poll`` and ``gathered`` of the rank's parameters, if any."""

    def __init__(self, views: Mapping[str, Any], source: Any) -> None:
        super().__init__(views)
        for name in ("poll", "gathered"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))


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
    def _ranges(self) -> dict[str, tuple[int, tuple[Ranges, ...]]]:
        """For each split parameter: the axis, and the ranges of each tile in the array that the rank holds."""
        found = {}
        for spec in self.specs:
            if spec.part is not None:
                ranges = spec.part.ranges
                found[spec.name] = spec.part.axis, tuple(_local(own, ranges) for own in spec.part.tiles)
        return found

    def parameters(self, params: Params, tile: int) -> Params:
        """Return the tile's parameters, as contiguous arrays: views of ``params`` where possible, else copies."""
        return TileViews(self._each(params, "", lambda name, array: self._taken(name, array, tile)), params)

    def gradients(self, grads: Params, tile: int, *, first: bool) -> Params:
        """Return arrays that the tile writes its gradients to.

        They are views of ``grads``, or new arrays that :meth:`collect` copies back. With ``first`` False, so are those
        of the parameters that every tile holds whole; all tiles compute the same gradients of these.
        """

        def target(name: str, array: Array) -> Array:
            if name in self._ranges:
                return self._view(name, array, tile)
            return array if first else namespace(array).empty_like(array)

        views = self._each(grads, "", target)
        return type(grads)(views) if isinstance(grads, dict) else views

    def collect(self, grads: Params, targets: Params, tile: int) -> None:
        """Copy to ``grads`` what the tile has written to arrays that are not views of ``grads``."""

        def copied(name: str, array: Array) -> Array:
            if len(self._tile_ranges(name, tile)) > 1:
                values, start = _found(targets, name), 0
                for place, size in self._slices(name, tile):
                    axis = self._ranges[name][0]
                    array[place] = values[(*(slice(None),) * axis, slice(start, start + size))]
                    start += size
            return array

        self._each(grads, "", copied)

    def _each(self, tree: Any, prefix: str, use: Any) -> dict[str, Any]:
        result = {}
        for key, value in tree.items():
            if isinstance(value, Mapping):
                inner = self._each(value, f"{prefix}{key}.", use)
                result[key] = TileViews(inner, value) if hasattr(value, "poll") else inner
            else:
                result[key] = use(prefix + key, value)
        return result

    def _tile_ranges(self, name: str, tile: int) -> Ranges:
        return self._ranges[name][1][tile] if name in self._ranges else ()

    def _slices(self, name: str, tile: int) -> list[tuple[tuple[slice, ...], int]]:
        axis = self._ranges[name][0]
        return [((*(slice(None),) * axis, slice(a, b)), b - a) for a, b in self._tile_ranges(name, tile)]

    def _view(self, name: str, array: Array, tile: int) -> Array:
        """Return the tile's part of ``array``: a view if it is one range, else a copy."""
        parts = [array[place] for place, _ in self._slices(name, tile)]
        joined: Array = parts[0] if len(parts) == 1 else namespace(array).concatenate(parts, self._ranges[name][0])
        return joined

    def _taken(self, name: str, array: Array, tile: int) -> Array:
        if name not in self._ranges:
            return array
        taken: Array = namespace(array).ascontiguousarray(self._view(name, array, tile))
        return taken


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
    return tuple(found)


def _found(tree: Any, name: str) -> Array:
    for key in name.split("."):
        tree = tree[key]
    array: Array = tree
    return array
