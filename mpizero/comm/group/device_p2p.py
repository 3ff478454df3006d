"""Send GPU arrays of pipelines and of split layers: directly if MPI accepts GPU memory, else through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mpizero._util.pytree import map_leaves
from mpizero.comm import Communicator
from mpizero.comm.group.model_group import CommunicatorGroup, GpuAwareGroup
from mpizero.comm.group.pipeline_p2p import PipelineP2P, Route
from mpizero.kernels import to_host
from mpizero.kernels.device import Device
from mpizero.types import Array, Group, ShiftRequest


class HostStagedP2P(PipelineP2P):
    """Send GPU arrays between pipeline stages through copies in host memory."""

    def __init__(self, comm: Communicator, device: Device) -> None:
        super().__init__(comm)
        self.device = device

    def send(self, route: Route, micro: int, key: Any, peer: int, value: Any) -> None:
        """Copy an array, or the arrays of a tree, to the host and start to send them, as :meth:`PipelineP2P.send` does.

        If ``value`` is None, tell the other stage that the chunk failed.
        """
        super().send(route, micro, key, peer, value if peer == self.comm.rank else map_leaves(to_host, value))

    def receive(self, route: Route, micro: int, key: Any, peer: int) -> Any:
        """Wait for what stage ``peer`` sends and return it on the GPU; None if that stage's chunk failed."""
        return map_leaves(self.device.put, super().receive(route, micro, key, peer))


class GpuAwareP2P(PipelineP2P):
    """Send GPU arrays between pipeline stages by passing them to MPI, which must accept GPU memory."""

    def __init__(self, comm: Communicator, device: Device) -> None:
        super().__init__(comm)
        self.device, comm.wait_for_device = device, device.synchronize

    def _empty(self, dims: tuple[int, ...], dtype: str) -> Array:
        return self.device.empty(prod(dims), dtype).reshape(dims)


class _DeviceShift:
    """Wait for the arrays of a shift through host memory, and copy them to ``device`` if that is not None."""

    def __init__(self, request: ShiftRequest, device: Device | None) -> None:
        self._request, self._device = request, device

    def wait(self) -> tuple[Array, ...]:
        """Wait for the arrays and return them on the GPU, or on the host if host arrays were sent. Not collective."""
        arrays = self._request.wait()
        return arrays if self._device is None else tuple(map(self._device.put, arrays))

    def test(self) -> bool:
        """Make progress and tell whether :meth:`wait` would return at once. Not collective."""
        return self._request.test()


class _LayerGroup:
    """Hold the group of ranks that layers are split over, and the GPU of this rank.

    Methods of subclasses take GPU arrays and return GPU arrays, or take host arrays and return host arrays.
    """

    def __init__(self, group: Group, device: Device) -> None:
        self._group, self._device = group, device

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self._group.size


class HostStagedGroup(_LayerGroup):
    """Sum, gather and shift GPU arrays of layers through host memory; implements :class:`mpizero.types.Group`."""

    def _like(self, x: Array, result: Array) -> Array:
        return result if isinstance(x, np.ndarray) else self._device.put(result)

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise sum of ``x`` over the ranks. Collective over the group."""
        return self._like(x, self._group.all_reduce(to_host(x), tag))

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum of ``x`` over the ranks. Collective over the group."""
        return self._like(x, self._group.all_max(to_host(x), tag))

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return ``x`` of all ranks, concatenated along ``axis``.

        Collective over the group. ``x`` of rank i has length ``sizes[i]`` along ``axis``.
        """
        return self._like(x, self._group.all_gather(to_host(x), axis, sizes, tag))

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block, of length ``sizes[rank]`` along ``axis``, of the sum of ``x`` over the ranks.

        Collective over the group.
        """
        return self._like(x, self._group.reduce_scatter(to_host(x), axis, sizes, tag))

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to rank + ``by`` and to receive arrays of the same shapes from rank - ``by``.

        Collective over the group. Rank numbers are taken modulo the size of the group.
        """
        device = None if all(isinstance(x, np.ndarray) for x in arrays) else self._device
        return _DeviceShift(self._group.shift([to_host(x) for x in arrays], by, tag), device)


class GpuAwareLayerGroup(_LayerGroup):
    """Sum, gather and shift GPU arrays of layers by passing them to MPI; implements :class:`mpizero.types.Group`."""

    def __init__(self, group: CommunicatorGroup, device: Device) -> None:
        super().__init__(group, device)
        self._devices = GpuAwareGroup(group, device)

    def _for(self, x: Array) -> Group:
        return self._group if isinstance(x, np.ndarray) else self._devices

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise sum of ``x`` over the ranks. Collective over the group."""
        return self._for(x).all_reduce(x, tag)

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum of ``x`` over the ranks. Collective over the group."""
        return self._for(x).all_max(x, tag)

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return ``x`` of all ranks, concatenated along ``axis``.

        Collective over the group. ``x`` of rank i has length ``sizes[i]`` along ``axis``.
        """
        return self._for(x).all_gather(x, axis, sizes, tag)

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block, of length ``sizes[rank]`` along ``axis``, of the sum of ``x`` over the ranks.

        Collective over the group.
        """
        return self._for(x).reduce_scatter(x, axis, sizes, tag)

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to rank + ``by`` and to receive arrays of the same shapes from rank - ``by``.

        Collective over the group. Rank numbers are taken modulo the size of the group. ``arrays`` are either all GPU
        arrays or all host arrays.
        """
        return self._for(arrays[0]).shift(arrays, by, tag)
