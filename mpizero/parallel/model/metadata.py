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
        What the ranks of a data group shard: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
    is_distributed : bool
        Whether more than one rank takes part.
    world_size, rank : int
        All ranks, and this one.
    group_sizes, group_ranks : dict of str to int
        Ranks along each axis ("pipeline", "tensor", "data", "context"), and this rank's place on it.
    nodes, ranks_per_node : int
        Groups of ranks that share memory, and the ranks of each.
    replicated, sharded : tuple of str
        Which of "parameters", "gradients", "optimizer state" each node (each rank with private memory) keeps whole,
        and which are split over the ranks.
    parameter_count, trainable_count : int
        Elements of the whole model.
    held_count : int
        Parameters of this rank's stage and tensor part, copies of other stages' included; all in data parallelism.
    bytes_on_rank : dict of str to int
        By kind: this rank's private arrays and its equal part of its node's windows. The kinds of ``formula_bytes``,
        "buffers" (gathered units, scratch for frozen gradients), and "exchange buffers" (messages; at most 4 MiB for
        float32, 6 with compression, 8 for float64, whatever the model's size).
    bytes_on_device : dict of str to int
        By kind: what this rank keeps on its GPU ("parameters", "gradients", "optimizer state", "buffers"); empty
        without one.
    bytes_on_node : dict of str to int
        By kind, windows and every rank's private arrays, if all ranks hold as much as this one.
    formula_bytes : dict of str to float
        By kind, what the placement needs with one grain a rank, buffers left out; optimizer state wherever it lies.
    peak_bytes : int
        The most that this rank has held.
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
    """Collect the metadata of an engine, whose ranks may train alone (local SGD). Not collective.

    ``label`` is the strategy's name where the row of the placement table does not say all.
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
    """Return the bytes that one rank's part of the placement needs.

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
