"""Let one rank of a group take the part of several: virtual ranks, whose collectives are computed together.

The tiles of a training are numbered; each rank of a group hosts as many successive ones as every other. A layer that is
split over a :class:`VirtualGroup` computes what it would compute on a rank of a group with one rank for each tile. What
the tiles of a process bring to a sum is added in the tree's order first, so that the real group adds the roots of
subtrees: the bits are those of the group with one rank for each tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpizero.errors import CollectiveError, ConfigError
from mpizero.kernels.matmul_tile import sums_of_parts
from mpizero.nn.arrays import namespace
from mpizero.nn.tiles.coroutines import Meeting, Mismatch
from mpizero.types import Array, Group, ShiftRequest


class _Call(NamedTuple):
    """Describe one tile's call of a collective: its name, settings that are equal for all tiles, and its arrays."""

    kind: str
    settings: tuple[Any, ...]
    arrays: tuple[Array, ...]

    @property
    def comparable(self) -> tuple[Any, ...]:
        """The settings and types that are equal in the calls of all tiles; gathers and shifts may differ in length."""
        sums = self.kind not in ("all_gather", "shift")
        return self.kind, self.settings, [(x.dtype, x.shape if sums else x.ndim) for x in self.arrays]

    def __str__(self) -> str:
        shapes = ", ".join(f"{x.dtype} {x.shape}" for x in self.arrays)
        return f"{self.kind}({shapes}{''.join(f', {setting!r}' for setting in self.settings)})"


class VirtualRanks:
    """Host successive tiles of a group on each of its ranks.

    Parameters
    ----------
    group : Group
        The real ranks.
    tiles : int
        Number of tiles of all ranks together: a multiple of the group's size by a power of two.

    Attributes
    ----------
    groups : tuple of VirtualGroup
        For each tile of this rank, in order, the group as the tile sees it.

    Raises
    ------
    ConfigError
        ``tiles`` is no such multiple.
    """

    def __init__(self, group: Group, tiles: int) -> None:
        self.real, self.tiles = group, tiles
        self.hosted, rest = divmod(tiles, group.size)
        if rest or self.hosted & (self.hosted - 1) or not self.hosted:
            raise ConfigError(
                f"{tiles} tiles cannot be hosted by {group.size} ranks: each must have 1, 2, 4, 8, ... of them"
            )
        meeting = Meeting(self.hosted, self._answer)
        self.groups = tuple(
            VirtualGroup(group.rank * self.hosted + member, tiles, member, meeting) for member in range(self.hosted)
        )

    def _answer(self, calls: Sequence[_Call]) -> Sequence[Any]:
        """Compute a collective for the tiles of this rank; collective over the real group."""
        first = calls[0]
        if any(call.comparable != first.comparable for call in calls[1:]):
            raise Mismatch
        found: Sequence[Any] = getattr(self, f"_{first.kind}")([call.arrays for call in calls], *first.settings)
        return found

    def _all_reduce(self, arrays: Sequence[tuple[Array]], tag: str) -> Sequence[Array]:
        total = self._sum([x for (x,) in arrays])
        return self._copies(total if self.real.size == 1 else self.real.all_reduce(total, tag))

    def _all_max(self, arrays: Sequence[tuple[Array]], tag: str) -> Sequence[Array]:
        largest = namespace(arrays[0][0]).stack([x for (x,) in arrays]).max(axis=0)
        return self._copies(largest if self.real.size == 1 else self.real.all_max(largest, tag))

    def _all_gather(
        self, arrays: Sequence[tuple[Array]], axis: int, sizes: tuple[int, ...], tag: str
    ) -> Sequence[Array]:
        whole = namespace(arrays[0][0]).concatenate([x for (x,) in arrays], axis=axis)
        if self.real.size > 1:
            whole = self.real.all_gather(whole, axis, self._of_ranks(sizes), tag)
        if isinstance(whole, np.ndarray):
            whole.flags.writeable = False  # all tiles read the same array
        return [whole] * self.hosted

    def _reduce_scatter(
        self, arrays: Sequence[tuple[Array]], axis: int, sizes: tuple[int, ...], tag: str
    ) -> Sequence[Array]:
        terms = [x for (x,) in arrays]
        if self.real.size == 1:
            return sums_of_parts(terms, axis, sizes)
        mine = self.real.reduce_scatter(self._sum(terms), axis, self._of_ranks(sizes), tag)
        first = self.real.rank * self.hosted
        xp = namespace(mine)
        places = _places(sizes[first : first + self.hosted], axis, mine.ndim)
        return [xp.ascontiguousarray(mine[place]) for place in places]

    def _shift(self, arrays: Sequence[tuple[Array, ...]], by: int, tag: str) -> Sequence[ShiftRequest]:
        """Pass arrays from each tile to another: within this rank by copies, between ranks by two real shifts."""
        ranks, over = divmod(by, self.hosted)
        received: list[tuple[Array, ...]] = [()] * self.hosted
        requests: list[tuple[int, ShiftRequest]] = []
        for member, brought in enumerate(arrays):
            target, moved = (member + over) % self.hosted, ranks + (member + over) // self.hosted
            if moved % self.real.size:
                requests.append((target, self.real.shift(brought, moved, tag)))
            else:
                received[target] = tuple(namespace(x).array(x) for x in brought)
        coming = dict(requests)
        return [coming.get(member) or Arrived(received[member]) for member in range(self.hosted)]

    def _sum(self, terms: Sequence[Array]) -> Array:
        """Return the sum of this rank's terms, in the tree's order, as a new contiguous array."""
        (total,) = sums_of_parts([term.reshape(1, -1) for term in terms], 1, (terms[0].size,))
        return total.reshape(terms[0].shape)

    def _copies(self, x: Array) -> Sequence[Array]:
        return [x, *(namespace(x).array(x) for _ in range(self.hosted - 1))]

    def _of_ranks(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sum(sizes[first : first + self.hosted]) for first in range(0, self.tiles, self.hosted))


