"""Find corrupted memory: compare parameters and optimizer state with their last hash, and copies with each other.

[Note: what a check sees] Right after an update, a rank computes the CRC32 of the parameters and optimizer state that
it has written. It computes the CRC32 again just before the next update. In between are a forward and a backward pass,
which change neither. If the two CRC32s differ, bits have flipped in that time. This works for shards and for replicated
state. Then all ranks exchange their CRC32s: copies of the same elements must have equal ones. Copies exist on different
nodes, on tensor ranks that all hold a whole parameter, and on pipeline stages that share a tied parameter. This second
comparison also finds bits that flipped at any earlier time. A CRC32 detects every change of up to 32 neighbouring bits.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpizero._util.text import crc32
from mpizero.comm import ProcessGrid
from mpizero.errors import IntegrityError
from mpizero.kernels import to_host
from mpizero.parallel.batch.step_scalars import everyone_of
from mpizero.parallel.optimizer.sharded_update import Updater
from mpizero.parallel.optimizer.tied_parameters import home_of
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.types import Array, ParameterSpec, Part

#: The most damaged ranges that an error message names.
MAX_NAMED = 4


class _Tensor(NamedTuple):
    """Identify an array of parameters or optimizer state.

    ``kind`` is "parameters" or "optimizer/<slot>", ``name`` the parameter's name. ``part`` is the slice of the whole
    tensor that this tensor rank holds; None if it holds the whole.
    """

    kind: str
    name: str
    part: Part | None

    def __str__(self) -> str:
        kind = "parameter" if self.kind == "parameters" else self.kind
        return f"{kind} {self.name!r}"


class _Range(NamedTuple):
    """Describe a range of state that a rank updates: elements ``start:stop`` of the flattened array ``tensor``."""

    tensor: _Tensor
    start: int
    stop: int


class _Plan(NamedTuple):
    """List the ranges of state that each rank updates.

    Ranges of different ranks that overlap are cut until they are equal or disjoint, so that copies can be compared.

    Attributes
    ----------
    ranges : list of list of _Range
        The ranges of each rank.
    views : list of array
        The values of this rank's ranges; the only attribute that differs between ranks.
    copies : list of list of (int, int)
        For each range that several ranks hold: pairs of a rank and the index of the range in ``ranges[rank]``.
    """

    ranges: list[list[_Range]]
    views: list[Array]
    copies: list[list[tuple[int, int]]]

    @property
    def counts(self) -> list[int]:
        return [2 * len(ranges) for ranges in self.ranges]


class Integrity:
    """Compute and compare hashes of one model's parameters and optimizer state.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    store : ParameterStore
        The parameters that this rank holds.
    every : int
        Number of steps between two hashes that :meth:`after_step` computes; 0 means none.
    """

    def __init__(self, grid: ProcessGrid, store: ParameterStore, every: int) -> None:
        self.grid, self.store, self.every = grid, store, every
        self.everyone = everyone_of(grid)
        self._updater: Updater | None = None
        self._plan: _Plan | None = None
        self._taken: tuple[int, Array] | None = None

    def watch(self, updater: Updater) -> None:
        """Include the optimizer state of ``updater`` from now on, instead of an earlier updater's. Not collective."""
        self._updater, self._plan = updater, None
        self.forget()

    def forget(self) -> None:
        """Drop the last hash, because state was changed on purpose. Not collective, but every rank must call it."""
        self._taken = None

    def after_step(self, step: int) -> None:
        """Compute and keep hashes of this rank's state if ``step`` is a multiple of ``every``.

        The first time after :meth:`watch` is collective over all ranks.
        """
        if self.every and step % self.every == 0:
            self._taken = (self.store.version, self._hashes())

    def verify(self) -> None:
        """Call :meth:`check` and drop the last hash; do nothing if no hash is kept. A check is collective.

        Raises
        ------
        IntegrityError
            On every rank, if memory is corrupted.
        """
        if self._taken is not None:
            self.check()
            self.forget()

    def check(self) -> None:
        """Compare copies with each other, and the state with its last hash if one is kept. Collective over all ranks.

        Raises
        ------
        IntegrityError
            On every rank, if memory is corrupted. The message names the damaged tensors, elements and ranks.
        """
        now, taken = self._hashes(), self._taken
        known = taken is not None and taken[0] == self.store.version
        changed = now != taken[1] if known and taken is not None else np.zeros(now.size, bool)
        plan = self._planned()
        gathered = np.empty(sum(plan.counts), np.uint32)
        self.everyone.allgatherv(np.concatenate([now, changed.astype(np.uint32)]), gathered, plan.counts, "integrity")
        hashes, marks = self._unpacked(gathered, plan)
        damaged = [(rank, place) for rank, mark in enumerate(marks) for place in np.flatnonzero(mark).tolist()]
        differing = [copies for copies in plan.copies if len({int(hashes[r][p]) for r, p in copies}) > 1]
        if damaged or differing:
            raise IntegrityError(self._report(plan, hashes, damaged, differing))

    # ------------------------------------------------------------------ what ranks hold

    def _hashes(self) -> Array:
        self.store.wait()
        self.store.refresh()  # bits may have turned over where the values come from
        return np.fromiter((crc32(to_host(view).view(np.uint8)) for view in self._planned().views), np.uint32)

    def _planned(self) -> _Plan:
        """Return which rank updates which ranges. The first call after :meth:`watch` is collective over all ranks."""
        if self._plan is None:
            held = list(self._held())
            everyone = self.everyone.allgather_object([rng for rng, _ in held], "what ranks hold")
            cuts: dict[_Tensor, set[int]] = defaultdict(set)
            for rng in (rng for ranges in everyone for rng in ranges):
                cuts[rng.tensor] |= {rng.start, rng.stop}
            places = {tensor: sorted(found) for tensor, found in cuts.items()}
            ranges = [[part for rng in of_rank for part in _cut(rng, places[rng.tensor])] for of_rank in everyone]
            holders: dict[_Range, list[tuple[int, int]]] = defaultdict(list)
            for rank, own in enumerate(ranges):
                for place, rng in enumerate(own):
                    holders[rng].append((rank, place))
            views = [
                view[part.start - rng.start : part.stop - rng.start]
                for rng, view in held
                for part in _cut(rng, places[rng.tensor])
            ]
            self._plan = _Plan(ranges, views, [found for found in holders.values() if len(found) > 1])
        return self._plan

    def _held(self) -> Iterator[tuple[_Range, Array]]:
        """Yield every range of state that this rank updates, with a view of its values."""
        store, updater = self.store, self._updater
        for share in (store.share,) if store.sharded else store.peer_shares:
            for unit, span in zip(store.layout.units, share.spans, strict=True):
                shift = store.base + share.offsets[unit.index] - span.start if store.sharded else 0
                for entry, part in store.layout.pieces(span):
                    values = store.values[part.start + shift : part.stop + shift]
                    yield from _named("parameters", entry.spec, part.start - entry.offset, values)
        for slot in sorted(updater.state) if updater is not None else ():
            assert updater is not None
            for piece in updater.state_pieces(slot):
                values = updater.state[slot][piece.state : piece.state + piece.size]
                yield from _named(f"optimizer/{slot}", piece.spec, piece.start, values)

    # ------------------------------------------------------------------ comparison

    def _unpacked(self, gathered: Array, plan: _Plan) -> tuple[list[Array], list[Array]]:
        """Split the gathered numbers by rank, and return two lists with an array for each rank.

        The first has the hashes of the rank's ranges. The second has 1 for each range that differs from its last hash,
        and 0 for the others.
        """
        parts = np.split(gathered, np.cumsum(plan.counts)[:-1])
        halves = [(part[: part.size // 2], part[part.size // 2 :]) for part in parts]
        return [first for first, _ in halves], [second for _, second in halves]

    def _report(
        self,
        plan: _Plan,
        hashes: Sequence[Array],
        damaged: Sequence[tuple[int, int]],
        differing: Sequence[Sequence[tuple[int, int]]],
    ) -> str:
        """Return the text of the error, equal on all ranks, which lists damaged ranges. Collective over all ranks.

        ``damaged`` are the ranges that changed between two updates, as pairs (rank, index into the rank's ranges).
        ``differing`` has a list of such pairs for each range whose copies are not equal.
        """
        hosts = self.everyone.allgather_object(os.uname().nodename, "integrity")
        lines = []
        for rank, place in damaged:
            lines.append(
                f"{_place(plan.ranges[rank][place])} changed on rank {rank} ({hosts[rank]}) between two updates"
            )
        for copies in differing:
            if set(copies) & set(damaged):
                continue  # the cause is known
            values = {rank: int(hashes[rank][place]) for rank, place in copies}
            rng = _place(plan.ranges[copies[0][0]][copies[0][1]])
            lines.append(f"{rng} {_minority(values, hosts)}")
        more = f"; and {len(lines) - MAX_NAMED} ranges more" if len(lines) > MAX_NAMED else ""
        split = (
            ". If a layer of your own is split over the tensor group, see first whether its ranks compute different "
            "gradients of it: mpizero.testing.assert_same_as_serial"
        )
        return (
            f"state in memory is damaged: {'; '.join(lines[:MAX_NAMED])}{more}; nothing was saved since it was found. "
            "Resume from the last checkpoint; if it happens on the same host again, take that one out of service"
            f"{split if self.grid.tensor.size > 1 and not damaged else ''}"
        )


def _named(kind: str, spec: ParameterSpec, start: int, values: Array) -> Iterator[tuple[_Range, Array]]:
    if values.size:
        yield _Range(_Tensor(kind, home_of(spec), spec.part), start, start + values.size), values


def _cut(rng: _Range, places: Sequence[int]) -> list[_Range]:
    inside = [place for place in places if rng.start <= place <= rng.stop]
    return [rng._replace(start=start, stop=stop) for start, stop in pairwise(inside)]


def _place(rng: _Range) -> str:
    return f"{rng.tensor}, elements {rng.start} to {rng.stop - 1},"


def _minority(values: dict[int, int], hosts: Sequence[str]) -> str:
    """Return a text that names the ranks whose copies differ from the majority, or says that there is no majority.

    ``values`` maps ranks to the hashes of their copies of one range.
    """
    counted = Counter(values.values()).most_common()
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        who = ", ".join(f"{rank} ({hosts[rank]})" for rank in values)
        return f"differs between ranks {who}, and with so few copies none can be said to be right"
    wrong = [rank for rank, value in values.items() if value != counted[0][0]]
    who = ", ".join(f"{rank} ({hosts[rank]})" for rank in wrong)
    return f"on rank {who} differs from its {counted[0][1]} equal copies"
