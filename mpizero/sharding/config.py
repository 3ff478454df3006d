"""Define strategies and settings, and decide from them how a training step is executed.

The placement table has a row for each strategy: which state is sharded, and how grains are assigned to ranks
(:class:`Placement`). :class:`Config` has all other settings; :class:`ShardingConfig` adds those of a
:class:`~mpizero.Mesh`. The functions of this module decide from placement and settings how a step is executed. The
engine and the command `mpizero plan` call the same functions, so that a plan counts what a training does.

[Note: rounds in a context group] Each rank of a context group computes one part of a grain. The parts of one grain are
neighbours in the tree of sums, so no two parts that one rank computes are neighbours, and a rank cannot add its own
parts first. To sum gradients over ranks once a step, a rank would have to keep a copy of the whole gradient for each of
its grains. Context groups are for long sequences, where memory is short and computing a grain takes much longer than
sending gradients. So ZeRO-1, where a rank needs the sums of its shard only, sums gradients in every round, as ZeRO-2
does. DDP, where every node needs all sums, keeps the copies and sends once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from mpizero._util.checks import Unexpected, flag, number, positive, whole
from mpizero._util.names import explains, nearest
from mpizero._util.settings import Settings, like, one_of, optional, setting, shown
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.reduce import WIRE, Codec, codec_of
from mpizero.errors import ArgumentError, ConfigError
from mpizero.kernels.gpu import SIXTEEN_BITS
from mpizero.layout import GrainRule
from mpizero.layout.flat import FlatLayout, ParameterUse, Span
from mpizero.layout.mesh import NodeOrder
from mpizero.nn.models import efficient_samples
from mpizero.optim import DynamicLossScale
from mpizero.sharding.mesh import Mesh, NodeSettings
from mpizero.sharding.partition import PartitionedModel, SplitSettings, Tiles
from mpizero.sharding.step_report import BadSteps


@dataclass(frozen=True)
class Placement:
    """Describe what a strategy shards and how it assigns grains.

    Attributes
    ----------
    strategy : str
        The strategy's name in a model's metadata.
    saved_as : str
        The strategy's name in checkpoints. It is the same for FSDP and ZeRO-3, which shard alike, so that a load which
        requires the same layout accepts a checkpoint of either.
    shard_parameters, shard_gradients, shard_optimizer : bool
        Whether each rank keeps only the shard that it owns; otherwise there is one copy per node (per rank if ranks
        share no memory).
    one_unit : bool
        Whether the whole model is one unit; otherwise each block is a unit.
    in_rounds : bool
        Whether grains are computed in rounds, and the gradients of each round are reduced unit by unit.
    """

    strategy: str
    saved_as: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    one_unit: bool
    in_rounds: bool

    @property
    def zero_stage(self) -> int:
        """The number of kinds of state (optimizer state, gradients, parameters) that are sharded: 0 (DDP) to 3."""
        return self.shard_optimizer + self.shard_gradients + self.shard_parameters

    def in_contexts(self, contexts: int) -> Placement:
        """Return the placement that is executed with context groups of ``contexts`` ranks. Not collective.

        See [Note: rounds in a context group].
        """
        return replace(self, in_rounds=True) if contexts > 1 and self.shard_optimizer else self


PLACEMENTS = {
    "ddp": Placement("DDP", "DDP", False, False, False, True, False),
    "zero1": Placement("ZeRO-1", "ZeRO-1", False, False, True, False, False),
    "zero2": Placement("ZeRO-2", "ZeRO-2", False, True, True, False, True),
    "zero3": Placement("ZeRO-3", "ZeRO-3", True, True, True, False, True),
    "fsdp": Placement("FSDP", "ZeRO-3", True, True, True, False, True),
}


def placement(strategy: str) -> Placement:
    """Return what ``strategy`` shards: "ddp", "zero1", "zero2", "zero3" or "fsdp". Not collective.

    Raises
    ------
    ConfigError
        If ``strategy`` is none of these names.
    """
    if not isinstance(strategy, str) or strategy not in PLACEMENTS:
        raise ConfigError(
            f"unknown strategy {strategy!r}: choose one of {', '.join(PLACEMENTS)}{nearest(strategy, PLACEMENTS)}"
        )
    return PLACEMENTS[strategy]


#: When grains are assigned to ranks: before a step, or while they compute.
ASSIGNMENTS = ("static", "dynamic")
_DEVICES = ("cpu", "cuda")


def _compression(value: Any) -> str:
    try:
        codec_of(value)
    except ConfigError:
        raise Unexpected(
            '"bf16", "fp16", "int8", or "topk:SHARE" with the share of the values that is sent, more than 0 and less '
            'than 0.5, such as "topk:0.01"'
        ) from None
    return str(value)


def _bucket(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 4096:
        raise Unexpected("MiB of more than 0 and at most 4096")
    return float(value)


def _bad_steps(value: Any) -> BadSteps:
    if not isinstance(value, BadSteps):
        raise Unexpected("mpizero.BadSteps(limit=..., warn=..., callback=...)")
    return value


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    """Hold how ranks compute a step; :class:`Config` describes the settings."""

    micro_batch: int | None = setting(None, optional(whole(1)), resume="never")
    accumulate: int = setting(1, whole(1), resume="never")
    clip: float | None = setting(None, optional(positive), off=0.0)
    ema: float | None = setting(None, optional(number(0.0, 1.0, above=True)))
    gradient_compression: str | None = setting(None, optional(_compression), off="none")
    wire: str | None = setting(None, optional(one_of(WIRE.name)), off="none")
    wire_parameters: bool = setting(False, flag)
    threads: int = setting(1, whole(1, 1024), resume="free")
    check_every: int = setting(0, whole(0), resume="free")
    device: str = setting("cpu", one_of(*_DEVICES), resume="free")
    optimizer_device: str | None = setting(None, optional(one_of(*_DEVICES)), resume="free")
    direct_messages: bool = setting(True, flag, resume="free")
    mixed_precision: str | None = setting(None, optional(one_of(*reversed(SIXTEEN_BITS))))

    def check_combination(self) -> None:
        """Raise ``ConfigError`` for settings that exclude each other, and for settings that need a missing one.

        ``wire`` excludes ``gradient_compression``; ``wire_parameters`` needs ``wire``, and excludes ``ema`` and GPUs;
        ``optimizer_device`` and ``mixed_precision`` need ``device="cuda"``.
        """
        super().check_combination()
        if self.wire is not None and self.gradient_compression is not None:
            compression = f"{self.named('gradient_compression')} = {shown(self.gradient_compression)}"
            raise self.reject("wire", f"sends the sums themselves in 16 bits: leave out {compression}, or wire")
        if self.wire_parameters and self.wire is None:
            raise self.reject("wire_parameters", f'needs {self.named("wire")} = "{WIRE.name}"')
        if self.wire_parameters and (self.ema is not None or self.device != "cpu"):
            other = "ema" if self.ema is not None else "device"
            raise self.reject("wire_parameters", f"cannot be used with {self.named(other)}: leave one of them out")
        for name in ("optimizer_device", "mixed_precision"):
            if getattr(self, name) not in (None, "cpu") and self.device == "cpu":
                raise self.reject(name, f'is for GPUs: give {self.named("device")} = "cuda" with it, or leave it out')


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings(Settings):
    """Hold how a data group divides grains and reduces gradients; :class:`Config` describes the settings."""

    grain_assignment: str = setting("static", one_of(*ASSIGNMENTS), resume="free")
    bucket_mb: float | None = setting(None, optional(_bucket), resume="free")


@explains
@dataclass(frozen=True, kw_only=True, repr=False)
class Config(SplitSettings, DataParallelSettings, ComputeSettings):
    """Hold the settings of a training: how ranks share its work, how they compute, and what they send.

    A Config is plain data: it can be compared, hashed and pickled. The ranks are given separately, as a
    :class:`~mpizero.Mesh`.

    Parameters
    ----------
    micro_batch : int or None
        Number of samples in one forward and backward pass. None: ceil(ceil(global batch / accumulate) / 16), but no
        more than the model's matrix products need to be fast (``docs/concepts.md``); after a checkpoint with optimizer
        state was loaded, the number in the checkpoint.
    accumulate : int
        Number of micro-batches in one grain. The gradients of the micro-batches are added one after the other; a grain
        has ``micro_batch * accumulate`` samples.
    clip : float or None
        A gradient whose global norm is larger than ``clip`` is scaled to this norm before the update; None does not
        clip.
    ema : float or None
        Decay, between 0 and 1, of an exponential moving average of the trained parameters; None keeps no average. The
        average is one more array of the optimizer state, sharded with it. It begins with the parameters before the
        first step; each update moves it towards the parameters by (1 - ``ema``) of the distance. ``evaluate`` and
        ``predict`` use it with ``ema=True``.
    tiles : int, mapping of str to int, or None
        Number of tiles into which layers or sequences are cut, a property of the training like ``micro_batch``: tensor
        and context groups whose size is this number divided by a power of two give the same bits, one process included.
        A mapping has numbers for the axes "tensor" and "context". For None, or an axis without a number, it is the size
        of the groups; after a run resumes, the number in its checkpoint (docs/parallelism.md).
    schedule : {"gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v"}
        Schedule of the pipeline.
    virtual_stages : int
        Number of chunks on each pipeline stage, for "interleaved".
    cuts : sequence of int or None
        Index of the first block of every pipeline chunk but the first one; only with a pipeline. None chooses cuts so
        that the stages have about equal costs.
    costs : sequence of float or None
        Cost of every block, from which ``cuts=None`` chooses, for example the result of
        :func:`~mpizero.sharding.measured_costs`. None uses the floating-point operations of the block's layers.
    grain_assignment : {"static", "dynamic"}
        "static" assigns the grains of a step to ranks before the step, equally many to each. With "dynamic" a rank that
        is free takes the next few grains of its node; use it if the costs of grains or the speeds of ranks differ. Both
        give the same bits. "dynamic" works with DDP and ZeRO-1 on ranks that share memory, into which the node's
        samples are copied; otherwise rank 0 prints a notice, and grains are assigned before the step.
    auto_sync_gradients : bool
        Whether ``compute_gradients`` and ``train`` sum gradients over the ranks. If False, ``train`` only computes this
        rank's gradient; ``synchronize_gradients`` then sums it over the ranks, and ``optimizer.step()`` updates.
    learning_rate : float
        Learning rate, > 0, of the plain SGD that trains a model for which no optimizer was created.
    minimum_parameter_group_size : int
        A block with fewer parameter elements than this forms one unit with a neighbouring block (not with DDP, where
        the whole model is one unit).
    gradient_compression : {None, "bf16", "fp16", "int8", "topk:SHARE"}
        Compresses the float32 gradients that are sent between nodes (between ranks if they share no memory): to 16
        bits, to 8 bits, or to the fraction of elements with the largest magnitudes ("topk:0.01": one in a hundred).
        Sums are still computed in float32. The part of the values that int8 and top-k do not send is kept and added to
        later messages (error feedback). Gradients of a parameter are not compressed if other ranks update a copy of the
        parameter (docs/nodes.md). With compression, results on different numbers of ranks are no longer equal to the
        bit.
    wire : {None, "bfloat16"}
        "bfloat16" rounds the gradients of grains and each of their sums to bfloat16, on one process too, and sends them
        in 16 bits. The results then have other bits than without ``wire``, and again the same bits on any number of
        ranks (docs/nodes.md). Needs a float32 model. Statistics of samples, such as running means, are not rounded.
    wire_parameters : bool
        Whether parameters, too, are rounded to bfloat16 after each update, and sent in 16 bits. Updates are made to
        *master weights* in float32, which are one more array of the optimizer state. Needs ``wire``, an optimizer that
        updates each element by itself, and a model without statistics of samples; not with ``ema``.
    bucket_mb : float or None
        Size of a bucket in MiB. A bucket is the part of the partial sums of gradients that nodes (ranks if they share
        no memory) exchange together. Up to eight buckets are in flight, and the message buffers of each take up to
        twice its size. None is 2^19 elements. The size changes neither results nor how many bytes are sent.
    threads : int
        Number of threads that compiled kernels and BLAS use on each rank.
    check_every : int
        Every this many steps, parameters and optimizer state are checked for corrupted memory; 0 is never.
    device : {"cpu", "cuda"}
        Where the layers of a model of blocks compute: "cuda" is a GPU. Rank i of a node uses the node's GPU number i
        modulo the number of the node's GPUs (docs/gpu.md).
    optimizer_device : {None, "cpu", "cuda"}
        Where optimizer state is stored and parameters are updated. None is the device of the layers, but the host for
        an optimizer that the user has written or that updates whole tensors. "cpu" saves GPU memory (offloading).
    direct_messages : bool
        Whether activations and their gradients are sent directly from GPU to GPU, if a trial at the start shows that
        MPI can do that. If False, messages always go through the host's memory.
    mixed_precision : {None, "bfloat16", "float16"}
        Rounds the operands of matrix products on GPUs to this type. The products are added in float32, and everything
        else is in float32. With "float16", an optimizer created without a loss scale gets a default dynamic one.
    bad_steps : BadSteps
        What happens when a step is skipped because a loss or a gradient is not finite. The default: each such step is
        reported on standard error, and five in a row raise an error (docs/bad_numbers.md).

    Raises
    ------
    ConfigError
        If a value is invalid, or values do not fit together.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.Config(micro_batch=4, clip=1.0) == mz.Config(clip=1.0, micro_batch=4)
    True
    >>> mz.Config(micro_batch=0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: micro_batch=0: expected a whole number >= 1
    """

    auto_sync_gradients: bool = setting(True, flag)
    learning_rate: float = setting(0.01, positive)
    minimum_parameter_group_size: int = setting(1024, whole(1))
    bad_steps: BadSteps = setting(BadSteps(), _bad_steps)

    def check_combination(self) -> None:
        """Raise ``ConfigError`` for values that do not fit together; the message names the setting."""
        super().check_combination()
        check_bucket(self, self.gradient_compression)

    def __repr__(self) -> str:
        """Return the settings that are not the defaults, as a call that makes an equal object."""
        changed = [item for item in fields(self) if getattr(self, item.name) != item.default]
        return f"{type(self).__name__}({', '.join(f'{item.name}={getattr(self, item.name)!r}' for item in changed)})"

    def __hash__(self) -> int:
        """Return the hash of the settings."""
        values = [getattr(self, item.name) for item in fields(Config)]
        return hash(tuple(tuple(value.items()) if isinstance(value, dict) else value for value in values))

    def replace(self, **changes: Any) -> Self:
        """Return a copy in which the settings named in ``changes`` have the given values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{**values, **changes})

    def with_tiles(self, tiles: Tiles) -> Self:
        """Return a copy with other ``tiles``; a copy of a :class:`ShardingConfig` keeps its mesh. Not collective."""
        return self.replace(tiles=tiles)

    def comparable(self) -> dict[str, Any]:
        """Return the settings that must be equal on every rank, by name; of ``bad_steps`` that is only the limit."""
        values = {field.name: getattr(self, field.name) for field in fields(Config)}
        del values["bad_steps"]
        return {**values, "bad_steps.limit": self.bad_steps.limit}

    def loss_scale(self, scale: DynamicLossScale | None) -> DynamicLossScale | None:
        """Return ``scale``; if it is None and ``mixed_precision`` is "float16", a default loss scale to train with."""
        return DynamicLossScale() if scale is None and self.mixed_precision == "float16" else scale

    def grain_rule(self, model: Any = None, samples: tuple[Any, Any] | None = None) -> GrainRule:
        """Return the rule that cuts global batches into grains for ``model``, which is None if it is not known yet.

        ``samples`` is a pair ``(x, y)`` with the types and sample shapes of the batches that the model is trained on;
        None if they are unknown.
        """
        if self.micro_batch is not None or model is None:
            return GrainRule(self.micro_batch, self.accumulate)
        if not hasattr(model, "efficient_samples"):
            efficient, least = efficient_samples(model)
            return GrainRule(None, self.accumulate, efficient, least=least)
        return GrainRule(None, self.accumulate, samples and model.efficient_samples(*samples), coarse=True)

    def grain_size(self, global_batch: int) -> int:
        """Return the number of samples in a full grain; without ``micro_batch``, the default for an unknown model."""
        return self.grain_rule().grain_size(global_batch)

    def bucket_elements(self, itemsize: int) -> int | None:
        """Return ``bucket_mb`` as a number of elements of ``itemsize`` bytes; None if ``bucket_mb`` is None."""
        return None if self.bucket_mb is None else elements_of(self.bucket_mb, itemsize)


