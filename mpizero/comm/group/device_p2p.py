"""Messages between layers on cards: from where arrays are, where MPI takes them there, or through the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mpizero.comm import Communicator, CommunicatorGroup
from mpizero.comm.group.model_group import GpuAwareGroup
from mpizero.comm.group.pipeline_p2p import Courier, Route
from mpizero.kernels import to_host
from mpizero.kernels.device import Card
from mpizero.types import Array, Group, ShiftRequest


class CardCourier(Courier):
    """Messages between stages that leave from and arrive in memory of the host."""

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


class DirectCourier(Courier):
    """Messages between stages that MPI takes from the card, and leaves there."""

    def __init__(self, comm: Communicator, card: Card) -> None:
        super().__init__(comm)
        self.card, comm.before_cards = card, card.settle

    def _empty(self, dims: tuple[int, ...], dtype: str) -> Array:
        return self.card.empty(prod(dims), dtype).reshape(dims)


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


class _LayerGroup:
    """A group for layers on a card. Arrays of the host are taken too, and answered with such."""

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


class CardGroup(_LayerGroup):
    """A group for layers on a card, whose messages leave from and arrive in memory of the host."""

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


class DirectGroup(_LayerGroup):
    """A group for layers on a card, whose messages MPI takes from the card, and leaves there."""

    def __init__(self, group: CommunicatorGroup, card: Card) -> None:
        super().__init__(group, card)
        self._cards = GpuAwareGroup(group, card)

    def _for(self, x: Array) -> Group:
        return self._group if isinstance(x, np.ndarray) else self._cards

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the sum over the ranks. Collective over the group."""
        return self._for(x).all_reduce(x, tag)

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum over the ranks. Collective over the group."""
        return self._for(x).all_max(x, tag)

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return the ranks' arrays concatenated. Collective over the group."""
        return self._for(x).all_gather(x, axis, sizes, tag)

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block of the sum. Collective over the group."""
        return self._for(x).reduce_scatter(x, axis, sizes, tag)

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start sending arrays, all of the card or all of the host, around the ring. Collective over the group."""
        return self._for(arrays[0]).shift(arrays, by, tag)
