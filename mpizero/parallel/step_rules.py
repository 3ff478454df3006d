"""Decide how a training step is done, from its settings alone: the engine and the plans of `mpizero plan` ask here."""

from __future__ import annotations

from typing import Any

from mpizero.comm.reduce.codecs import Codec, codec_of
from mpizero.layout.nodes import NodeOrder
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.placement import Placement


def keeps_gradients_on_device(config: ShardingConfig, ranks: int) -> bool:
    """Tell whether gradients stay on a GPU: those of a rank that is alone in its data group of ``ranks``.

    Not with ``optimizer_device="cpu"``, for which they must come to the host.
    """
    return config.device != "cpu" and config.optimizer_device != "cpu" and ranks == 1


def assigns_waves(placement: Placement, config: ShardingConfig, ranks: int) -> bool:
    """Tell whether a data group of ``ranks`` assigns grains in waves and sums gradients unit by unit."""
    return placement.waves and not keeps_gradients_on_device(config, ranks)


def overlaps_reduction(placement: Placement, peers: int, stages: int, codec: Codec | None) -> bool:
    """Tell whether a model of blocks sums whole rows of gradients, for all peers, during the backward pass.

    Not with compression, whose bits depend on where messages are cut; not in pipelines, whose stages end their last
    micro-batches at other times; and not where only the owner takes a sum: each would be sent to by all others in turn.

    Parameters
    ----------
    placement : Placement
        The row of the strategy.
    peers, stages : int
        Groups of ranks that exchange sums, and stages of the pipeline.
    codec : Codec or None
        How messages are compressed.
    """
    replicated = not (placement.waves or placement.shard_optimizer) and peers > 1
    return replicated and stages == 1 and codec is None


def needs_norm(config: ShardingConfig, codec: Codec | None, *, loss_scale: bool) -> bool:
    """Tell whether a step needs the norm of the summed gradient before the update.

    It does to clip the sum, and where finite gradients may have an infinite sum: under a loss scale, and in messages of
    16 bits that overflow.
    """
    return config.clip is not None or loss_scale or (codec is not None and codec.overflows)


def fuses_update(optimizer: Any, *, norm: bool, ties: bool, peers: int, waves: bool) -> bool:
    """Tell whether sum, division and update are one pass over memory.

    Parameters
    ----------
    optimizer : optimizer
        As :func:`mpizero.optim.adapt` returns it.
    norm : bool
        Whether the norm of the sum comes first, by :func:`needs_norm`.
    ties : bool
        Whether gradients of parameters that several stages share are exchanged before the update.
    peers : int
        Groups of ranks that exchange sums.
    waves : bool
        Whether gradients are summed unit by unit, by :func:`assigns_waves`: then nothing travels before the update.
    """
    able = optimizer.elementwise_kernel or optimizer.needs_tensor_norms
    return bool(able) and not norm and not ties and (peers == 1 or waves)


def gradient_codec(compression: str | None, itemsize: int) -> Codec | None:
    """Return the codec of gradient messages; only float32 is compressed.

    Raises
    ------
    ConfigError
        There is no such compression.
    """
    codec = codec_of(compression)
    return codec if itemsize == 4 else None


def gathers_units(placement: Placement, groups: int) -> bool:
    """Tell whether each of ``groups`` groups of ranks holds a shard, so that units are gathered before their use."""
    return placement.shard_parameters and groups > 1


def updated_by(placement: Placement, grid: NodeOrder) -> tuple[int, ...]:
    """Return the ranks of ``grid.data`` whose ranges this rank updates: with replicated state those of all peers."""
    return (grid.data.rank,) if placement.shard_optimizer else grid.peer_ranks


def wave_buffers(node_size: int) -> int:
    """Return how many units of gradients a node's wave buffer holds: one is filled while another is summed."""
    return 2 if node_size > 1 else 1