@explains
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardingConfig(Config, NodeSettings):
    """Hold settings and ranks together: a :class:`Config` that also takes the arguments of a :class:`~mpizero.Mesh`.

    The class of a strategy takes a ShardingConfig, as in ``ZeRO2Model(model, config)``. New programs give
    :func:`distribute` a mesh and a :class:`Config`. A ShardingConfig compares equal only to itself. As a context
    manager it closes its mesh at the end.

    Parameters
    ----------
    comm : mpi4py communicator, InMemoryCommunicator, "self" or None
        The ranks that train together, as for :class:`~mpizero.Mesh`.
    share_node_memory, ranks_per_node, shard_nodes, timeout, embedded
        As for :class:`~mpizero.Mesh`.
    **settings
        The settings of :class:`Config`.

    Raises
    ------
    ConfigError
        If a value is invalid.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self", micro_batch=4, clip=1.0) as config:
    ...     config.communicator.size, config.micro_batch, config.threads
    (1, 4, 1)
    """

    comm: Any = None
    timeout: float | None = like(Mesh, "timeout")
    embedded: bool = like(Mesh, "embedded")

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` if a value is invalid; the message names the setting."""
        super().__post_init__()
        resources = self.values_of(NodeSettings) | {"timeout": self.timeout, "embedded": self.embedded}
        object.__setattr__(self, "_mesh", Mesh(self.comm, **resources))

    @property
    def mesh(self) -> Mesh:
        """The mesh, which has the ranks. Not collective."""
        mesh: Mesh = self.__dict__["_mesh"]
        return mesh

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @classmethod
    def default(cls, comm: Any = None) -> Self:
        """Return a configuration with all default values."""
        return cls(comm=comm)

    @classmethod
    def for_high_bandwidth(cls, comm: Any = None) -> Self:
        """Return a configuration with ``minimum_parameter_group_size=512`` (smaller units), for fast links."""
        return cls(comm=comm, minimum_parameter_group_size=512)

    @classmethod
    def for_low_bandwidth(cls, comm: Any = None) -> Self:
        """Return a configuration with ``minimum_parameter_group_size=4096`` and bf16 gradients, for slow links."""
        return cls(comm=comm, minimum_parameter_group_size=4096, gradient_compression="bf16")

    def with_tiles(self, tiles: Tiles) -> Self:
        """Return a copy with other tiles and the same mesh. Not collective."""
        twin = self.replace(tiles=tiles)
        object.__setattr__(twin, "_mesh", self.mesh)
        return twin

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks, see :attr:`Mesh.communicator`. The first access is collective."""
        return self.mesh.communicator

    @property
    def grid(self) -> ProcessGrid:
        """The groups of ranks for a model that is not split. The first access is collective."""
        return self.mesh.grid

    def close(self) -> None:
        """Close the mesh (:meth:`Mesh.close`). Collective."""
        self.mesh._close("ShardingConfig.close")

    def __enter__(self) -> Self:
        """Return this configuration. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the mesh. After an exception, defer this until all ranks next construct a model together."""
        if error is None:
            self.close()
        else:
            self.mesh.__exit__(kind, error, trace)


def ranks_of(owner: type, config: Any) -> Mesh:
    """Return the mesh of ``config``, the :class:`ShardingConfig` that class ``owner`` was called with. Not collective.

    Raises
    ------
    TypeError
        If ``config`` is not a ShardingConfig.
    """
    if not isinstance(config, ShardingConfig):
        raise ArgumentError(f"{owner.__name__} needs a ShardingConfig, got {config!r}")
    return config.mesh


def ranks_and_settings(mesh: Mesh | None, config: Config | None) -> tuple[Mesh, Config]:
    """Return the mesh and the settings to train with: the user's arguments, with defaults in place of None.

    Not collective. A :class:`ShardingConfig` brings its own mesh.

    Raises
    ------
    TypeError
        If ``mesh`` is not a Mesh or ``config`` not a Config.
    ConfigError
        If ``config`` is a ShardingConfig and ``mesh`` another mesh than its own.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"mesh={mesh!r:.80}: expected a mpizero.Mesh, such as mz.Mesh(pipeline=2)")
    if config is not None and not isinstance(config, Config):
        raise ArgumentError(f"config={config!r:.80}: expected a mpizero.Config, such as mz.Config(micro_batch=4)")
    if isinstance(config, ShardingConfig):
        if mesh not in (None, config.mesh):
            raise ConfigError("give mesh=... with a Config; a ShardingConfig has ranks of its own (its comm)")
        return config.mesh, config
    return mesh or Mesh(), config or Config()


def elements_of(mebibytes: float, itemsize: int) -> int:
    """Return how many elements of ``itemsize`` bytes fit into ``mebibytes`` MiB, at least 1. Not collective."""
    return max(1, int(mebibytes * 2**20) // itemsize)


def check_bucket(settings: DataParallelSettings, compression: str | None, named: str = "gradient_compression") -> None:
    """Raise an error if ``bucket_mb`` is given together with ``compression``. Not collective.

    ``compression`` is the setting of compressed gradients, and ``named`` the name that the error gives to the setting.
    """
    if settings.bucket_mb is not None and compression is not None:
        raise settings.reject(
            "bucket_mb",
            f"must be left out with {named} = {shown(compression)}: what a compressed message leaves out depends on "
            "where it is cut, so its size is fixed",
        )


def check_wire(config: Config, dtype: Any, contexts: int, statistics: Sequence[str]) -> None:
    """Raise an error if the model or its context groups exclude ``config.wire`` or ``config.wire_parameters``.

    Not collective. ``wire``, which rounds each grain's gradients to bfloat16, needs a model in float32 and no context
    groups: there a rank has the gradients of a part of a grain, which one process does not round. ``wire_parameters``
    needs a model without averaged parameters. ``contexts`` is the number of ranks in a context group. ``statistics``
    are the names of the model's averaged parameters.
    """
    if config.wire is not None and dtype != "float32":
        raise config.reject("wire", f"needs a model in float32, this one is in {dtype}")
    if config.wire_parameters and statistics:
        raise config.reject(
            "wire_parameters", f"would round the statistics {statistics[0]!r}, which add up small changes"
        )
    if config.wire is not None and contexts > 1:
        raise config.reject("wire", f"cannot be used where {contexts} ranks share each sample (context, domain)")


def check_shard_nodes(placement: Placement, mesh: NodeSettings) -> None:
    """Raise an error if ``shard_nodes`` is given and the strategy does not shard parameters. Not collective."""
    if mesh.shard_nodes is not None and not placement.shard_parameters:
        raise mesh.reject(
            "shard_nodes", f'is for ZeRO-3 (strategy "zero3"); {placement.strategy} does not shard parameters'
        )


#: Which gradients are written to scratch memory, see :func:`scratch_use`.
ScratchUse = Literal["grains", "micro-batches"] | None


def keeps_gradients_on_device(config: Config, ranks: int) -> bool:
    """Tell whether gradients stay on the GPU; ``ranks`` is the number of ranks in the data group.

    Gradients stay there if ``ranks`` is 1 and neither ``device`` nor ``optimizer_device`` is "cpu". Otherwise gradients
    are summed on the host.
    """
    return config.device != "cpu" and config.optimizer_device != "cpu" and ranks == 1


def assigns_rounds(placement: Placement, config: Config, ranks: int) -> bool:
    """Tell whether a data group of ``ranks`` ranks sums gradients unit by unit, in rounds of one grain a rank."""
    return placement.in_rounds and not keeps_gradients_on_device(config, ranks)


def assigned_in_advance(placement: Placement, config: Config, grid: NodeOrder, model_ranks: int) -> str:
    """Return the reason why ``grain_assignment="dynamic"`` has no effect; "" if it has an effect, or is not set.

    The reason is also "" for a single rank, which computes all grains anyway. ``model_ranks`` is the number of ranks
    that hold one replica together.
    """
    if config.grain_assignment == "static" or grid.data.size * model_ranks == 1:
        return ""
    if placement.in_rounds:
        return "this strategy sums the gradients of all ranks after each grain (only DDP and ZeRO-1 do not)"
    if model_ranks > 1:
        return "the ranks of a pipeline, tensor or context group compute a grain together"
    if config.device != "cpu":
        return "gradients of GPUs are not in memory that ranks share"
    return "" if max(grid.group_sizes) > 1 else "no two ranks share memory"


def schedules_dynamically(placement: Placement, config: Config, grid: NodeOrder, model_ranks: int) -> bool:
    """Tell whether the ranks of a node share their grains (slices of the batch) dynamically.

    Each rank then takes the next few grains when it has finished its previous ones. If the setting requests this but
    the function returns False, :func:`assigned_in_advance` says why.
    """
    requested = config.grain_assignment == "dynamic" and grid.data.size > 1
    return requested and not assigned_in_advance(placement, config, grid, model_ranks)


def overlaps_reduction(placement: Placement, nodes: int, stages: int, compression: str | None) -> bool:
    """Tell whether a model of blocks sums gradients over nodes during the backward pass (DDP and ZeRO-1).

    There is no overlap with ``gradient_compression``, because its results depend on where messages are cut. There is no
    overlap in pipelines either, because their stages end their last micro-batches at different times.

    Parameters
    ----------
    placement : Placement
        What the strategy shards.
    nodes, stages : int
        Number of ranks of the inter-node group, which exchange sums, and number of pipeline stages.
    compression : str or None
        The setting ``gradient_compression``.
    """
    return not placement.in_rounds and nodes > 1 and stages == 1 and compression is None


def scratch_use(config: Config, stages: int, *, by_block: bool) -> ScratchUse:
    """Tell which gradients an :class:`AllReduceBuffer` writes to scratch memory before it adds them to a sum.

    A row is memory for the gradients of all parameters. "grains": the gradients of each grain that is added to the row
    of another grain. "micro-batches": the gradients of all micro-batches of a grain but the first one, which are added
    to the row of the grain. None: no gradients. Scratch memory is used only if blocks end their backward passes one
    after the other. They do not in pipelines, where a stage computes several micro-batches at a time, nor on GPUs,
    where the host does not wait for the end of a block.

    Parameters
    ----------
    config : Config
        The settings.
    stages : int
        Number of pipeline stages.
    by_block : bool
        Whether the model is made of blocks: a black box computes all gradients together.
    """
    if not by_block or stages > 1 or config.device != "cpu":
        return None
    return "grains" if config.accumulate == 1 else "micro-batches"


def needs_norm(config: Config, codec: Codec | None, *, loss_scale: bool) -> bool:
    """Tell whether a step needs the norm of the summed gradient before the update.

    The norm is needed for clipping. It is also needed where the sum of finite gradients may overflow: with a loss
    scale, and with compression to float16.
    """
    return config.clip is not None or loss_scale or (codec is not None and codec.overflows)


def fuses_update(optimizer: Any, *, norm: bool, ties: bool, nodes: int, in_rounds: bool) -> bool:
    """Tell whether gradients are summed, divided by the weight and used for the update in one pass over memory.

    Parameters
    ----------
    optimizer : optimizer
        An optimizer that :func:`mpizero.optim.elementwise.adapt` returned.
    norm : bool
        Whether the norm of the sum is needed before the update (:func:`needs_norm`).
    ties : bool
        Whether this pipeline stage shares parameters with others, and exchanges their gradients before the update.
    nodes : int
        Number of ranks of the inter-node group, which exchange sums.
    in_rounds : bool
        Whether gradients are summed unit by unit (:func:`assigns_rounds`). Then all sums are complete before the
        update, and no messages are left to send.
    """
    able = optimizer.elementwise_kernel or optimizer.needs_tensor_norms
    return bool(able) and not norm and not ties and (nodes == 1 or in_rounds)


def gradient_codec(compression: str | None, wire: str | None, itemsize: int) -> Codec | None:
    """Return the codec that compresses gradient messages, by the settings ``gradient_compression`` and ``wire``.

    Return None if both are None, or if elements do not have 4 bytes: only float32 gradients are compressed.

    Raises
    ------
    ConfigError
        If ``compression`` is not a value that ``Config.gradient_compression`` takes.
    """
    codec = codec_of(compression) if wire is None else WIRE
    return codec if itemsize == 4 else None


def sent_exactly(
    placement: Placement, partitioned: PartitionedModel, layout: FlatLayout, wire: str | None
) -> tuple[Span, ...]:
    """Return the ranges of ``layout``'s gradient vector that are never compressed, in ascending order.

    With ``wire``, which loses nothing of a rounded sum, the ranges are those of the statistics of samples, whose sums
    are not rounded. Without ``wire``, they are those of the gradients named in [Note: copies] in
    ``sharding/grad_reduce.py``. If several pipeline stages use a parameter, its gradients are among them only where the
    optimizer state is replicated. Where the state is sharded, the owners of the parameter's copies add the sums of all
    uses, so the copies stay equal anyway.
    """
    if wire is not None:
        return layout.averages
    shared = () if placement.shard_optimizer else partitioned.uses

    def exact(entry: ParameterUse) -> bool:
        spec = layout.by_name[entry.spec.tied or entry.spec.name].spec
        unsplit = partitioned.parallel_layout.tensor > 1 and spec.part is None
        return spec.averaged or unsplit or (spec.guest or spec.name) in shared

    return layout.gradients_of(exact)


def gathers_units(placement: Placement, groups: int) -> bool:
    """Tell whether units are gathered before use: if parameters are sharded and ``groups`` > 1.

    ``groups`` is the number of nodes that parameters are sharded over, or of ranks if they share no memory.
    """
    return placement.shard_parameters and groups > 1


def updated_by(placement: Placement, grid: NodeOrder) -> tuple[int, ...]:
    """Return the ranks of ``grid.data`` whose shards this rank updates.

    If the optimizer state is sharded, a rank updates its own shard only. If it is not sharded, the rank updates the
    shards of all ranks of its inter-node group, so that the ranks of every node together update all parameters.
    """
    return (grid.data.rank,) if placement.shard_optimizer else grid.inter_node_ranks


def round_buffer_sizes(layout: FlatLayout, ranks: int, *, in_place: bool) -> list[int]:
    """Return, for each slot of a :class:`ReduceScatterBuffer`, how many elements it has for each rank of the node.

    A slot is memory for the gradients of one unit. If gradients are summed over several ``ranks``, there are two slots:
    one is filled while the other is read, by ranks of the node or for messages. If ``in_place``, the user's function
    writes the gradients of all units in one call, and there is one slot, which holds the gradients of all units.
    """
    if in_place:
        return [layout.gradient_size]
    return [layout.largest_gradient] * (2 if ranks > 1 else 1)
