"""Describe a planned training as far as it is the same for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpizero.comm.reduce import Codec
from mpizero.planning.step_batches import StepBatches
from mpizero.sharding.config import Placement, gradient_codec, needs_norm

if TYPE_CHECKING:
    from mpizero.sharding.config import ShardingConfig


@dataclass(frozen=True)
class PlannedTraining:
    """Hold the parts of a planned training that do not depend on the rank.

    Attributes
    ----------
    row : Placement
        The strategy's row of the placement table.
    config : ShardingConfig
        The settings; the communicator is not used.
    optimizer : optimizer
        The optimizer, as :func:`mpizero.optim.elementwise.adapt` returns it.
    step : StepBatches
        The grains of a global batch, and how they are assigned to ranks.
    itemsize : int
        Bytes of one element of a parameter.
    sample_bytes : tuple of int
        Bytes of each array of one sample's input and target.
    loss_scale : bool
        Whether the training has a loss scale.
    by_block : bool
        Whether the model is made of blocks; a black box computes all gradients together.
    in_place : bool
        Whether the model is a black box that writes its gradients in place.
    """

    row: Placement
    config: ShardingConfig
    optimizer: Any
    step: StepBatches
    itemsize: int
    sample_bytes: tuple[int, ...]
    loss_scale: bool = False
    by_block: bool = True
    in_place: bool = False

    @property
    def codec(self) -> Codec | None:
        """The codec that compresses gradient messages between peers; None without compression."""
        return gradient_codec(self.config.gradient_compression, self.itemsize)

    @property
    def bucket(self) -> int | None:
        """Number of elements in a bucket of gradients; None is the default size.

        The default is also assumed if the size is tuned in a run.
        """
        return self.config.bucket_elements(self.itemsize)

    @property
    def needs_norm(self) -> bool:
        """Tell whether the norm of the summed gradient must be known before the update."""
        return needs_norm(self.config, self.codec, loss_scale=self.loss_scale)
