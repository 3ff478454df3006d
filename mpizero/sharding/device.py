"""Compute on a GPU, or on the host: copy parameters from the host to the GPU, and gradients back.

:class:`ComputeDevice` computes on the host and copies nothing. Its subclass :class:`CudaComputeDevice` copies a unit's
parameters by :class:`DeviceParameters` and its gradients by :class:`UnitGradients`.

[Note: a GPU's step] If a data group has several ranks, parameters and gradient sums stay on the host, in the same
memory and with the same code as without a GPU. A unit's parameters are copied to the GPU and its blocks run there. The
gradients of each micro-batch are copied back to the host as soon as the unit's backward pass ends. The summed gradients
are copied to the GPU again, which updates this rank's ranges of the parameters ([Note: an update on a GPU] in
``sharding/device_update.py``). If a rank is alone in its data group, gradients stay on its GPU, which adds them in the
order of the same tree and updates the parameters. The parameters are copied to the host only when they are needed
there, for a checkpoint for example. So strategies, layouts and checkpoints are the same with and without a GPU. Results
have the same bits on any number of ranks, provided that the GPU's matrix products are reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import numpy as np

from mpizero._util.pytree import as_arrays, leaves_of, map_leaves
from mpizero.comm import Communicator
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.comm.p2p import GpuAwareLayerGroup, GpuAwareP2P, HostStagedGroup, HostStagedP2P, PipelineP2P, prove
from mpizero.errors import ConfigError
from mpizero.kernels.gpu import Device, available_gpus, open_device
from mpizero.layout.flat import Unit, flat_names, united, views
from mpizero.sharding.config import Config, keeps_gradients_on_device
from mpizero.sharding.grad_reduce import MicroBatch
from mpizero.sharding.integrity import GradientDict
from mpizero.sharding.params import Allocator, Memory, MessageProgress, ParameterProvider, ParameterStore
from mpizero.types import Array, Group


class ComputeDevice:
    """Compute on the host.

    Methods that copy arrays to or from a GPU return their arguments in this class; :class:`CudaComputeDevice` overrides
    them. In their docstrings, *the device* is where layers compute: the host or the GPU.
    """

    #: Whether to report the end of every block, so that its gradients can be checked and sent at once. Not on a GPU,
    #: where each check would have to wait for the GPU.
    tells_blocks = True

    #: Whether gradients stay on this rank's GPU, because no other rank adds to them.
    keeps_gradients = False
    #: The number of the GPU on its node; None without a GPU.
    device_number: int | None = None

    def share_gradients(self, ranks: int) -> None:
        """Decide, by the number of ranks in the data group, whether gradients stay on a GPU. Not collective.

        Call this method before all others.
        """

    def allocator(self, memory: Memory) -> Allocator:
        """Return the object that allocates arrays for gradients: on the host, ``memory`` itself. Not collective."""
        return memory

    def parameter_provider(self, store: ParameterStore) -> ParameterProvider:
        """Return the object that provides the parameters of ``store`` on the device where layers compute."""
        return store

    def allocated_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank keeps on a GPU, by kind, such as "gradients"; empty on the host.

        Not collective.
        """
        return {}

    def group(self, group: Group) -> Group:
        """Return a group of the same ranks as ``group``; its methods take and return arrays on the device."""
        return group

    def pipeline_p2p(self, comm: Communicator) -> PipelineP2P:
        """Return the object that sends arrays, on the device where layers compute, between pipeline stages."""
        return PipelineP2P(comm)

    def describe(self) -> str:
        """Return the device's part of the text that describes a run; "" on the host. Not collective."""
        return ""

    def check_batch(self, x: Any, y: Any) -> None:
        """Raise :class:`DataError` if a batch cannot be copied to the device. Not collective.

        Either all ranks raise the error or none: redistributing the batch has checked that all have the same types.
        """

    def put(self, values: Any) -> Any:
        """Copy samples or targets to the device where layers compute, and return the copy; return None for None."""
        return values

    def put_samples(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with its samples copied to the device where layers compute."""
        return batch

    def target(self, unit: Unit, host: Any) -> Any:
        """Return views on the device that layers write a unit's gradients to; ``host`` are the views on the host."""
        return host

    def done(self, unit: Unit, host: Any) -> None:
        """Copy a unit's gradients from the device to the views ``host``; call it when all of them are written."""


class CudaComputeDevice(ComputeDevice):
    """Compute on a GPU, with copies from and to the host.

    Parameters
    ----------
    device : Device
        The GPU, already opened.
    comm : Communicator
        All ranks.
    config : Config
        The settings; ``mixed_precision``, ``optimizer_device`` and ``direct_messages`` are used.
    """

    tells_blocks = False

    def __init__(self, device: Device, comm: Communicator, config: Config) -> None:
        self.device, self.config, self.sixteen = device, config, config.mixed_precision
        self._comm = comm
        self.device_number = device.number
        self._parameters: DeviceParameters | None = None
        self._problem: str | None = None

    def share_gradients(self, ranks: int) -> None:
        """Decide, by the number of ranks in the data group, whether gradients stay on the GPU. Not collective."""
        self.keeps_gradients = keeps_gradients_on_device(self.config, ranks)

    def allocator(self, memory: Memory) -> Allocator:
        """Return an allocator of GPU memory if gradients stay on the GPU, else ``memory``. Not collective."""
        return DeviceAllocator(self.device) if self.keeps_gradients else memory

    def parameter_provider(self, store: ParameterStore) -> ParameterProvider:
        """Return the copy of the parameters of ``store`` on the GPU. Not collective.

        The copy also has a buffer on the GPU for one unit's gradients, unless all gradients stay on the GPU.
        """
        return self._parameters_of(store)

    def _parameters_of(self, store: ParameterStore) -> DeviceParameters:
        if self._parameters is None or self._parameters.store is not store:
            self._parameters = DeviceParameters(store, self.device, self.sixteen, fetches=not self.keeps_gradients)
        return self._parameters

    def allocated_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's arrays on the GPU, by kind, such as "gradients". Not collective."""
        return {kind: nbytes for kind, nbytes in sorted(self.device.allocated.items()) if nbytes}

    def group(self, group: Group) -> Group:
        """Return a group of the same ranks as ``group``; its methods take and return arrays on the GPU.

        The first call of this method or of :meth:`pipeline_p2p` is collective over all ranks, which then test whether
        MPI can send GPU memory. Groups that are not a :class:`CommunicatorGroup` need no test.
        """
        if isinstance(group, CommunicatorGroup) and not self._indirect:
            return GpuAwareLayerGroup(group, self.device)
        return HostStagedGroup(group, self.device)

    @property
    def _indirect(self) -> str:
        """The reason why messages of layers go through host memory; "" if they go directly from GPU to GPU.

        With ``direct_messages`` the first use is collective over all ranks, which then test whether MPI can send GPU
        memory.
        """
        # No cached_property: before Python 3.12 all threads, which meet in the probe, would share its lock.
        if self._problem is None:
            self._problem = "direct_messages = false"
            if self.config.direct_messages:
                self._problem = prove(self._comm, lambda: self.device)
        return self._problem

    def pipeline_p2p(self, comm: Communicator) -> PipelineP2P:
        """Return the object that sends arrays on the GPU between pipeline stages.

        ``comm`` has the ranks of the pipeline. The first call of this method or of :meth:`group` is collective over all
        ranks, which then test whether MPI can send GPU memory.
        """
        return HostStagedP2P(comm, self.device) if self._indirect else GpuAwareP2P(comm, self.device)

    def describe(self) -> str:
        """Return a text with this rank's GPU, the data type of matrix products, and the path of messages between GPUs.

        Not collective.
        """
        products = "" if self.sixteen is None else f", products in {self.sixteen}"
        messages = "" if self._problem is None else f", messages go {self._path}"
        return f"; layers compute on GPUs, here number {self.device.number} ({self.device.name}){products}{messages}"

    @property
    def _path(self) -> str:
        return f"through the host ({self._indirect})" if self._indirect else "from GPU to GPU"

    def check_batch(self, x: Any, y: Any) -> None:
        """Raise :class:`DataError` unless all arrays in ``x`` and ``y`` are NumPy arrays of numbers. Not collective."""
        for values in (x, y):
            for leaf in leaves_of(as_arrays(values)):
                self.device.check(leaf)

    def put(self, values: Any) -> Any:
        """Copy an array, or all arrays of a nested structure, to the GPU, and return the copy. Not collective."""
        return map_leaves(self.device.put, values)

    def put_samples(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with its samples copied to the GPU. Not collective."""
        if batch.grain is None:
            return batch
        return batch.with_samples(tuple((self.put(x), self.put(y), first) for x, y, first in batch.grain.micro_batches))

    def target(self, unit: Unit, host: Any) -> Any:
        """Return views, in a buffer on the GPU, that layers write the unit's gradients to. Not collective.

        If gradients stay on the GPU, these are the views ``host``, which are then on the GPU too.
        """
        return host if self._fetched is None else self._fetched.views(unit)

    def done(self, unit: Unit, host: Any) -> None:
        """Copy a unit's gradients from the buffer on the GPU to ``host``; if gradients stay on the GPU, do nothing.

        Not collective.
        """
        if self._fetched is not None:
            self._fetched.fetch(unit, host)

    @property
    def _fetched(self) -> UnitGradients | None:
        assert self._parameters is not None
        return self._parameters.gradients


def open_gpu(comm: Communicator, config: Config, block_model: bool, device: int | None = None) -> CudaComputeDevice:
    """Return the GPU that this rank computes on.

    Collective over ``comm``. ``block_model`` tells whether the model is made of blocks. ``device`` is the number
    of the GPU on the node; if it is None, the GPUs of a node are assigned to its ranks in turn.

    Raises
    ------
    ConfigError
        On every rank, if some rank finds no GPU: the error names the rank and the reason. Also if the model is a black
        box, whose function decides by itself where it computes.
    """
    if not block_model:
        raise ConfigError(
            f"device={config.device!r} needs a model of blocks: a black box computes where its function does, so train "
            'it with device = "cpu" and let the function use the GPU'
        )
    with comm.split_node(name="devices") as node:
        place = node.rank if device is None else device
    reasons = comm.allgather_object(available_gpus()[1], "devices")
    without = [rank for rank, reason in enumerate(reasons) if reason]
    if without:
        raise ConfigError(
            f'device = "cuda": rank {without[0]} of {comm.size} has no GPU to train on: {reasons[without[0]]}, or '
            'train with device = "cpu"'
        )
    return CudaComputeDevice(open_device(place), comm, config)


#: Gradients on a GPU start at multiples of so many elements, an alignment that suits the BLAS.
ALIGNED = 64


class DeviceAllocator:
    """Allocate arrays for gradients on the GPU, and count their bytes by kind, such as "gradients".

    Only a rank that is alone in its data group uses it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a new array of zeros on the GPU, and count its bytes under the name ``kind``. Not collective."""
        sizes = shape if isinstance(shape, tuple) else (shape,)
        array = self.device.keep(kind, prod(sizes), dtype)
        array[:] = 0
        return array.reshape(sizes)

    def release(self, kind: str, array: Array) -> None:
        """Stop counting the bytes of ``array``; the caller then drops its last reference. Not collective."""
        self.device.release(kind, array)

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return a new array of zeros on the GPU for each shape. Not collective: no other rank uses the arrays."""
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
        The 16-bit type to which operands of matrix products are rounded; None does not round them.
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
        its parameters are requested early. ``by_block`` has no effect: all parameters of the unit must have arrived on
        the host before they are copied to the GPU.
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
        """The object that layers call so that messages in flight progress."""
        return self.store.progress

    def wait(self, block: str | None = None) -> None:
        """Wait until the updated parameters of ``block`` have arrived on the host; None waits for all blocks.

        Collective over the data group.
        """
        self.store.wait(block)

    @property
    def full(self) -> bool:
        """Tell whether the GPU holds all parameters all the time, and not only gathered units."""
        return not self.store.sharded

    def current(self) -> Array:
        """Return the array of all parameters on the GPU; if the host has newer ones, copy them to the GPU first.

        Use it only if :attr:`full` is true. Collective over the data group if updated parameters are in flight.
        """
        if self._version != self.store.version:
            self.device.write(self._values, self.store.values)
            self._version = self.store.version
        return self._values

    def updated(self, *, on_host: bool) -> None:
        """Record that this rank's ranges of the parameters were updated on the GPU. Not collective.

        ``on_host`` tells whether the host already has the updated values too. If not, the host copies them from the GPU
        when it needs them; only a rank that is alone in its data group may pass False. The caller must all-gather the
        parameters next. If the rank is alone in its data group, its GPU has the newest parameters, and the next step
        copies no parameters to the GPU.
        """
        if self.store.grid.data.size == 1:
            self._version = self.store.version + 1
        if not on_host:
            self.store.take_from(self._read)

    def _read(self, host: Array) -> None:
        self.device.read(self._values, [(0, host)])


class UnitGradients:
    """Hold a buffer on a GPU for the gradients of one unit; all units use it in turn."""

    def __init__(self, store: ParameterStore, device: Device) -> None:
        layout, dtype = store.layout, store.dtype
        self.device, self._integers = device, store.integers
        self._offsets = {unit.index: gradient_offsets(unit) for unit in layout.units}
        self._buffer = device.keep("gradients", max((size for _, size in self._offsets.values()), default=0), dtype)
        self._views: dict[int, dict[str, Any]] = {}

    def views(self, unit: Unit) -> dict[str, Any]:
        """Return nested views, by block, of a unit's gradients in the buffer. Not collective."""
        if unit.index not in self._views:
            self._views[unit.index] = {block: self._block_views(unit, block) for block in unit.blocks}
        return self._views[unit.index]

    def _block_views(self, unit: Unit, block: str) -> GradientDict:
        offsets, entries = self._offsets[unit.index][0], [e for e in unit.entries if e.block == block]
        block_views = views(self._buffer, [(e.local_name, offsets[block, e.local_name], e.spec) for e in entries])
        return GradientDict(
            block_views if self._integers is None else united(block_views, self._integers.targets(block))
        )

    def fetch(self, unit: Unit, host: Mapping[str, Any]) -> None:
        """Copy a unit's gradients from the buffer to ``host``, nested views by block on the host. Not collective.

        Gradients of frozen parameters are not copied.
        """
        offsets, size = self._offsets[unit.index]
        frozen = {(entry.block, entry.local_name) for entry in unit.entries if entry.gradient < 0}
        targets = [
            (offsets[block, name], array)
            for block, tree in host.items()
            for name, array in flat_names(tree)
            if (block, name) not in frozen and (block, name) in offsets  # integer arrays are on the host
        ]
        self.device.read(self._buffer[:size], sorted(targets, key=lambda target: target[0]))


def gradient_offsets(unit: Unit) -> tuple[dict[tuple[str, str], int], int]:
    """Return where each gradient of a unit starts in a GPU's buffer, by block and local name, and the buffer's size.

    Starts and size are numbers of elements. Not collective.
    """
    offsets, size = {}, 0
    for entry in unit.entries:
        offsets[entry.block, entry.local_name] = size
        size += -(-entry.spec.size // ALIGNED) * ALIGNED
    return offsets, size
