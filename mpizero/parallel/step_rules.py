"""Decide from the settings how a training step is done: rules that the engine and the command `mpizero plan` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mpizero.comm.reduce import Codec, codec_of
from mpizero.layout.flat import FlatLayout, ParameterUse, Span
from mpizero.layout.mesh import NodeOrder
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.placement import Placement

if TYPE_CHECKING:
    from mpizero.parallel.partition.local_model import PartitionedModel

#: Which gradients are written to scratch memory, see :func:`scratch_use`.
ScratchUse = Literal["grains", "micro-batches"] | None


def keeps_gradients_on_device(config: ShardingConfig, ranks: int) -> bool:
    """Tell whether gradients stay on the GPU; ``ranks`` is the number of ranks in the data group.

    They do if that number is 1 and ``optimizer_device`` is not "cpu". Otherwise they are summed on the host.
    """
    return config.device != "cpu" and config.optimizer_device != "cpu" and ranks == 1


def assigns_waves(placement: Placement, config: ShardingConfig, ranks: int) -> bool:
    """Tell whether a data group of ``ranks`` ranks computes grains in waves, and so sums gradients unit by unit."""
    return placement.waves and not keeps_gradients_on_device(config, ranks)


def assigned_in_advance(placement: Placement, config: ShardingConfig, grid: NodeOrder, model_ranks: int) -> str:
    """Return why grains are assigned before a step, although the settings ask for ``grain_assignment="dynamic"``.

    It is "" where they do not, where ranks do claim grains, and for one rank, which computes all of them anyway.
    ``model_ranks`` is the number of ranks that hold one replica together.
    """
    if config.grain_assignment == "static" or grid.data.size * model_ranks == 1:
        return ""
    if placement.waves:
        return "this strategy sums the gradients of all ranks after each grain (only DDP and ZeRO-1 do not)"
    if model_ranks > 1:
        return "the ranks of a pipeline, tensor or context group compute a grain together"
    if config.device != "cpu":
        return "gradients of GPUs are not in memory that ranks share"
    return "" if max(grid.group_sizes) > 1 else "no two ranks share memory"


def claims_grains(placement: Placement, config: ShardingConfig, grid: NodeOrder, model_ranks: int) -> bool:
    """Tell whether the ranks of a node claim grains while they compute; the parameters are as above."""
    asked = config.grain_assignment == "dynamic" and grid.data.size > 1
    return asked and not assigned_in_advance(placement, config, grid, model_ranks)


def overlaps_reduction(placement: Placement, peers: int, stages: int, codec: Codec | None) -> bool:
    """Tell whether a model of blocks sums its gradients over the peers during the backward pass (DDP).

    This needs replicated optimizer state: with ZeRO-1 only the owner needs a sum, and in the order of the backward pass
    all ranks would send to the same owner at a time. There is no overlap with compression, because its results depend
    on where messages are cut. There is none in pipelines either, because their stages end their last micro-batches at
    different times.

    Parameters
    ----------
    placement : Placement
        The strategy's row of the placement table.
    peers, stages : int
        Number of peers that exchange sums, and number of pipeline stages.
    codec : Codec or None
        How messages are compressed; None without compression.
    """
    replicated = not (placement.waves or placement.shard_optimizer) and peers > 1
    return replicated and stages == 1 and codec is None


def scratch_use(config: ShardingConfig, stages: int, *, by_block: bool) -> ScratchUse:
    """Tell which gradients are written to scratch memory, block by block, where rows hold gradients.

    Those of "grains" are added to another grain's row, those of "micro-batches" to the row of their own grain. Scratch
    memory needs blocks that end their backward passes one after the other: not so in pipelines, where a stage computes
    several micro-batches at a time, nor on GPUs, where no block's end is waited for.

    Parameters
    ----------
    config : ShardingConfig
        The settings.
    stages : int
        Number of pipeline stages.
    by_block : bool
        Whether the model is made of blocks: a black box computes all gradients together.
    """
    if not by_block or stages > 1 or config.device != "cpu":
        return None
    return "grains" if config.accumulate == 1 else "micro-batches"


def needs_norm(config: ShardingConfig, codec: Codec | None, *, loss_scale: bool) -> bool:
    """Tell whether a step needs the norm of the summed gradient before the update.

    The norm is needed for clipping. It is also needed where the sum of finite gradients may overflow: with a loss
    scale, and with compression to float16.
    """
    return config.clip is not None or loss_scale or (codec is not None and codec.overflows)


def fuses_update(optimizer: Any, *, norm: bool, ties: bool, peers: int, waves: bool) -> bool:
    """Tell whether gradients are summed, divided by the weight and used for the update in one pass over memory.

    Parameters
    ----------
    optimizer : optimizer
        An optimizer that :func:`mpizero.optim.elementwise.adapt` returned.
    norm : bool
        Whether the norm of the sum is needed before the update (:func:`needs_norm`).
    ties : bool
        Whether pipeline stages share parameters, whose gradients they exchange before the update.
    peers : int
        Number of peers that exchange sums.
    waves : bool
        Whether gradients are summed unit by unit (:func:`assigns_waves`). Then all sums are complete before the update,
        and no messages are left to send.
    """
    able = optimizer.elementwise_kernel or optimizer.needs_tensor_norms
    return bool(able) and not norm and not ties and (peers == 1 or waves)


def gradient_codec(compression: str | None, itemsize: int) -> Codec | None:
    """Return the codec that compresses gradient messages.

    None if ``compression`` is None or elements do not have 4 bytes: only float32 gradients are compressed.

    Raises
    ------
    ConfigError
        If ``compression`` is not a value that ``ShardingConfig.gradient_compression`` takes.
    """
    codec = codec_of(compression)
    return codec if itemsize == 4 else None


def sent_exactly(placement: Placement, partitioned: PartitionedModel, layout: FlatLayout) -> tuple[Span, ...]:
    """Return the ranges of the vector of all gradients of ``layout`` that are never compressed, ascending.

    See [Note: copies] in ``parallel/gradients/exchange.py``. A parameter that several stages use is among them only
    with replicated optimizer state: otherwise its owners add the sums of all uses, which are the same for all copies.
    """
    shared = () if placement.shard_optimizer else partitioned.uses

    def exact(entry: ParameterUse) -> bool:
        spec = layout.by_name[entry.spec.tied or entry.spec.name].spec
        unsplit = partitioned.parallel_layout.tensor > 1 and spec.part is None
        return spec.averaged or unsplit or (spec.guest or spec.name) in shared

    return layout.gradients_of(exact)


def gathers_units(placement: Placement, groups: int) -> bool:
    """Tell whether units are gathered before use: if parameters are sharded and ``groups`` > 1.

    ``groups`` is the number of nodes, or of ranks if they share no memory.
    """
    return placement.shard_parameters and groups > 1


def updated_by(placement: Placement, grid: NodeOrder) -> tuple[int, ...]:
    """Return the ranks of ``grid.data`` whose shards this rank updates.

    That is only itself if the optimizer state is sharded. Otherwise it is all its peers, itself included: every node
    then updates a whole copy.
    """
    return (grid.data.rank,) if placement.shard_optimizer else grid.peer_ranks


def wave_slots(layout: FlatLayout, node_size: int, *, in_place: bool) -> list[int]:
    """Return, for each slot of a wave buffer, how many elements each rank of a node of ``node_size`` ranks has in it.

    A slot holds the gradients of one unit. If ``in_place``, a function writes the gradients of all units at once, and
    one slot holds them all.
    """
    if in_place:
        return [layout.gradient_size]
    return [layout.largest_gradient] * (2 if node_size > 1 else 1)
