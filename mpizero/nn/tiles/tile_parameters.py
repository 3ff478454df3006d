"""Give each tile of a rank its part of the rank's parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from mpizero.errors import LayoutError
from mpizero.layout.flat import nested
from mpizero.nn.layer import namespace
from mpizero.types import Array, ParameterSpec, Params

#: Half-open ranges of indices along the axis of a parameter that is split.
Ranges = tuple[tuple[int, int], ...]


class TileViews(dict[str, Any]):
    """Hold the parameters of a tile by name, with the ``poll`` and ``gathered`` of the rank's parameters, if any."""

    __slots__ = ("gathered", "poll")

    def __init__(self, views: Mapping[str, Any], source: Any) -> None:
        super().__init__(views)
        self.poll, self.gathered = getattr(source, "poll", None), getattr(source, "gathered", False)


class _Cut(NamedTuple):
    """Say where the tiles of a rank lie in the array of a parameter that the rank holds.

    ``places`` has, for each tile, the index of each of its ranges, and ``starts`` where the range begins in the tile's
    own array.
    """

    axis: int
    places: tuple[tuple[tuple[slice, ...], ...], ...]
    starts: tuple[tuple[tuple[slice, ...], ...], ...]

    def of(self, array: Array, tile: int) -> Array:
        """Return the tile's part of ``array``: a view if it is one range, else a copy."""
        places = self.places[tile]
        if len(places) == 1:
            view: Array = array[places[0]]
            return view
        joined: Array = namespace(array).concatenate([array[place] for place in places], self.axis)
        return joined


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

    def parameters(self, params: Params, tile: int) -> Params:
        """Return the tile's parameters, as contiguous arrays: views of ``params`` where possible, else copies."""
        return _parameters(self._cuts, params, tile) if self._split else params

    def gradients(self, grads: Params, tile: int, *, first: bool) -> Params:
        """Return arrays that the tile writes its gradients to.

        They are views of ``grads``, or copies, from which :meth:`collect` copies back. With ``first`` False, those of
        the parameters that every tile holds whole are new arrays, as all tiles compute the same gradients of these; so
        are integer arrays, which hold the old values.
        """
        return _like(grads, _gradients(self._cuts, grads, tile, first)) if self._split or not first else grads

    def collect(self, grads: Params, targets: Params, tile: int) -> None:
        """Copy to ``grads`` what the tile has written to arrays that are not views of ``grads``."""
        if self._split:
            _collect(self._cuts, grads, targets, tile)


def _parameters(cuts: Mapping[str, Any], params: Any, tile: int) -> TileViews:
    views = TileViews(params, params)
    for name, cut in cuts.items():
        if type(cut) is dict:
            views[name] = _parameters(cut, params[name], tile)
        elif cut is not None:
            array = cut.of(params[name], tile)
            views[name] = array if array.flags.c_contiguous else namespace(array).ascontiguousarray(array)
    return views


def _gradients(cuts: Mapping[str, Any], grads: Any, tile: int, first: bool) -> dict[str, Any]:
    views = dict(grads)
    for name, array in grads.items():
        cut = cuts.get(name)
        if isinstance(array, Mapping):
            views[name] = _gradients(cut or {}, array, tile, first)
        elif cut is not None:
            views[name] = cut.of(array, tile)
        elif not first:
            views[name] = array.copy() if array.dtype.kind in "iub" else namespace(array).empty_like(array)
    return views


def copied(grads: Any) -> Any:
    """Return copies of gradients: of what they hold, too, by which it is found that a layer does not write them."""
    if isinstance(grads, Mapping):
        return _like(grads, {name: copied(value) for name, value in grads.items()})
    return grads.copy()


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


def _collect(cuts: Mapping[str, Any], grads: Any, targets: Any, tile: int) -> None:
    for name, cut in cuts.items():
        if type(cut) is dict:
            _collect(cut, grads[name], targets[name], tile)
        elif cut is not None and len(cut.places[tile]) != 1:
            for place, start in zip(cut.places[tile], cut.starts[tile], strict=True):
                grads[name][place] = targets[name][start]


def _cut(spec: ParameterSpec) -> _Cut:
    part = spec.part
    assert part is not None
    before, places, starts = (slice(None),) * part.axis, [], []
    for own in part.tiles:
        ranges = _local(own, part.ranges)
        bounds = [0, *accumulate(stop - start for start, stop in ranges)]
        places.append(tuple((*before, slice(start, stop)) for start, stop in ranges))
        starts.append(tuple((*before, slice(start, stop)) for start, stop in pairwise(bounds)))
    return _Cut(part.axis, tuple(places), tuple(starts))


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
