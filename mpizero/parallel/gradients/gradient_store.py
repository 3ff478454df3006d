"""Where gradients are until they are used: in a ring of units (ZeRO-2 and 3), or in rows of whole gradients."""

from __future__ import annotations

from mpizero.comm.agreement import all_ranks
from mpizero.parallel.gradients.accumulation import GradientRows
from mpizero.parallel.gradients.wave_buffer import Allocator, GradientRing, GradientViews
from mpizero.parallel.parameters.allocator import on_all_ranks
from mpizero.parallel.parameters.store import ParameterStore


class GradientStore:
    """The gradients that go with a parameter store.

    Parameters
    ----------
    store : ParameterStore
        The parameters.
    allocator : Allocator
        Where rows come from; a ring always comes from the store's own memory.
    accumulate : int
        Micro-batches of a grain.
    waves : bool
        Whether a step's gradients go through a ring of units; those that stay local for a while stand in rows anyway.

    Attributes
    ----------
    ring : GradientRing or None
        The ring, where there is one.
    """

    def __init__(self, store: ParameterStore, allocator: Allocator, accumulate: int, *, waves: bool) -> None:
        self._store, self._allocator, self._accumulate = store, allocator, accumulate
        with all_ranks(store.grid.world, "buffers"):
            self._named = GradientViews(store.layout, allocator, store.dtype)
        self._rows: GradientRows | None = None
        self.ring: GradientRing | None = None
        if waves:
            with on_all_ranks(store.grid.world, "gradients"):
                self.ring = GradientRing(store.layout, store.grid, store.memory, store.dtype, accumulate, self._named)
            self.ring.timeline = store.timeline
            store.beside = self.ring.poll

    @property
    def rows(self) -> GradientRows:
        """The rows that hold whole gradients; made when they are first needed."""
        if self._rows is None:
            store, given = self._store, self._allocator
            self._rows = GradientRows(store.layout, store.grid, given, store.dtype, self._accumulate, self._named)
            if self.ring is None:
                self._store.beside = self._rows.poll
        return self._rows
