"""Describe a sharded model: what is replicated and sharded, and the bytes it really holds and sends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpizero.layout import FlatLayout
    from mpizero.parallel.config import ShardingConfig
    from mpizero.parallel.engine import Engine


@dataclass(frozen=True)
class ModelMetadata:
    """Describe the placement of a model and the measured figures of one rank.

    Attributes
    ----------
    strategy : str
        "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "TensorParallel", "PipelineParallel" or "3D-Parallelism (Hybrid)".
    zero_stage : int
        What the ranks of a data group shard. 0: nothing; 1: optimizer state; 2: also gradients; 3: also parameters.
    is_distributed : bool
        Whether more than one rank takes part.
    world_size, rank : int
        Number of all ranks, and number of this rank.
    group_sizes, group_ranks : dict of str to int
        Number of ranks along each axis ("pipeline", "tensor", "data", "context"), and this rank's number on it.
    nodes, ranks_per_node : int
        Number of groups of ranks that share memory, and number of ranks in each.
    replicated, sharded : tuple of str
        Which of "parameters", "gradients", "optimizer state" each node (each rank with private memory) keeps whole,
        and which are split over the ranks.
    parameter_count, trainable_count : int
        Number of parameters of the whole model, and of those that are trained.
    held_count : int
        Number of parameters of this rank's stage and tensor part, with its copies of parameters of other stages;
        all parameters in data parallelism.
    bytes_on_rank : dict of str to int
        Bytes by kind: this rank's private arrays and its equal share of its node's windows. The kinds are those of
        ``formula_bytes``, "buffers" (gathered units, scratch for frozen gradients), and "exchange buffers" (messages;
        at most 4 MiB for float32, 6 with compression, 8 for float64, for models of any size).
    bytes_on_device : dict of str to int
        Bytes by kind on this rank's GPU ("parameters", "gradients", "optimizer state", "buffers"); empty without one.
    bytes_on_node : dict of str to int
        Bytes by kind on the node: windows and the private arrays of its ranks, if all hold as much as this rank.
    formula_bytes : dict of str to float
        Bytes by kind that the strategy needs on a rank with one grain, without buffers, on host and GPU together.
    peak_bytes : int
        The most bytes that this rank has held at a time.
    bytes_sent_last_step : int
        Bytes this rank sent to other ranks in the last training step.
    """

    strategy: str
    zero_stage: int
    is_distributed: bool
    world_size: int
    rank: int
    group_sizes: dict[str, int]
    group_ranks: dict[str, int]
    nodes: int
    ranks_per_node: int
    replicated: tuple[str, ...]
    sharded: tuple[str, ...]
    parameter_count: int
    trainable_count: int
    held_count: int
    bytes_on_rank: dict[str, int]
    bytes_on_device: dict[str, int]
    bytes_on_node: dict[str, int]
    formula_bytes: dict[str, float]
    peak_bytes: int
    bytes_sent_last_step: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
        return asdict(self)


def describe(engine: Engine, config: ShardingConfig, bytes_sent: int, label: str | None = None) -> ModelMetadata:
    """Collect the metadata of a model from its engine. Not collective.

    ``label`` is the name of the strategy in the metadata; None takes the name in the table of strategies. ``config`` is
    the model's own configuration: with local SGD, the engine has one for a single rank.
    """
    row, grid, memory = engine.placement, engine.grid, engine.memory
    flags = {
        "parameters": row.shard_parameters,
        "gradients": row.shard_gradients,
        "optimizer state": row.shard_optimizer,
    }
    per_node = {
        kind: memory.shared_bytes[kind] + memory.private_bytes[kind] * grid.node.size
        for kind in sorted({*memory.shared_bytes, *memory.private_bytes})
    }
    return ModelMetadata(
        strategy=label or row.strategy,
        zero_stage=sum(flags.values()),
        is_distributed=config.communicator.size > 1,
        world_size=config.communicator.size,
        rank=config.communicator.rank,
        group_sizes=dict(grid.axes.sizes),
        group_ranks=grid.here._asdict(),
        nodes=grid.peers.size,
        ranks_per_node=grid.node.size,
        replicated=tuple(kind for kind, sharded in flags.items() if not sharded),
        sharded=tuple(kind for kind, sharded in flags.items() if sharded),
        parameter_count=engine.whole.parameter_count,
        trainable_count=_trainable(engine.whole.layout),
        held_count=engine.layout.size,
        bytes_on_rank=memory.kinds(),
        bytes_on_device=engine.compute_device.held(),
        bytes_on_node=per_node,
        formula_bytes=_formula(engine),
        peak_bytes=memory.peak_bytes,
        bytes_sent_last_step=bytes_sent,
    )


def _trainable(layout: FlatLayout) -> int:
    return sum(entry.spec.size for entry in layout.parameters if entry.spec.trainable)


def _formula(engine: Engine) -> dict[str, float]:
    """Compute the bytes by kind that the strategy needs on one rank.

    [Note: memory formulas] With P parameters of b bytes on this stage and tensor part, s state arrays, n ranks of the
    data group, L of them on a node (private memory: L = 1): replicated parameters take P*b/L, sharded ones P*b/n (on a
    single node both are the node's one copy); whole rows of gradients P*b, owned sums P*b/n; replicated state s*P*b/L,
    sharded s*P*b/n. Compression with error feedback keeps residuals for the ranges of the other peers, with replicated
    state for its own too, twice: 2*P*b/L without or with the own part of the d peers.
    """
    row, grid = engine.placement, engine.grid
    item, n, local = engine.dtype.itemsize, grid.data.size, grid.node.size
    slots = len(engine.updater.state) if engine.updater is not None else 0
    trainable = _trainable(engine.layout)
    feedback = {}
    if engine.exchange.feedback:
        peers = grid.peers.size
        feedback["residuals"] = 2 * trainable * item / local * (1 if engine.exchange.replicated else 1 - 1 / peers)
    return feedback | {
        "parameters": engine.layout.size * item / (n if row.shard_parameters else local),
        "gradients": trainable * item / (n if row.shard_gradients else 1),
        "optimizer state": slots * trainable * item / (n if row.shard_optimizer else local),
    }
