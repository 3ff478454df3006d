"""Decide how a training step is done, from its settings alone: for the engine and for the plans of `mpizero plan`."""

from __future__ import annotations

from typing import Any

from mpizero.comm.reduce.codecs import Codec, codec_of
from mpizero.layout.nodes import NodeOrder
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.placement import Placement


def keeps_gradients_on_device(config: ShardingConfig, ranks: int) -> bool:
    """Tell whether gradients stay on the GPU: if a rank is alone in its data group, that is, ``ranks`` is 1.

    They do not stay there with ``optimizer_device="cpu"``: then they are needed on the host.
    """
    return config.device != "cpu" and config.optimizer_device != "cpu" and ranks == 1


def assigns_waves(placement: Placement, config: ShardingConfig, ranks: int) -> bool:
    """Tell whether a data group of ``ranks`` ranks computes grains in waves and sums gradients unit by unit."""
    return placement.waves and not keeps_gradients_on_device(config, ranks)


def overlaps_reduction(placement: Placement, peers: int, stages: int, codec: Codec | None) -> bool:
    """Tell whether a model of blocks sums whole rows of gradients, for all peers, during the backward pass.

    It does so only if the optimizer state is replicated. With ZeRO-1 only the owner needs a sum, so all other ranks
    would send to one rank at a time. It does not with compression, whose results depend on where messages are cut, and
    not in pipelines, whose stages end their last micro-batches at different times.

    Parameters
    ----------
    placement : Placement
        The strategy's row of the placement table.
    peers, stages : int
        Number of peers that exchange sums, and number of pipeline stages.
    codec : Codec or None
        How messages are compressed; None: they are not.
    """
    replicated = not (placement.waves or placement.shard_optimizer) and peers > 1
    return replicated and stages == 1 and codec is None


def needs_norm(config: ShardingConfig, codec: Codec | None, *, loss_scale: bool) -> bool:
    """Tell whether a step needs the norm of the summed gradient before the update.

    It needs it to clip the sum, and where finite gradients may have an infinite sum: with a loss scale, and with
    compression to a 16-bit type that can overflow.
    """
    return config.clip is not None or loss_scale or (codec is not None and codec.overflows)


def fuses_update(optimizer: Any, *, norm: bool, ties: bool, peers: int, waves: bool) -> bool:
    """Tell whether sum, division and update are one pass over memory.

    Parameters
    ----------
    optimizer : optimizer
        As :func:`mpizero.optim.adapt` returns it.
    norm : bool
        Whether the norm of the sum is needed before the update: :func:`needs_norm`.
    ties : bool
        Whether pipeline stages share parameters, whose gradients they exchange before the update.
    peers : int
        Number of peers that exchange sums.
    waves : bool
        Whether gradients are summed unit by unit (:func:`assigns_waves`): then nothing is left to send before the
        update.
    """
    able = optimizer.elementwise_kernel or optimizer.needs_tensor_norms
    return bool(able) and not norm and not ties and (peers == 1 or waves)


def gradient_codec(compression: str | None, itemsize: int) -> Codec | None:
    """Return the codec of gradient messages; None without compression, and for gradients that are not float32.

    Raises
    ------
    ConfigError
        If there is no such compression.
    """
    codec = codec_of(compression)
    return codec if itemsize == 4 else None


def gathers_units(placement: Placement, groups: int) -> bool:
    """Tell whether units are gathered before use: parameters are sharded over ``groups`` > 1 nodes (or ranks)."""
    return placement.shard_parameters and groups > 1


def updated_by(placement: Placement, grid: NodeOrder) -> tuple[int, ...]:
    """Return the ranks of ``grid.data`` whose shards this rank updates: itself, or all peers if state is replicated."""
    return (grid.data.rank,) if placement.shard_optimizer else grid.peer_ranks


def wave_buffers(node_size: int) -> int:
    """Return how many slots, each for one unit's gradients, a wave buffer has on a node of ``node_size`` ranks."""
    return 2 if node_size > 1 else 1
