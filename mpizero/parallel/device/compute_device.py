"""Choose whether a rank computes on the host or on a GPU, and copy arrays between the two.

[Note: a GPU's step] Parameters and gradient sums stay on the host, in the same memory and with the same code as without
a GPU. A unit's parameters are copied to the GPU and its blocks run there. The gradient of each micro-batch is copied
back to the host as soon as its backward pass ends. The summed gradients are copied to the GPU again, which updates this
rank's ranges ([Note: an update on a GPU] in ``parallel/device/device_update.py``). A rank that is alone in its data
group instead adds and updates on its GPU, in the order of the same tree; parameters are copied to the host only when
they are asked for there. So strategies, layouts and checkpoints are those of the host. Results have the same bits on
any number of ranks, provided that the GPU's matrix products are reproducible.
"""

from __future__ import annotations

from typing import Any

from mpizero import optim
from mpizero.comm import Communicator, CommunicatorGroup
from mpizero.comm.group.device_p2p import GpuAwareLayerGroup, GpuAwareP2P, HostStagedGroup, HostStagedP2P
from mpizero.comm.group.gpu_aware import prove
from mpizero.comm.group.pipeline_p2p import PipelineP2P
from mpizero.errors import ConfigError
from mpizero.kernels.device import Device, found, open_device
from mpizero.layout import Unit
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.device.device_parameters import DeviceAllocator, DeviceParameters, UnitGradients
from mpizero.parallel.device.device_update import DeviceUpdater, StagedUpdater
from mpizero.parallel.gradients.reducer import Job
from mpizero.parallel.optimizer.sharded_update import Updater, UpdateScope
from mpizero.parallel.parameters.allocator import Allocator, Memory
from mpizero.parallel.parameters.store import ParameterProvider, ParameterStore
from mpizero.parallel.step_rules import keeps_gradients_on_device
from mpizero.sampletree import as_arrays, leaves_of, map_leaves
from mpizero.types import Group


class ComputeDevice:
    """Compute on the host, without copies; :class:`CudaComputeDevice` overrides the methods that must copy."""

    #: Whether to report the end of every block, so that its gradients can be checked and sent at once. Not on a GPU,
    #: where each check would have to wait for the GPU.
    tells_blocks = True

    #: Whether gradients stay on this rank's GPU, because no other rank adds to them.
    keeps_gradients = False
    #: The number of the GPU on its node; None without a GPU.
    device_number: int | None = None

    def share_gradients(self, ranks: int) -> None:
        """Set the number of ranks in the data group, before any method below is called. Not collective."""

    def allocator(self, memory: Memory) -> Allocator:
        """Return the allocator of gradients. Not collective."""
        return memory

    def parameter_provider(self, store: ParameterStore) -> ParameterProvider:
        """Return the provider of the parameters of ``store`` on the device where layers compute."""
        return store

    def updater(self, optimizer: Any, store: ParameterStore, scope: UpdateScope) -> Updater:
        """Return an updater for the ranges of ``store`` that this rank updates; see :class:`Updater`."""
        return Updater(optimizer, store, scope)

    def held(self) -> dict[str, int]:
        """Return the bytes of model state that this rank keeps on a GPU, by kind. Not collective."""
        return {}

    def group(self, group: Group) -> Group:
        """Return a group whose methods take and return arrays on the device where layers compute."""
        return group

    def pipeline_p2p(self, comm: Communicator) -> PipelineP2P:
        """Return the object that sends arrays of that device between pipeline stages."""
        return PipelineP2P(comm)

    def describe(self) -> str:
        """Return a text about the device, appended to the line that describes a run. Not collective."""
        return ""

    def check_batch(self, x: Any, y: Any) -> None:
        """Raise an error for a batch that cannot be copied to the device. Not collective.

        All ranks raise it, because their batches have the same types: redistributing the batch has checked that.
        """

    def put(self, values: Any) -> Any:
        """Copy samples, targets or None to the device where layers compute, and return the copy."""
        return values

    def put_job(self, job: Job) -> Job:
        """Return the job with its samples copied to the device where layers compute."""
        return job

    def target(self, unit: Unit, host: Any) -> Any:
        """Return the views that layers write a unit's gradients to; ``host`` are the views on the host."""
        return host

    def done(self, unit: Unit, host: Any) -> None:
        """Copy a unit's gradients, which are complete now, to ``host``."""


