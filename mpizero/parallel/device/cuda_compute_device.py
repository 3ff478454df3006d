"""Compute on a GPU: see [Note: a GPU's step] in ``parallel/device/compute_device.py``."""

from __future__ import annotations

from typing import Any

from mpizero._util.pytree import as_arrays, leaves_of, map_leaves
from mpizero.comm import Communicator
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.comm.p2p import GpuAwareLayerGroup, GpuAwareP2P, HostStagedGroup, HostStagedP2P, PipelineP2P, prove
from mpizero.errors import ConfigError
from mpizero.kernels.gpu import Device, found, open_device
from mpizero.layout.flat import Unit
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.device.compute_device import ComputeDevice
from mpizero.parallel.device.device_parameters import DeviceAllocator, DeviceParameters, UnitGradients
from mpizero.parallel.gradients.reducer import Job
from mpizero.parallel.parameters.allocator import Allocator, Memory
from mpizero.parallel.parameters.store import ParameterProvider, ParameterStore
from mpizero.parallel.step_rules import keeps_gradients_on_device
from mpizero.types import Group


class CudaComputeDevice(ComputeDevice):
    """Compute on a GPU, with copies from and to the host.

    Parameters
    ----------
    device : Device
        The GPU, already opened.
    config : ShardingConfig
        The settings; says to which type the operands of matrix products are rounded, and where the optimizer runs.
    """

    tells_blocks = False

    def __init__(self, device: Device, config: ShardingConfig) -> None:
        self.device, self.config, self.sixteen = device, config, config.mixed_precision
        self.device_number = device.number
        self._parameters: DeviceParameters | None = None
        self._found: str | None = None

    def share_gradients(self, ranks: int) -> None:
        """Take the data group's number of ranks, which decides whether gradients stay on the GPU. Not collective."""
        self.keeps_gradients = keeps_gradients_on_device(self.config, ranks)

    def allocator(self, memory: Memory) -> Allocator:
        """Return an allocator of GPU memory if gradients stay on the GPU, else ``memory``. Not collective."""
        return DeviceAllocator(self.device) if self.keeps_gradients else memory

    def parameter_provider(self, store: ParameterStore) -> ParameterProvider:
        """Return the copy of the parameters of ``store`` on the GPU. Not collective.

        It also has a buffer on the GPU for one unit's gradients, unless all gradients stay there.
        """
        return self._parameters_of(store)

    def _parameters_of(self, store: ParameterStore) -> DeviceParameters:
        if self._parameters is None or self._parameters.store is not store:
            self._parameters = DeviceParameters(store, self.device, self.sixteen, fetches=not self.keeps_gradients)
        return self._parameters

    def held(self) -> dict[str, int]:
        """Return the bytes of model state on the GPU, by kind. Not collective."""
        return {kind: nbytes for kind, nbytes in sorted(self.device.held.items()) if nbytes}

    def group(self, group: Group) -> Group:
        """Return a group with the ranks of ``group`` whose methods take and return arrays on the GPU.

        The first call of this method or of :meth:`pipeline_p2p` is collective over ``config.comm``.
        """
        if isinstance(group, CommunicatorGroup) and not self._indirect:
            return GpuAwareLayerGroup(group, self.device)
        return HostStagedGroup(group, self.device)

    @property
    def _indirect(self) -> str:
        """The reason why messages of layers go through host memory; "" if they go directly from GPU to GPU.

        The first use is collective over ``config.comm``: the ranks then test whether MPI can send GPU memory.
        """
        # No cached_property: before Python 3.12 all threads, which meet in the probe, would share its lock.
        if self._found is None:
            self._found = "direct_messages = false"
            if self.config.direct_messages:
                self._found = prove(self.config.communicator, lambda: self.device)
        return self._found

    def pipeline_p2p(self, comm: Communicator) -> PipelineP2P:
        """Return the object that sends arrays on the GPU between pipeline stages.

        The first call of this method or of :meth:`group` is collective over ``config.comm``.
        """
        return HostStagedP2P(comm, self.device) if self._indirect else GpuAwareP2P(comm, self.device)

    def describe(self) -> str:
        """Return a text that names this rank's GPU, the type of products, and whether messages pass the host.

        Not collective.
        """
        products = "" if self.sixteen is None else f", products in {self.sixteen}"
        messages = "" if self._found is None else f", messages go {self._path}"
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

    def put_job(self, job: Job) -> Job:
        """Return the job with its samples copied to the GPU. Not collective."""
        if job.grain is None:
            return job
        put = tuple((self.put(x), self.put(y), first) for x, y, first in job.grain.micro_batches)
        return job._replace(grain=job.grain._replace(micro_batches=put))

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


def open_gpu(config: ShardingConfig, block_model: bool, device: int | None = None) -> CudaComputeDevice:
    """Return the GPU that this rank computes on.

    Collective over ``config.comm``. ``block_model`` tells whether the model is made of blocks. ``device`` is the number
    of the GPU on the node; if it is None, the GPUs of a node are assigned to its ranks in turn.

    Raises
    ------
    ConfigError
        On every rank, if some rank finds no GPU: the error names the rank and the reason. Also if the model is not
        made of blocks, because its function decides by itself where it computes.
    """
    if not block_model:
        raise ConfigError(
            f"device={config.device!r} needs a model of blocks: a black box computes where its function does, so train "
            'it with device = "cpu" and let the function use the GPU'
        )
    comm = config.communicator
    with comm.split_node(name="devices") as node:
        place = node.rank if device is None else device
    reasons = comm.allgather_object(found()[1], "devices")
    without = [rank for rank, reason in enumerate(reasons) if reason]
    if without:
        raise ConfigError(
            f'device = "cuda": rank {without[0]} of {comm.size} has no GPU to train on: {reasons[without[0]]}, or '
            'train with device = "cpu"'
        )
    return CudaComputeDevice(open_device(place), config)
