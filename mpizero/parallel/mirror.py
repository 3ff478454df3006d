"""A card's copies of what layers need of the host: parameters, and room for the gradients of a unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpizero.errors import ConfigError
from mpizero.kernels.card import Card
from mpizero.layout import FlatLayout, Unit
from mpizero.layout.flat import views
from mpizero.parallel.storage import ParameterStore, flat_names
from mpizero.types import Array

#: Elements between the starts of two gradients on a card: products into them are then aligned as the BLAS likes it.
ALIGNED = 64


class CardMirror:
    """The parameters of a store on a card: all of them, or a unit's at a time where the store is sharded."""

    def __init__(self, store: ParameterStore, card: Card, sixteen: str | None) -> None:
        self.store, self.card, self.sixteen = store, card, sixteen
        if sixteen is not None and store.dtype != np.float32:
            raise ConfigError(
                f"mixed_precision={sixteen!r} needs a model in float32, this one is in {store.dtype}: its "
                'master weights are float32 (dtype = "float32"), or leave mixed_precision out'
            )
        self.layout, self.timeline = store.layout, store.timeline
        self.gradients = _Gradients(store.layout, store.dtype, card)
        size = max(map(store.needed, self.layout.units), default=0) if store.sharded else store.layout.size
        self._values = card.keep("parameters", size, store.dtype)
        self._views: dict[int, dict[str, Any]] = {}
        self._version = 0

    @contextmanager
    def unit(self, unit: Unit, following: Unit | None = None, *, by_block: bool = False) -> Iterator[dict[str, Any]]:
        """Lend views of a unit's parameters on the card. Collective over the data group if sharded.

        ``by_block`` changes nothing: what goes to the card must be here.
        """
        with self.store.unit(unit, following):
            begun = self.timeline.begin()
            if self.store.sharded:
                values = self.store.lent(unit)
                self.card.write(self._values[: values.size], values)
            else:
                self.current()
            self.timeline.end("publication", "card", begun)
            if unit.index not in self._views:
                self._views[unit.index] = self.store.unit_views(unit, self._values)
            with self.card.multiplying_in(self.sixteen):
                yield self._views[unit.index]

    def settle(self) -> None:
        """Return when all published values are on the host. Collective over the data group."""
        self.store.settle()

    @property
    def whole(self) -> bool:
        """Whether it holds all parameters at once."""
        return not self.store.sharded

    def current(self) -> Array:
        """Return all parameters on the card, as they are on the host now; only where it is ``whole``.

        Collective over the data group where published values are still on their way.
        """
        if self._version != self.store.version:
            self.card.write(self._values, self.store.values)
            self._version = self.store.version
        return self._values

    def updated(self) -> None:
        """Be told that this rank's ranges have been updated here and on the host, to be published next.

        Not collective. A rank that updates everything has nothing to copy then.
        """
        if self.store.grid.data.size == 1:
            self._version = self.store.version + 1


class _Gradients:
    """One unit's gradients on a card: computed there, then copied to the host, before the next unit's."""

    def __init__(self, layout: FlatLayout, dtype: Any, card: Card) -> None:
        self.card = card
        self._places = {unit.index: gradient_places(unit) for unit in layout.units}
        self._buffer = card.keep("gradients", max((size for _, size in self._places.values()), default=0), dtype)
        self._views: dict[int, dict[str, Any]] = {}

    def views(self, unit: Unit) -> dict[str, Any]:
        """Return nested views of a unit's gradients, by block. Not collective."""
        if unit.index not in self._views:
            places, _ = self._places[unit.index]
            self._views[unit.index] = {
                block: views(
                    self._buffer,
                    [
                        (e.local_name, places[e.block, e.local_name], e.spec.shape)
                        for e in unit.entries
                        if e.block == block
                    ],
                )
                for block in unit.blocks
            }
        return self._views[unit.index]

    def fetch(self, unit: Unit, host: Mapping[str, Any]) -> None:
        """Copy a unit's gradients into the views of ``host``. Not collective."""
        places, size = self._places[unit.index]
        frozen = {(entry.block, entry.local_name) for entry in unit.entries if entry.gradient < 0}
        targets = [
            (places[block, name], array)
            for block, tree in host.items()
            for name, array in flat_names(tree)
            if (block, name) not in frozen
        ]
        self.card.read(self._buffer[:size], sorted(targets, key=lambda target: target[0]))


def gradient_places(unit: Unit) -> tuple[dict[tuple[str, str], int], int]:
    """Return where the gradient of each of a unit's entries starts on a card, and the size of them all.

    Not collective.
    """
    places, size = {}, 0
    for entry in unit.entries:
        places[entry.block, entry.local_name] = size
        size += -(-entry.spec.size // ALIGNED) * ALIGNED
    return places, size
