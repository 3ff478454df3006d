"""Store the parameters of a rank: each node (or rank, without shared memory) holds all of them, or only its shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import Timeline
from mpizero.comm.reduce import Gathering, begin_gather
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, Unit, united, views
from mpizero.parallel.parameters import publication
from mpizero.parallel.parameters.allocator import STATE_ADVICE, Memory, needing, on_all_ranks
from mpizero.parallel.parameters.integer_state import IntegerState
from mpizero.parallel.parameters.message_progress import MessageProgress
from mpizero.parallel.parameters.publication import Publication, let_arrive
from mpizero.parallel.parameters.shards import Share
from mpizero.types import Array, ParameterSpec

#: Number of gathered units that a sharded store has room for.
SLOTS = 2


class ParameterViews(dict[str, Any]):
    """Hold nested views of parameters, by name; ``poll()`` lets messages in flight progress.

    A layer that consists of other layers calls ``poll`` between them, through :func:`mpizero.nn.layer.poll`. If
    ``gathered`` is true, the memory of the views holds other parameters between the forward and the backward pass, so
    a layer must not keep the views in its cache.
    """

    __slots__ = ("gathered", "poll")

    def __init__(self, views: Mapping[str, Any], poll: Callable[[], None], *, gathered: bool = False) -> None:
        super().__init__(
            {k: ParameterViews(v, poll, gathered=gathered) if type(v) is dict else v for k, v in views.items()}
        )
        self.poll, self.gathered = poll, gathered


class ParameterProvider(Protocol):
    """Define the interface of a :class:`ParameterStore`, and of its copy on a GPU, to code that reads parameters."""

    layout: FlatLayout
    timeline: Timeline

    def unshard(
        self, unit: Unit, following: Unit | None = None, *, by_block: bool = False
    ) -> AbstractContextManager[dict[str, Any]]:
        """Yield nested views of a unit's parameters, by block; :meth:`ParameterStore.unshard` describes the parameters.

        Collective over the data group if parameters are sharded.
        """

    @property
    def progress(self) -> MessageProgress:
        """The object that runners poll between layers, so that messages in flight progress."""

    def wait(self, block: str | None = None) -> None:
        """Wait until the updated parameters of ``block`` have arrived from their owners; None: those of all blocks."""


class ParameterStore:
    """Store the parameters: all of them on every node, or only the shards of the node's ranks.

    If there is a single node and its ranks share memory, its window holds all parameters, and no unit is ever gathered.

    [Note: the next unit] A sharded store has two slots, buffers for one gathered unit each. While one unit is used, the
    next one is gathered into the other slot (a prefetch). The prefetch begins when the current unit is complete on all
    ranks of the node, because no rank reads the other slot any more. Every rank gathers the same units in the same
    order.

    [Note: newer values on a GPU] If a rank is alone in its data group and trains on a GPU, the GPU may have newer
    parameters than this store. They are copied to the host when :attr:`values`, :meth:`owned` or :meth:`unshard` is
    used.

    Parameters
    ----------
    layout : FlatLayout
        The layout of the flat parameter vector.
    grid : ProcessGrid
        The ranks.
    memory : Memory
        Allocates the arrays.
    sharded : bool
        Whether each node keeps only its ranks' shards; units are then gathered when they are needed. It has no effect
        on a single node.
    dtype : numpy dtype
        The data type of all parameters.
    timeline : Timeline, optional
        Records when units are gathered, and when updated parameters are sent.

    Attributes
    ----------
    dtype : numpy dtype
        The data type of all parameters.
    version : int
        How often :meth:`publish` was called; 1 while the parameters have their initial values.
    """

    def __init__(
        self,
        layout: FlatLayout,
        grid: ProcessGrid,
        memory: Memory,
        sharded: bool,
        dtype: Any,
        *,
        timeline: Timeline | None = None,
    ) -> None:
        self.layout, self.grid, self.memory, self.dtype = layout, grid, memory, np.dtype(dtype)
        self.timeline = timeline or Timeline()
        self.sharded = sharded and grid.peers.size > 1
        self.share = Share(layout, grid.data.rank, grid.data.size)
        members = [Share(layout, rank, grid.data.size) for rank in grid.node_ranks]
        self.bases = np.concatenate([[0], np.cumsum([share.size for share in members])]).tolist()
        size = int(self.bases[-1]) if self.sharded else layout.size
        self.peer_shares = tuple(Share(layout, rank, grid.data.size) for rank in grid.peer_ranks)
        self._slots: tuple[Array, ...] = ()
        self._next = 0
        with on_all_ranks(grid.world, "parameters"):
            (self._values,) = memory.shared("parameters", [(size,)], dtype)
            if self.sharded:
                self._slots = memory.shared("buffers", [(layout.largest_gathered,)] * SLOTS, dtype)
        self._coming: tuple[Unit, Gathering] | None = None
        self._regions = () if self.sharded or grid.peers.size == 1 else layout.regions(publication.REGION)
        self._needed = {block: self._last_region(block) for unit in layout.units for block in unit.blocks}
        self._published: list[Publication] = []
        weakref.finalize(self, let_arrive, self._published)
        self.progress = memory.progress
        self.progress.register("parameters", self.poll, finish=self.wait)
        self._source: Callable[[Array], None] | None = None
        self._outdated = False
        self._views: dict[tuple[int, int], dict[str, Any]] = {}
        self.version = 0
        #: Arrays that layers are given beside the parameters; None before they are set.
        self.integers: IntegerState | None = None

    @property
    def values(self) -> Array:
        """The array of all parameters that this node holds. Collective over the data group if some are in flight."""
        if self._published:
            self.wait()
        return self._values_here()

    def take_from(self, source: Callable[[Array], None]) -> None:
        """Record that a GPU has newer parameters, which ``source`` copies to the host array that it is given.

        Not collective. ``source`` is called when the parameters are needed on the host, and dropped by :meth:`owned`,
        because the caller then writes newer values on the host; see [Note: newer values on a GPU].
        """
        self._source, self._outdated = source, True

    def refresh(self) -> None:
        """Copy the parameters from the GPU to the host, even if they were copied since the last update. Not collective.

        Nothing is copied if the host's values are the newest, because they were written after the last update.
        """
        if self._source is not None:
            self._source(self._values)
            self._outdated = False

    def _values_here(self) -> Array:
        if self._outdated:
            self.refresh()
        return self._values

    @property
    def base(self) -> int:
        """The index of the first element of this rank's shard in the array of a sharded store."""
        return int(self.bases[self.grid.node.rank])

    def owned(self, unit: int) -> Array:
        """Return a writable view of this rank's range of the parameters of unit number ``unit``. Not collective."""
        for published in self._published:
            published.wait_own()  # what is still being sent must not change
        span = self.share.spans[unit]
        start = self.base + self.share.offsets[unit] if self.sharded else span.start
        values, self._source = self._values_here(), None  # what is written there is newer than any
        return values[start : start + span.size]

    @contextmanager
    def unshard(self, unit: Unit, following: Unit | None = None, *, by_block: bool = False) -> Iterator[dict[str, Any]]:
        """Yield read-only nested views of a unit's parameters, by block.

        Collective over the data group if the store is sharded; the unit is gathered then, and the views are valid only
        inside the context.

        Parameters
        ----------
        unit : Unit
            The unit to gather now.
        following : Unit or None
            The unit that every rank gathers next, if it is known; its gather begins at once. See [Note: the next unit].
        by_block : bool
            Whether the caller itself calls :meth:`wait` for each block before it reads the block's parameters.
        """
        slot = 0
        if self._published and not by_block:
            self.wait()
        self._values_here()
        if self.sharded:
            with self.timeline.span("publication", unit):
                slot = self._bring(unit)
                if following is not None:
                    self._begin(following)
        key = (unit.index, slot)
        if key not in self._views:
            buffer = (self._slots[slot] if self.sharded else self._values).view()
            buffer.flags.writeable = False
            self._views[key] = self.unit_views(unit, buffer)
        yield self._views[key]

    def unsharded(self, unit: Unit) -> Array:
        """Return the array of the parameters of ``unit``, the unit that a sharded store has gathered last.

        Not collective.
        """
        return self._slots[(self._next - 1) % len(self._slots)][: unit.gathered]

    def publish(self, *, exchange: bool = True, later: bool = False) -> None:
        """Publish updated parameters: make them readable by all ranks. Collective over the data group.

        Parameters
        ----------
        exchange : bool
            Whether to send the ranges that each rank owns to the copies on all nodes. Pass False if the ranks of each
            node have written its whole copy.
        later : bool
            Whether to return while parameters are in flight. The next forward pass then waits for each block's
            parameters before it uses them; anything else waits for all parameters first.
        """
        with self.timeline.span("publication"):
            self.wait()
            published = []
            if exchange and self._regions:
                published = [Publication(self.grid, self.memory, self._values, self._regions, self.peer_shares)]
            self.memory.barrier("publish")
            self._published[:] = published
            if not later:
                self.wait()
        self.version += 1

    def wait(self, block: str | None = None) -> None:
        """Wait until the updated parameters of ``block`` have arrived from their owners; None: those of all blocks.

        After each update, every rank of the data group must at some time wait for all blocks; see [Note: regions] in
        ``parallel/parameters/publication.py``.
        """
        if self._published:
            with self.timeline.span("publication", block or ""):
                self._published[0].wait(None if block is None else self._needed[block])
            if self._published[0].ended:
                self._published.clear()

    def _last_region(self, block: str) -> int:
        """Return how many regions, counted from the first, a rank must wait for before it reads ``block``."""
        ends = [e.span.stop for e in self.layout.entries if e.block == block and e.spec.size]
        return sum(region.start < max(ends, default=0) for _, region in self._regions)

    def begin(self, model: Any) -> None:
        """Set all parameters to the initial values of ``model``; each rank computes the values of its own ranges.

        Collective over all ranks. Besides the store, a rank needs memory for at most one tensor at a time.
        """
        from mpizero.nn.arrays import start_values_of

        with all_ranks(self.grid.world, "start values"), needing("start values", STATE_ADVICE):
            fill = start_values_of(model)
            for unit, span in zip(self.layout.units, self.share.spans, strict=True):
                out = self.owned(unit.index)
                for entry, part in self.layout.pieces(span):
                    target = out[part.start - span.start : part.stop - span.start]
                    fill(entry.spec, part.start - entry.offset, part.stop - entry.offset, target)
        self.publish()

    def gathered(self, unit: Unit) -> Array:
        """Return a new 1-D array of all parameters of a unit; parameters of other units that it uses are left out.

        Collective over the data group.
        """
        if not self.sharded:
            return self.values[unit.span.start : unit.span.stop].copy()
        with self.unshard(unit):
            values = self.unsharded(unit)[: unit.span.size].copy()
        self.memory.barrier("gathered")
        return values

    def fill(self, values: Array) -> None:
        """Set all parameters from ``values``, the flat vector of all parameters, which is equal on every rank.

        Collective over the data group.
        """
        self.memory.barrier("fill")  # who still reads, reads the old values
        for unit in self.layout.units:
            span = self.share.spans[unit.index]
            self.owned(unit.index)[:] = values[span.start : span.stop]
        self.publish()

    def copy_from(self, other: ParameterStore) -> None:
        """Copy all parameters of ``other``, a store of the same layout and grid. Collective over the data group."""
        for unit in self.layout.units:
            self.owned(unit.index)[:] = other.owned(unit.index)
        if self.integers is not None and other.integers is not None:
            self.integers.copy_from(other.integers)
        self.publish()

    def poll(self) -> None:
        """Let messages with parameters progress. Not collective."""
        if self._coming is not None:
            self._coming[1].test()
        elif self._published:
            self._published[0].poll()

    def _begin(self, unit: Unit) -> None:
        """Begin to gather a unit into the slot that is not in use. Collective over the data group."""
        spans = [self._slot_spans(unit, share) for share in self.peer_shares]
        self._coming = unit, begin_gather(self.grid.peers, self._sent(unit), self._slots[self._next], spans)

    def _bring(self, unit: Unit) -> int:
        """Finish gathering a unit, and return the number of its slot. Collective over the data group."""
        if self._coming is not None and self._coming[0] is not unit:
            self._finish()  # something else came between, and takes its place: first it must be there on all ranks
            self.memory.barrier("gather")
        if self._coming is None:
            self._begin(unit)
        self._finish()
        self.memory.barrier("gather")
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        return slot

    def _finish(self) -> None:
        if self._coming is not None:
            self._coming[1].wait()
            self._coming = None

    def _slot_spans(self, unit: Unit, share: Share) -> tuple[Span, ...]:
        """Return the ranges of a slot with the gathered ``unit`` that the rank of ``share`` owns.

        The slot holds the unit's own parameters, and after them each parameter of another unit that a tied use refers
        to. The first range is of the unit's own parameters; then there is one range for each of the others.
        """
        spans = [share.spans[unit.index].shift(-unit.span.start)]
        place = unit.span.size
        for entry in unit.aliases:
            part = entry.span.intersect(share.spans[self._home(entry.spec.tied)])
            spans.append(part.shift(place - entry.offset))
            place += entry.spec.size
        return tuple(spans)

    def _sent(self, unit: Unit) -> list[Array]:
        sent = [self.owned(unit.index)]
        for entry in unit.aliases:
            home = self._home(entry.spec.tied)
            part = entry.span.intersect(self.share.spans[home]).shift(-self.share.spans[home].start)
            sent.append(self.owned(home)[part.start : part.stop] if part.size else self._values[:0])
        return sent

    def _home(self, name: str | None) -> int:
        return self.layout.by_name[str(name)].unit

    def unit_views(self, unit: Unit, buffer: Array) -> dict[str, Any]:
        """Return nested views, by block, of a unit's parameters in ``buffer``. Not collective.

        ``buffer`` holds only the gathered unit if the store is sharded, else all parameters.
        """
        placed: dict[str, list[tuple[str, int, ParameterSpec]]] = {block: [] for block in unit.blocks}
        alias = unit.span.size
        for entry in unit.entries:
            start = entry.offset
            if self.sharded:
                start = entry.offset - unit.span.start
                if entry.spec.tied is not None:
                    start, alias = alias, alias + entry.spec.size
            placed[entry.block].append((entry.local_name, start, entry.spec))
        nested = {block: views(buffer, triples) for block, triples in placed.items()}
        if self.integers is not None:
            nested = {block: united(tree, self.integers.given(block)) for block, tree in nested.items()}
        if not self.sharded and not self._regions:
            return nested
        return ParameterViews(nested, self.progress.poll, gathered=self.sharded)


def flat_names(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Array]]:
    """Yield the dotted name, beginning with ``prefix``, and the array of every entry of a nested dictionary."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
