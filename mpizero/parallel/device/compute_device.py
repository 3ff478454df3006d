"""Compute on the host: the base class of what computes on a GPU, which copies arrays between the two.

[Note: a GPU's step] Parameters and gradient sums stay on the host, in the same memory and with the same code as without
a GPU. A unit's parameters are copied to the GPU and its blocks run there. The gradient of each micro-batch is copied
back to the host as soon as its backward pass ends. The summed gradients are copied to the GPU again, which updates this
rank's ranges ([Note: an update on a GPU] in ``parallel/optimizer/device_update.py``). If a rank is alone in its data
group, gradients stay on its GPU, which adds them in the order of the same tree and updates the parameters; these are
copied to the host only when something needs them there, such as a checkpoint. So strategies, layouts and checkpoints
are the same with and without a GPU. Results have the same bits on any number of ranks, provided that the GPU's matrix
products are reproducible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.comm import Communicator
from mpizero.layout.flat import Unit
from mpizero.parallel.gradients.reducer import Job
from mpizero.parallel.parameters.allocator import Allocator, Memory
from mpizero.parallel.parameters.store import ParameterProvider, ParameterStore
from mpizero.types import Group

if TYPE_CHECKING:
    from mpizero.comm.p2p import PipelineP2P


class ComputeDevice:
    """Compute on the host.

    The methods that copy arrays to or from a GPU return their arguments here; :class:`CudaComputeDevice` overrides
    them. In their descriptions, *the device* is where layers compute: the host or the GPU.
    """

    #: Whether to report the end of every block, so that its gradients can be checked and sent at once. Not on a GPU,
    #: where each check would have to wait for the GPU.
    tells_blocks = True

    #: Whether gradients stay on this rank's GPU, because no other rank adds to them.
    keeps_gradients = False
    #: The number of the GPU on its node; None without a GPU.
    device_number: int | None = None

    def share_gradients(self, ranks: int) -> None:
        """Take the number of ranks in the data group, which decides whether gradients stay on a GPU. Not collective.

        Call it before the methods below.
        """

    def allocator(self, memory: Memory) -> Allocator:
        """Return the object that allocates arrays for gradients: on the host, ``memory`` itself. Not collective."""
        return memory

    def parameter_provider(self, store: ParameterStore) -> ParameterProvider:
        """Return the object that provides the parameters of ``store`` on the device where layers compute."""
        return store

    def held(self) -> dict[str, int]:
        """Return the bytes of model state that this rank keeps on a GPU, by kind; empty on the host. Not collective."""
        return {}

    def group(self, group: Group) -> Group:
        """Return a group whose methods take and return arrays on the device where layers compute."""
        return group

    def pipeline_p2p(self, comm: Communicator) -> PipelineP2P:
        """Return the object that sends arrays, on the device where layers compute, between pipeline stages."""
        from mpizero.comm.p2p import PipelineP2P

        return PipelineP2P(comm)

    def describe(self) -> str:
        """Return a text about the device for the description of a run; "" on the host. Not collective."""
        return ""

    def check_batch(self, x: Any, y: Any) -> None:
        """Raise :class:`DataError` if a batch cannot be copied to the device. Not collective.

        All ranks raise it or none does: redistributing the batch has checked that all ranks have the same types.
        """

    def put(self, values: Any) -> Any:
        """Copy samples or targets to the device where layers compute, and return the copy; for None return None."""
        return values

    def put_job(self, job: Job) -> Job:
        """Return the job with its samples copied to the device where layers compute."""
        return job

    def target(self, unit: Unit, host: Any) -> Any:
        """Return views on the device that layers write a unit's gradients to; ``host`` are the views on the host."""
        return host

    def done(self, unit: Unit, host: Any) -> None:
        """Copy a unit's gradients from the device to the views ``host``; call it when all of them are written."""
