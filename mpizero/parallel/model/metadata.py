"""Describe a sharded model: what is replicated, what is sharded, and how many bytes a rank stores and sends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mpizero.optim.elementwise import state_size, tensor_state_size
from mpizero.parallel.partition.tiles import exactness

if TYPE_CHECKING:
    from mpizero.parallel.config import ShardingConfig
    from mpizero.parallel.engine import Engine


@dataclass(frozen=True)
class ModelMetadata:
    """Describe how a model is distributed, and how many bytes this rank stores and sends.

    Attributes
    ----------
    strategy : str
        "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "TensorParallel", "PipelineParallel" or "3D-Parallelism (Hybrid)".
    zero_stage : int
        What the ranks of a data group shard. 0: nothing; 1: optimizer state; 2: also gradients; 3: also parameters.
    is_distributed : bool
        Whether the model has more than one rank.
    world_size, rank : int
        Number of ranks in ``config.comm``, and number of this rank.
    group_sizes, group_ranks : dict of str to int
        For each of the axes "pipeline", "tensor", "data" and "context": the number of ranks along it, and this rank's
        number on it.
    tiles : dict of str to int
        For each of the axes "tensor" and "context": the number of tiles in which layers compute along it.
    within_rounding : tuple of str
        Why results agree with one process only within rounding; empty if they have the bits of one process with the
        same tiles.
    averaged_every : int
        Number of steps between two averages if each rank trains a copy of its own (:class:`LocalSGDOptimizer`); else 0.
    nodes, ranks_per_node : int
        Number of groups of ranks that share memory (within this rank's data group), and number of ranks in each.
    replicated, sharded : tuple of str
        Which of "parameters", "gradients" and "optimizer state" every node keeps whole (every rank if ranks share no
        memory), and which of them are sharded over the ranks.
    parameter_count, trainable_count : int
        Number of parameter elements of the whole model, and of those that an optimizer trains.
    held_count : int
        Number of parameter elements of this rank's stage and tensor part, including copies of parameters that other
        stages own. In data parallelism this is the whole model.
    bytes_on_rank : dict of str to int
        Bytes in host memory by kind: this rank's private arrays, and its equal share of its node's windows. The kinds
        are those of ``formula_bytes``, "buffers" (gathered units, scratch for frozen gradients), and "exchange buffers"
        (messages; with the default ``bucket_mb`` at most 4 MiB for float32, 6 with compression, 8 for float64, for
        models of any size).
    bytes_on_device : dict of str to int
        Bytes by kind on this rank's GPU ("parameters", "gradients", "optimizer state", "buffers"); empty without a GPU.
    bytes_on_node : dict of str to int
        Bytes in host memory by kind on the whole node: its windows, and the private arrays of its ranks, assuming that
        each has as much as this rank.
    formula_bytes : dict of str to float
        Bytes by kind ("parameters", "gradients", "optimizer state", "residuals") that the strategy needs on a rank with
        one grain, on host and GPU together. Buffers are not counted.
    peak_bytes : int
        The largest number of bytes that this rank has held at once.
    bytes_sent_last_step : int
        Bytes that this rank sent to other ranks in the last training step.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ZeRO3Model(mz.nn.MLP(2, [4], 2), mz.ShardingConfig(comm="self"), optimizer=mz.AdamW()) as model:
    ...     found = model.metadata()
    >>> found.strategy, found.sharded, found.parameter_count
    ('ZeRO-3', ('parameters', 'gradients', 'optimizer state'), 22)
    >>> found.formula_bytes["optimizer state"]  # two arrays of 22 float32
    176.0
    """

    strategy: str
    zero_stage: int
    is_distributed: bool
    world_size: int
    rank: int
    group_sizes: dict[str, int]
    group_ranks: dict[str, int]
    tiles: dict[str, int]
    within_rounding: tuple[str, ...]
    averaged_every: int
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

    @property
    def exactness(self) -> str:
        """A text of what results are equal to, "the bits of one process with tiles=8", or why only within rounding."""
        if self.averaged_every and self.is_distributed:
            return f"no other number of ranks ({self.world_size} copies are averaged every {self.averaged_every} steps)"
        return exactness(self.tiles, self.within_rounding)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
        return asdict(self)


def describe(
    engine: Engine, config: ShardingConfig, bytes_sent: int, label: str | None = None, averaged_every: int = 0
) -> ModelMetadata:
    """Collect the metadata of a model from its engine. Not collective.

    ``config`` is the configuration of the model; with local SGD, ``engine.config`` has only one rank. ``bytes_sent`` is
    the number of bytes that this rank sent in the last step. ``label`` is the strategy's name in the metadata; None
    takes the name in the placement table. ``averaged_every`` is the field of the result.
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
        tiles=engine.partitioned.parallel_layout.all_tiles,
        within_rounding=engine.within_rounding,
        averaged_every=averaged_every,
        nodes=grid.peers.size,
        ranks_per_node=grid.node.size,
        replicated=tuple(kind for kind, sharded in flags.items() if not sharded),
        sharded=tuple(kind for kind, sharded in flags.items() if sharded),
        parameter_count=engine.whole.parameter_count,
        trainable_count=sum(entry.spec.size for entry in engine.whole.layout.parameters if entry.spec.optimized),
        held_count=engine.layout.size,
        bytes_on_rank=memory.kinds(),
        bytes_on_device=engine.compute_device.held(),
        bytes_on_node=per_node,
        formula_bytes=_formula(engine),
        peak_bytes=memory.peak_bytes,
        bytes_sent_last_step=bytes_sent,
    )


def _formula(engine: Engine) -> dict[str, float]:
    """Compute the bytes by kind that the strategy needs on one rank.

    [Note: memory formulas] Let P be the number of parameter elements on this stage and tensor part (for gradients only
    those that are not frozen, for optimizer state only those that an optimizer trains), b the bytes of an element, and
    s the number of state arrays. Let n be the ranks of the data group, and L the ranks of a node (1 if ranks share no
    memory). On each rank, parameters need P*b/n if they are sharded and P*b/L if not; gradients need P*b/n if they are
    summed in waves and P*b if not; state needs s*P*b/n if it is sharded and s*P*b/L if not. Compression with error
    feedback also keeps residuals, 2*P*b/L if state is not sharded. If state is sharded, a rank keeps no residuals for
    its own ranges: with d peers, itself included, that makes 2*P*b/L*(1 - 1/d). P is then the number of gradients that
    are compressed. The state of whole tensors is divided over n ranks with every strategy, evenly but for tensors.
    """
    row, grid = engine.placement, engine.grid
    item, n, local = engine.dtype.itemsize, grid.data.size, grid.node.size
    every = whole = 0
    if engine.updater is not None:
        optimizer, specs = engine.updater.optimizer, [entry.spec for entry in engine.layout.parameters]
        every = sum(state_size(optimizer, spec) for spec in specs)
        whole = sum(tensor_state_size(optimizer, spec) for spec in specs)
    changed = sum(entry.spec.size for entry in engine.layout.parameters if entry.spec.trainable)
    feedback = {}
    if engine.exchange.feedback:
        peers = grid.peers.size
        packed = engine.layout.gradient_size - sum(span.size for span in engine.exchange.exact)
        feedback["residuals"] = 2 * packed * item / local * (1 if engine.exchange.replicated else 1 - 1 / peers)
    return feedback | {
        "parameters": engine.layout.size * item / (n if row.shard_parameters else local),
        "gradients": changed * item / (n if row.waves else 1),
        "optimizer state": (every - whole) * item / (n if row.shard_optimizer else local) + whole * item / n,
    }
