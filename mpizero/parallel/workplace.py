"""Where a rank computes: on the host, where parameters lie, or on a card, with copies between the two.

[Note: a card's step] Parameters, gradient sums and optimizer state stay on the host, in the same memory and by the same
code whatever computes. A unit's parameters are copied to the card, its blocks run there, and the gradient of each
micro-batch comes back as soon as its backward ends. So every strategy, layout and checkpoint is the host's, and results
have the same bits on any number of ranks as far as a card's products repeat theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpizero.comm import Communicator
from mpizero.errors import ConfigError
from mpizero.kernels import to_host
from mpizero.kernels.card import Card, found, open_card
from mpizero.layout import FlatLayout, Unit
from mpizero.layout.flat import views
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.courier import Courier, Route
from mpizero.parallel.gradients import Job
from mpizero.parallel.storage import Lender, ParameterStore, flat_names
from mpizero.types import Array, Group, ShiftRequest

#: Elements between the starts of two gradients on a card: products into them are then aligned as the BLAS likes it.
ALIGNED = 64


class Workplace:
    """The host: nothing needs to be copied. :class:`CardWorkplace` overrides what does."""

    def lender(self, store: ParameterStore) -> Lender:
        """Return what lends the parameters of ``store`` where they are used."""
        return store

    def group(self, group: Group) -> Group:
        """Return a group whose methods take and return arrays as layers have them."""
        return group

    def courier(self, comm: Communicator) -> Courier:
        """Return a courier of such arrays between pipeline stages."""
        return Courier(comm)

    def describe(self) -> str:
        """Return what a line about a run ends with. Not collective."""
        return ""

    def check_batch(self, x: Any, y: Any) -> None:
        """Refuse a batch that cannot be brought to where layers are, on all ranks alike. Not collective.

        Dealing it has made sure that all ranks have the same types.
        """

    def put(self, values: Any) -> Any:
        """Return samples, targets or None where layers can use them."""
        return values

    def put_job(self, job: Job) -> Job:
        """Return a job with its samples where layers can use them."""
        return job

    def target(self, unit: Unit, host: Any) -> Any:
        """Return the views that layers write a unit's gradients to; ``host`` are those where they shall end."""
        return host

    def done(self, unit: Unit, host: Any) -> None:
        """Bring a unit's gradients, complete now, to ``host``."""


class CardWorkplace(Workplace):
    """A graphics card.

    Parameters
    ----------
    card : Card
        The card, open.
    sixteen : str or None
        What the operands of products are rounded to.
    """

    def __init__(self, card: Card, sixteen: str | None = None) -> None:
        self.card, self.sixteen = card, sixteen
        self._mirror: _Mirror | None = None

    def lender(self, store: ParameterStore) -> Lender:
        """Return the mirror of ``store`` on the card; gradients of its units then have room there. Not collective."""
        self._mirror = _Mirror(store, self.card, self.sixteen)
        return self._mirror

    def group(self, group: Group) -> Group:
        """Return the group, which takes and returns arrays of the card. Not collective."""
        return _CardGroup(group, self.card)

    def courier(self, comm: Communicator) -> Courier:
        """Return a courier of arrays of the card. Not collective."""
        return _CardCourier(comm, self.card)

    def describe(self) -> str:
        """Name this rank's card. Not collective."""
        products = "" if self.sixteen is None else f", products in {self.sixteen}"
        return f"; layers compute on cards, here number {self.card.number} ({self.card.name}){products}"

    def check_batch(self, x: Any, y: Any) -> None:
        """Raise :class:`DataError` unless ``x`` and ``y`` are arrays of numbers. Not collective."""
        for values in (x, y):
            self.card.check(np.asarray(values) if hasattr(values, "shape") else values)

    def put(self, values: Any) -> Any:
        """Copy an array to the card. Not collective."""
        return None if values is None else self.card.put(values)

    def put_job(self, job: Job) -> Job:
        """Copy a job's samples to the card. Not collective."""
        if job.grain is None:
            return job
        put = tuple((self.put(x), self.put(y), first) for x, y, first in job.grain.micro_batches)
        return job._replace(grain=job.grain._replace(micro_batches=put))

    def target(self, unit: Unit, host: Any) -> Any:
        """Return views of the card's gradient buffer. Not collective."""
        assert self._mirror is not None
        return self._mirror.gradients.views(unit)

    def done(self, unit: Unit, host: Any) -> None:
        """Copy a unit's gradients from the card. Not collective."""
        assert self._mirror is not None
        self._mirror.gradients.fetch(unit, host)