class Arrived(NamedTuple):
    """Hold the arrays of a shift within this rank; implements :class:`mpizero.types.ShiftRequest`."""

    arrays: tuple[Array, ...]

    def wait(self) -> tuple[Array, ...]:
        """Return the arrays. Not collective."""
        return self.arrays

    def test(self) -> bool:
        """Return True. Not collective."""
        return True


@dataclass(frozen=True, eq=False)
class VirtualGroup:
    """Represent a group as one of its tiles sees it, with one rank for each tile; implements :class:`Group`.

    Its methods are collective over all tiles: those of this process come together in :func:`run_in_turns`.

    Parameters
    ----------
    rank, size : int
        Number of this tile, and number of all tiles.
    member : int
        Number of this tile among those of this process.
    meeting : Meeting
        Where the tiles of this process come together.
    """

    rank: int
    size: int
    member: int
    meeting: Meeting

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the sum of the tiles' arrays as a new array. Collective."""
        self._require("all_reduce", x, tag)
        total: Array = self._wait("all_reduce", (x,), tag)
        return total

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum of the tiles' arrays as a new array. Collective."""
        self._require("all_max", x, tag)
        largest: Array = self._wait("all_max", (x,), tag)
        return largest

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return the arrays of all tiles, concatenated along ``axis``, as a read-only array. Collective."""
        axis = self._along("all_gather", x, axis, sizes, tag)
        if x.shape[axis] != sizes[self.rank]:
            raise self._error("all_gather", x, tag, f"sizes[{self.rank}] is {sizes[self.rank]} along axis {axis}")
        whole: Array = self._wait("all_gather", (x,), axis, tuple(sizes), tag)
        return whole

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this tile's part of the sum of the tiles' arrays along ``axis``, as a new array. Collective."""
        self._require("reduce_scatter", x, tag)
        axis = self._along("reduce_scatter", x, axis, sizes, tag)
        if x.shape[axis] != sum(sizes):
            raise self._error("reduce_scatter", x, tag, f"sizes {sizes} do not add up to its length along axis {axis}")
        part: Array = self._wait("reduce_scatter", (x,), axis, tuple(sizes), tag)
        return part

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to tile + ``by``, and to receive as many from tile - ``by``. Collective."""
        request: ShiftRequest = self._wait("shift", tuple(arrays), by, tag)
        return request

    # The checks of a real group, which need not come together for them: the error names the caller's line.

    def _require(self, kind: str, x: Array, tag: str) -> None:
        if x.dtype.char not in "fd":
            raise self._error(kind, x, tag, "expected float32 or float64")

    def _along(self, kind: str, x: Array, axis: int, sizes: Sequence[int], tag: str) -> int:
        """Check ``axis`` and ``sizes``; return the axis counted from the front."""
        if not -x.ndim <= axis < x.ndim:
            raise self._error(kind, x, tag, f"axis {axis} does not exist")
        if len(sizes) != self.size or min(sizes) < 0:
            raise self._error(kind, x, tag, f"sizes {sizes} are not one length >= 0 for each of {self.size} tiles")
        return axis % x.ndim

    def _error(self, kind: str, x: Array, tag: str, reason: str) -> CollectiveError:
        return CollectiveError(f"tile {self.rank}: {_Call(kind, (tag,), (x,))}: {reason}")

    def _wait(self, kind: str, arrays: tuple[Array, ...], *settings: Any) -> Any:
        return self.meeting.wait(self.member, _Call(kind, settings, arrays))


def _places(sizes: Sequence[int], axis: int, axes: int) -> list[tuple[slice, ...]]:
    """Return, for each of the parts of an array along ``axis``, the index that selects it."""
    places, start = [], 0
    for size in sizes:
        places.append((*(slice(None),) * axis, slice(start, start + size), *(slice(None),) * (axes - axis - 1)))
        start += size
    return places
