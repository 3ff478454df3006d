"""Copy parameters from the host to a GPU, and gradients from the GPU to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import numpy as np

from mpizero.errors import ConfigError
from mpizero.kernels.gpu import Device
from mpizero.layout.flat import Unit, united, views
from mpizero.parallel.gradients.unwritten_gradients import GradientDict
from mpizero.parallel.parameters.message_progress import MessageProgress
from mpizero.parallel.parameters.store import ParameterStore, flat_names
from mpizero.types import Array

#: Gradients on a GPU start at multiples of so many elements, an alignment that suits the BLAS.
ALIGNED = 64


class DeviceAllocator:
    """Allocate arrays for gradients on the GPU, and count their bytes by kind, such as "gradients".

    It is used by a rank that is alone in its data group.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a new array of zeros on the GPU, counted under ``kind``. Not collective."""
        sizes = shape if isinstance(shape, tuple) else (shape,)
        array = self.device.keep(kind, prod(sizes), dtype)
        array[:] = 0
        return array.reshape(sizes)

    def release(self, kind: str, array: Array) -> None:
        """Stop counting the bytes of ``array``; the caller then drops its last reference. Not collective."""
        self.device.release(kind, array)

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return a new array of zeros on the GPU for each shape. Not collective: no other rank uses them."""
        return tuple(self.private(kind, shape, dtype) for shape in shapes)

    def free_shared(self, kind: str, arrays: Sequence[Array]) -> None:
        """Stop counting the bytes of arrays that :meth:`shared` returned. Not collective."""
        for array in arrays:
            self.release(kind, array)


class DeviceParameters:
    """Keep a copy of a store's parameters on a GPU: of all parameters, or of one unit at a time if they are sharded.

    Parameters
    ----------
    store : ParameterStore
        The parameters.
    device : Device
        The GPU.
    sixteen : str or None
        The 16-bit type to which operands of matrix products are rounded; None: they are not rounded.
    fetches : bool
        Whether gradients are copied to the host, so that the GPU needs a buffer for one unit's gradients.
    """

    def __init__(self, store: ParameterStore, device: Device, sixteen: str | None, *, fetches: bool) -> None:
        self.store, self.device, self.sixteen = store, device, sixteen
        if sixteen is not None and store.dtype != np.float32:
            raise ConfigError(
                f"mixed_precision={sixteen!r} needs a model in float32, this one is in {store.dtype}: its "
                'master weights are float32 (dtype = "float32"), or leave mixed_precision out'
            )
        self.layout, self.timeline = store.layout, store.timeline
        self.gradients = UnitGradients(store, device) if fetches else None
        size = self.layout.largest_gathered if store.sharded else store.layout.size
        self._values = device.keep("parameters", size, store.dtype)
        self._views: dict[int, dict[str, Any]] = {}
        self._version = 0

    @contextmanager
    def unshard(self, unit: Unit, following: Unit | None = None, *, by_block: bool = False) -> Iterator[dict[str, Any]]:
        """Yield nested views, by block, of a unit's parameters on the GPU.

        Collective over the data group if parameters are sharded. ``following`` is the unit that is needed next, if any;
        its parameters are requested early. ``by_block`` changes nothing here: all parameters of the unit must have
        arrived on the host before they are copied to the GPU.
        """
        with self.store.unshard(unit, following) if self.store.sharded else nullcontext():
            begun = self.timeline.begin()
            if self.store.sharded:
                values = self.store.unsharded(unit)
                self.device.write(self._values[: values.size], values)
            else:
                self.current()
            self.timeline.end("publication", "device", begun)
            if unit.index not in self._views:
                self._views[unit.index] = self.store.unit_views(unit, self._values)
            with self.device.multiplying_in(self.sixteen):
                yield self._views[unit.index]

    @property
    def progress(self) -> MessageProgress:
        """The object through which layers let messages in flight progress."""
        return self.store.progress

    def wait(self, block: str | None = None) -> None:
        """Wait until the updated parameters of ``block`` have arrived on the host; None: those of all blocks.

        Collective over the data group.
        """
        self.store.wait(block)

    @property
    def whole(self) -> bool:
        """Tell whether the GPU holds all parameters at once."""
        return not self.store.sharded

    def current(self) -> Array:
        """Return the array of all parameters on the GPU; if the host has newer ones, copy them to the GPU first.

        Use it only if :attr:`whole` is true. Collective over the data group if updated parameters are still in flight.
        """
        if self._version != self.store.version:
            self.device.write(self._values, self.store.values)
            self._version = self.store.version
        return self._values

    def updated(self, *, on_host: bool) -> None:
        """Record that this rank's ranges of the parameters were updated on the GPU. Not collective.

        ``on_host`` tells whether the host already has the updated values too. If it is False, the host copies them from
        the GPU when it needs them; only a rank that is alone in its data group may pass False. The caller publishes the
        parameters next. If the rank is alone in its data group, its GPU then has the newest parameters, and the next
        step copies none to it.
        """
        if self.store.grid.data.size == 1:
            self._version = self.store.version + 1
        if not on_host:
            self.store.take_from(self._read)

    def _read(self, host: Array) -> None:
        self.device.read(self._values, [(0, host)])


class UnitGradients:
    """Hold a buffer on a GPU for one unit's gradients; after they are copied to the host, the next unit uses it."""

    def __init__(self, store: ParameterStore, device: Device) -> None:
        layout, dtype = store.layout, store.dtype
        self.device, self._integers = device, store.integers
        self._places = {unit.index: gradient_places(unit) for unit in layout.units}
        self._buffer = device.keep("gradients", max((size for _, size in self._places.values()), default=0), dtype)
        self._views: dict[int, dict[str, Any]] = {}

    def views(self, unit: Unit) -> dict[str, Any]:
        """Return nested views, by block, of a unit's gradients in the buffer. Not collective."""
        if unit.index not in self._views:
            self._views[unit.index] = {block: self._block_views(unit, block) for block in unit.blocks}
        return self._views[unit.index]

    def _block_views(self, unit: Unit, block: str) -> GradientDict:
        places, entries = self._places[unit.index][0], [e for e in unit.entries if e.block == block]
        found = views(self._buffer, [(e.local_name, places[block, e.local_name], e.spec) for e in entries])
        return GradientDict(found if self._integers is None else united(found, self._integers.targets(block)))

    def fetch(self, unit: Unit, host: Mapping[str, Any]) -> None:
        """Copy a unit's gradients from the buffer to ``host``, nested views by block on the host. Not collective.

        Gradients of frozen parameters are not copied.
        """
        places, size = self._places[unit.index]
        frozen = {(entry.block, entry.local_name) for entry in unit.entries if entry.gradient < 0}
        targets = [
            (places[block, name], array)
            for block, tree in host.items()
            for name, array in flat_names(tree)
            if (block, name) not in frozen and (block, name) in places  # integer arrays are on the host
        ]
        self.device.read(self._buffer[:size], sorted(targets, key=lambda target: target[0]))


def gradient_places(unit: Unit) -> tuple[dict[tuple[str, str], int], int]:
    """Return where each gradient of a unit starts in a GPU's buffer, by block and local name, and the buffer's size.

    Both are in elements. Not collective.
    """
    places, size = {}, 0
    for entry in unit.entries:
        places[entry.block, entry.local_name] = size
        size += -(-entry.spec.size // ALIGNED) * ALIGNED
    return places, size