class CudaComputeDevice(ComputeDevice):
    """Compute on a GPU, with copies from and to the host.

    Parameters
    ----------
    device : Device
        The GPU, open.
    config : ShardingConfig
        Says to which type operands of products are rounded, and where the optimizer runs.
    """

    tells_blocks = False

    def __init__(self, device: Device, config: ShardingConfig) -> None:
        self.device, self.config, self.sixteen = device, config, config.mixed_precision
        self.device_number = device.number
        self._parameters: DeviceParameters | None = None
        self._found: str | None = None

    def share_gradients(self, ranks: int) -> None:
        """Set the number of ranks in the data group. Not collective."""
        self.keeps_gradients = keeps_gradients_on_device(self.config, ranks)

    def allocator(self, memory: Memory) -> Allocator:
        """Return the GPU's allocator if gradients stay there, else the host's. Not collective."""
        return DeviceAllocator(self.device) if self.keeps_gradients else memory

    def parameter_provider(self, store: ParameterStore) -> ParameterProvider:
        """Return the copy of ``store`` on the GPU, with buffers for the gradients of a unit. Not collective."""
        return self._parameters_of(store)

    def _parameters_of(self, store: ParameterStore) -> DeviceParameters:
        if self._parameters is None or self._parameters.store is not store:
            self._parameters = DeviceParameters(store, self.device, self.sixteen, fetches=not self.keeps_gradients)
        return self._parameters

    def updater(self, optimizer: Any, store: ParameterStore, scope: UpdateScope) -> Updater:
        """Return an updater on the GPU; on the host if the settings say so, or the optimizer needs it. Not collective.

        Raises
        ------
        ConfigError
            If ``optimizer_device`` asks for the GPU, and the optimizer is the user's own.
        """
        adapted = optim.adapt(optimizer)
        if not updates_on_device(self.config, adapted):
            return super().updater(adapted, store, scope)
        kind = DeviceUpdater if self.keeps_gradients else StagedUpdater
        return kind(adapted, store, scope, self._parameters_of(store))

    def held(self) -> dict[str, int]:
        """Return the bytes of model state on the GPU, by kind. Not collective."""
        return {kind: nbytes for kind, nbytes in sorted(self.device.held.items()) if nbytes}

    def group(self, group: Group) -> Group:
        """Return a group that takes and returns arrays on the GPU.

        The first call of this method or :meth:`pipeline_p2p` is collective over ``config.comm``.
        """
        if isinstance(group, CommunicatorGroup) and not self._indirect:
            return GpuAwareLayerGroup(group, self.device)
        return HostStagedGroup(group, self.device)

    @property
    def _indirect(self) -> str:
        """The reason why layers' messages go through host memory; "" if they go directly from GPU to GPU.

        Collective the first time.
        """
        # No cached_property: before Python 3.12 all threads, which meet in the probe, would share its lock.
        if self._found is None:
            self._found = "direct_messages = false"
            if self.config.direct_messages:
                self._found = prove(self.config.communicator, lambda: self.device)
        return self._found

    def pipeline_p2p(self, comm: Communicator) -> PipelineP2P:
        """Return the object that sends GPU arrays between stages. Collective over ``config.comm`` the first time."""
        return HostStagedP2P(comm, self.device) if self._indirect else GpuAwareP2P(comm, self.device)

    def describe(self) -> str:
        """Return a text that names this rank's GPU. Not collective."""
        products = "" if self.sixteen is None else f", products in {self.sixteen}"
        messages = "" if self._found is None else f", messages go {self._path}"
        return f"; layers compute on GPUs, here number {self.device.number} ({self.device.name}){products}{messages}"

    @property
    def _path(self) -> str:
        return f"through the host ({self._indirect})" if self._indirect else "from GPU to GPU"

    def check_batch(self, x: Any, y: Any) -> None:
        """Raise :class:`DataError` unless ``x`` and ``y`` are arrays of numbers. Not collective."""
        for values in (x, y):
            for leaf in leaves_of(as_arrays(values)):
                self.device.check(leaf)

    def put(self, values: Any) -> Any:
        """Copy an array, or all arrays of a nested structure, to the GPU. Not collective."""
        return map_leaves(self.device.put, values)

    def put_job(self, job: Job) -> Job:
        """Copy a job's samples to the GPU. Not collective."""
        if job.grain is None:
            return job
        put = tuple((self.put(x), self.put(y), first) for x, y, first in job.grain.micro_batches)
        return job._replace(grain=job.grain._replace(micro_batches=put))

    def target(self, unit: Unit, host: Any) -> Any:
        """Return views of the GPU's buffer for one unit; ``host`` itself if gradients stay on the GPU.

        Not collective.
        """
        return host if self._fetched is None else self._fetched.views(unit)

    def done(self, unit: Unit, host: Any) -> None:
        """Copy a unit's gradients from the GPU to ``host``, unless they stay on the GPU. Not collective."""
        if self._fetched is not None:
            self._fetched.fetch(unit, host)

    @property
    def _fetched(self) -> UnitGradients | None:
        assert self._parameters is not None
        return self._parameters.gradients


def updates_on_device(config: ShardingConfig, optimizer: Any) -> bool:
    """Tell whether an optimizer, as ``optim.adapt`` returns it, runs and keeps its state on a GPU. Not collective.

    Raises
    ------
    ConfigError
        If ``optimizer_device`` asks for the GPU, and the optimizer is the user's own.
    """
    if config.device == "cpu" or config.optimizer_device == "cpu":
        return False
    own = isinstance(optimizer, optim.FlatOptimizer)
    if not own and config.optimizer_device is not None:
        raise ConfigError(
            f"optimizer_device={config.optimizer_device!r}: {optimizer.name}.update works on arrays of the host, only "
            "the library's optimizers run on a GPU: leave optimizer_device out"
        )
    return own


def open_compute_device(config: ShardingConfig, block_model: bool, device: int | None = None) -> ComputeDevice:
    """Return the device that this rank computes on: the host or a GPU, as ``config.device`` says.

    Collective over ``config.comm``. ``device`` is the number of the GPU on the node; if it is None, the ranks of a node
    take its GPUs in turn.

    Raises
    ------
    ConfigError
        On every rank, if a rank has no GPU: the error names it and says what to do. Also if the model is a black box,
        whose function decides by itself where it computes.
    """
    if config.device == "cpu":
        return ComputeDevice()
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