def open_workplace(config: ShardingConfig, block_model: bool) -> Workplace:
    """Return the host, or this rank's card: the ranks of a node take its cards in turn.

    Collective over ``config.comm``.

    Raises
    ------
    ConfigError
        On every rank, if one has no card, naming it and the way out; or if the model, no model of blocks, has layers of
        its own that the card knows nothing of.
    """
    if config.device == "cpu":
        return Workplace()
    if not block_model:
        raise ConfigError(
            f"device={config.device!r} needs a model of blocks: a black box computes where its function does, so train "
            'it with device = "cpu" and let the function use the card'
        )
    comm = config.communicator
    with comm.split_node(name="cards") as node:
        place = node.rank
    reasons = comm.allgather_object(found()[1], "cards")
    without = [rank for rank, reason in enumerate(reasons) if reason]
    if without:
        raise ConfigError(
            f'device = "cuda": rank {without[0]} of {comm.size} has no card to train on: {reasons[without[0]]}, or '
            'train with device = "cpu"'
        )
    return CardWorkplace(open_card(place), config.mixed_precision)


class _Mirror:
    """The parameters of a store on a card: all of them, or a unit's at a time where the store is sharded."""

    def __init__(self, store: ParameterStore, card: Card, sixteen: str | None) -> None:
        self.store, self.card, self.sixteen = store, card, sixteen
        if sixteen is not None and store.values.dtype != np.float32:
            raise ConfigError(
                f"mixed_precision={sixteen!r} needs a model in float32, this one is in {store.values.dtype}: its "
                'master weights are float32 (dtype = "float32"), or leave mixed_precision out'
            )
        self.layout, self.timeline = store.layout, store.timeline
        self.gradients = _Gradients(store.layout, store.values.dtype, card)
        size = max(map(store.needed, self.layout.units), default=0) if store.sharded else store.layout.size
        self._values = card.empty(size, store.values.dtype)
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
            elif self._version != self.store.version:
                self.card.write(self._values, self.store.values)
                self._version = self.store.version
            self.timeline.end("publication", "card", begun)
            if unit.index not in self._views:
                self._views[unit.index] = self.store.unit_views(unit, self._values)
            with self.card.multiplying_in(self.sixteen):
                yield self._views[unit.index]

    def settle(self) -> None:
        """Return when all published values are on the host. Collective over the data group."""
        self.store.settle()


class _Gradients:
    """One unit's gradients on a card: computed there, then copied to the host, before the next unit's."""

    def __init__(self, layout: FlatLayout, dtype: Any, card: Card) -> None:
        self.card = card
        self._places = {unit.index: gradient_places(unit) for unit in layout.units}
        self._buffer = card.empty(max((size for _, size in self._places.values()), default=0), dtype)
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


class _CardCourier(Courier):
    """Messages between stages leave from and arrive in memory of the host."""

    def __init__(self, comm: Communicator, card: Card) -> None:
        super().__init__(comm)
        self.card = card

    def send(self, route: Route, micro: int, key: Any, peer: int, array: Array | None) -> None:
        """Start to send an array of the card; None if there is none. Not collective."""
        super().send(route, micro, key, peer, array if peer == self.comm.rank else to_host(array))

    def receive(self, route: Route, micro: int, key: Any, peer: int) -> Array | None:
        """Return what the other end sent, on the card; None if it failed. Waits; not collective."""
        array = super().receive(route, micro, key, peer)
        return None if array is None else self.card.put(array)


class _CardShift:
    """Arrays on their way around the group, which arrive on the card."""

    def __init__(self, request: ShiftRequest, card: Card | None) -> None:
        self._request, self._card = request, card

    def wait(self) -> tuple[Array, ...]:
        """Return what has arrived. Not collective."""
        arrays = self._request.wait()
        return arrays if self._card is None else tuple(map(self._card.put, arrays))

    def test(self) -> bool:
        """Make progress and tell whether it has arrived. Not collective."""
        return self._request.test()


class _CardGroup:
    """A group for layers on a card: messages leave from and arrive in memory of the host.

    Arrays of the host are taken too, and answered with such.
    """

    def __init__(self, group: Group, card: Card) -> None:
        self._group, self._card = group, card

    @property
    def rank(self) -> int:
        """Place of this rank in the group."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    def _like(self, x: Array, result: Array) -> Array:
        return result if isinstance(x, np.ndarray) else self._card.put(result)

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the sum over the ranks. Collective over the group."""
        return self._like(x, self._group.all_reduce(to_host(x), tag))

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum over the ranks. Collective over the group."""
        return self._like(x, self._group.all_max(to_host(x), tag))

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return the ranks' arrays concatenated. Collective over the group."""
        return self._like(x, self._group.all_gather(to_host(x), axis, sizes, tag))

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block of the sum. Collective over the group."""
        return self._like(x, self._group.reduce_scatter(to_host(x), axis, sizes, tag))

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start sending arrays around the ring. Collective over the group."""
        card = None if all(isinstance(x, np.ndarray) for x in arrays) else self._card
        return _CardShift(self._group.shift([to_host(x) for x in arrays], by, tag), card)
