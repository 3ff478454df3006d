"""Define what a user chooses, strategy and settings, and decide from them how a training step is done.

The placement table has a row for each strategy: what is sharded, and how grains are assigned (:class:`Placement`).
:class:`ShardingConfig` has all other settings. The functions after it decide from both how a step is done; the engine
and the command `mpizero plan` share them, so that a plan counts what a training does.

[Note: waves in a context group] The ranks of a context group compute one part each of a grain. In the tree these parts
are neighbours, so none of a rank's own parts are, and the rank cannot add them alone. To sum gradients once a step, it
would have to keep as many copies of the whole gradient as it computes grains. Context groups are for sequences so long
that memory is short, and that computing a grain takes much longer than sending gradients. So ZeRO-1, where a rank needs
the sums of its shard only, then sums them in every wave, as ZeRO-2 does. DDP, where every node needs all sums, keeps
the copies and sends once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self
from weakref import WeakSet

from mpizero._util.checks import flag, number, positive, require, whole
from mpizero._util.names import explains, nearest
from mpizero.comm import Communicator, ProcessGrid, as_communicator
from mpizero.comm.agreement import check_call
from mpizero.comm.reduce import Codec, codec_of
from mpizero.errors import ConfigError
from mpizero.guard import guard
from mpizero.guard.watchdog import Watchdog
from mpizero.kernels.gpu import SIXTEEN_BITS
from mpizero.layout import Axes, GrainRule
from mpizero.layout.flat import FlatLayout, ParameterUse, Span
from mpizero.layout.mesh import NodeOrder
from mpizero.nn.models import efficient_samples
from mpizero.optim import DynamicLossScale
from mpizero.sharding.partition import PartitionedModel, Tiles, check_tiles
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
    waves : bool
        Whether grains are computed in waves, and the gradients of each wave are reduced unit by unit.
    """

    strategy: str
    saved_as: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    one_unit: bool
    waves: bool

    def in_contexts(self, contexts: int) -> Placement:
        """Return this row as it is executed with context groups of ``contexts`` ranks. Not collective.

        See [Note: waves in a context group].
        """
        return replace(self, waves=True, one_unit=False) if contexts > 1 and self.shard_optimizer else self


PLACEMENTS = {
    "ddp": Placement("DDP", "DDP", False, False, False, True, False),
    "zero1": Placement("ZeRO-1", "ZeRO-1", False, False, True, True, False),
    "zero2": Placement("ZeRO-2", "ZeRO-2", False, True, True, False, True),
    "zero3": Placement("ZeRO-3", "ZeRO-3", True, True, True, False, True),
    "fsdp": Placement("FSDP", "ZeRO-3", True, True, True, False, True),
}


def placement(strategy: str) -> Placement:
    """Return the placement table's row of ``strategy``: "ddp", "zero1", "zero2", "zero3" or "fsdp". Not collective.

    Raises
    ------
    ConfigError
        If ``strategy`` is another name.
    """
    if strategy not in PLACEMENTS:
        raise ConfigError(
            f"unknown strategy {strategy!r}: choose one of {', '.join(PLACEMENTS)}{nearest(strategy, PLACEMENTS)}"
        )
    return PLACEMENTS[strategy]


#: When grains are assigned to ranks: before a step, or while they compute.
ASSIGNMENTS = ("static", "dynamic")


@explains
@dataclass(frozen=True, kw_only=True, eq=False)
class ShardingConfig:
    """Hold the settings of a training: its ranks, how they share work and memory, and how they communicate.

    Parameters
    ----------
    comm : mpi4py communicator, InMemoryCommunicator, "self" or None
        The ranks that train together; the library makes a communicator of its own from it. None is all ranks that
        a launcher such as mpiexec has started, or one process without a launcher; "self" is this process alone.
    auto_sync_gradients : bool
        Whether ``compute_gradients`` and ``train`` sum gradients over the ranks. If False, ``train`` only computes this
        rank's gradient; ``synchronize_gradients`` then sums it over the ranks, and ``optimizer.step()`` updates.
    minimum_parameter_group_size : int
        A block with fewer parameter elements than this forms one unit with a neighbouring block (ZeRO-2 and 3).
    gradient_compression : {None, "bf16", "fp16", "int8", "topk:SHARE"}
        Compresses the float32 gradients that are sent between nodes (between ranks if they share no memory): to 16
        bits, to 8 bits, or to the fraction of elements with the largest magnitudes ("topk:0.01": one in a hundred).
        They are still added in float32. What int8 and top-k leave out of a message is kept and sent in later steps
        (error feedback). Gradients of parameters of which other ranks update a copy stay exact (docs/nodes.md). With
        compression, results on different numbers of ranks are no longer equal to the bit.
    bucket_mb : float or None
        MiB of partial sums of gradients that are in flight between nodes (between ranks if they share no memory) at
        once; the message buffers take up to twice as much. None is 2^19 elements. The size changes neither results nor
        how many bytes are sent.
    learning_rate : float
        Learning rate, > 0, of the plain SGD that trains a model for which no optimizer was created.
    share_node_memory : bool
        Whether replicated data has one copy per node, in an MPI-3 shared window; otherwise every rank has its own.
    ranks_per_node : int or None
        Number of consecutive ranks in each simulated node; None uses the real nodes.
    micro_batch : int or None
        Number of samples in one forward and backward pass. With None it is ceil(ceil(global batch / accumulate) / 16),
        but no more than the model's matrix products need to be fast (``docs/concepts.md``);
        after a checkpoint with optimizer state was loaded, what the checkpoint says.
    accumulate : int
        Number of micro-batches in one grain. Their gradients are added one after the other; a grain has
        ``micro_batch * accumulate`` samples.
    grain_assignment : {"static", "dynamic"}
        How the grains of a step are assigned to ranks: before it, equally many to each, or while they compute: then a
        rank of a node claims the next few grains of its node when it is free, for grains whose costs differ and ranks
        that are slower than others. Results have the same bits. "dynamic" is for DDP and ZeRO-1 on ranks that share
        memory, in which the node's samples are put; elsewhere rank 0 says that grains are assigned before a step.
    tiles : int, mapping of str to int, or None
        Number of tiles, a property of the training as ``micro_batch``: tensor and context groups of all sizes that are
        this number divided by a power of two give the same bits, one process included. A mapping has numbers for the
        axes "tensor" and "context". None, and an axis without a number: the size of its groups; after a run resumes,
        what its checkpoint says (docs/parallelism.md).
    threads : int
        Number of threads that compiled kernels and BLAS use on each rank.
    clip : float or None
        A gradient whose global norm is larger is scaled to this norm before the update; None does not clip.
    timeout : float or None
        A rank that has been inside one collective for this many seconds ends the job with a report of every rank's
        Python line; None is no timeout.
    check_every : int
        Every this many steps, parameters and optimizer state are checked for corrupted memory; 0 is never.
    device : {"cpu", "cuda"}
        Where the layers of a model of blocks compute: "cuda" is a GPU. Rank i of a node uses its GPU number i modulo
        the number of its GPUs (docs/gpu.md).
    optimizer_device : {None, "cpu", "cuda"}
        Where optimizer state is stored and parameters are updated. None is the device of the layers, but the host for
        an optimizer that the user has written. "cpu" saves GPU memory (offloading).
    direct_messages : bool
        Whether activations and their gradients are sent directly from GPU to GPU, if a trial at the start shows that
        MPI can do that. If False, they always go through the host's memory.
    bad_steps : BadSteps
        What happens when a step is skipped because a loss or a gradient is not finite. The default: each such step is
        reported on standard error, and five in a row raise an error (docs/bad_numbers.md).
    mixed_precision : {None, "bfloat16", "float16"}
        Rounds the operands of matrix products on GPUs to this type. The products are added in float32, and everything
        else is in float32. With "float16", an optimizer created without a loss scale gets a default dynamic one.
    ema : float or None
        Keeps an exponential moving average of the trained parameters, sharded as the optimizer's state, of which it is
        one more array. After each update it moves towards the parameters by (1 - ``ema``) of the distance; it begins
        with their values before the first step. ``evaluate`` and ``predict`` use it when asked to. Between 0 and 1.
    embedded : bool
        Whether the process belongs to another program, which only calls this library. The library then installs no
        hooks, signal handlers or allocator options, starts no threads and opens no ports. Errors are only raised as
        exceptions, and there is no timeout (docs/embedding.md).

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
    >>> mz.ShardingConfig(micro_batch=0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: micro_batch=0: expected a whole number >= 1
    """

    comm: Any = None
    auto_sync_gradients: bool = True
    minimum_parameter_group_size: int = 1024
    gradient_compression: str | None = None
    bucket_mb: float | None = None
    learning_rate: float = 0.01
    share_node_memory: bool = True
    ranks_per_node: int | None = None
    micro_batch: int | None = None
    accumulate: int = 1
    grain_assignment: str = "static"
    tiles: Tiles = None
    threads: int = 1
    clip: float | None = None
    timeout: float | None = 600.0
    check_every: int = 0
    device: str = "cpu"
    optimizer_device: str | None = None
    direct_messages: bool = True
    mixed_precision: str | None = None
    bad_steps: BadSteps = BadSteps()
    ema: float | None = None
    embedded: bool = False

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` if a value is invalid; the message names the setting."""
        for name in ("minimum_parameter_group_size", "accumulate", "threads", "check_every"):
            self._set(name, require(name, getattr(self, name), whole(int(name != "check_every"))))
        for name in ("micro_batch", "ranks_per_node"):
            if getattr(self, name) is not None:
                self._set(name, require(name, getattr(self, name), whole(1)))
        self._set("tiles", require("tiles", self.tiles, check_tiles))
        for name in ("learning_rate", "clip", "timeout"):
            if getattr(self, name) is not None or name == "learning_rate":
                self._set(name, require(name, getattr(self, name), positive))
        if self.ema is not None:
            self._set("ema", require("ema", self.ema, number(0.0, 1.0, above=True)))
        for name in ("auto_sync_gradients", "share_node_memory", "direct_messages", "embedded"):
            self._set(name, require(name, getattr(self, name), flag))
        if not isinstance(self.bad_steps, BadSteps):
            raise ConfigError(
                f"bad_steps={self.bad_steps!r}: expected mpizero.BadSteps(limit=..., warn=..., callback=...)"
            )
        if self.embedded:
            guard.current().release_to_host()
        codec_of(self.gradient_compression)
        check_bucket(self.bucket_mb, self.gradient_compression)
        if self.grain_assignment not in ASSIGNMENTS:
            raise ConfigError(f"grain_assignment={self.grain_assignment!r}: expected 'static' or 'dynamic'")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r}: expected 'cpu' or 'cuda'")
        if self.optimizer_device not in (None, "cpu", "cuda"):
            raise ConfigError(f"optimizer_device={self.optimizer_device!r}: expected None, 'cpu' or 'cuda'")
        if self.optimizer_device == "cuda" and self.device == "cpu":
            raise ConfigError(
                "optimizer_device='cuda' is for layers on GPUs: give device='cuda' with it, or leave it out"
            )
        if self.mixed_precision not in (None, *SIXTEEN_BITS):
            raise ConfigError(f"mixed_precision={self.mixed_precision!r}: expected None, 'bfloat16' or 'float16'")
        if self.mixed_precision is not None and self.device == "cpu":
            raise ConfigError(
                f"mixed_precision={self.mixed_precision!r} is for GPUs: give device='cuda' with it, or leave it out"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

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

    @cached_property
    def communicator(self) -> Communicator:
        """Return the library's duplicate of ``comm``; the first access makes it and is collective over ``comm``."""
        made = as_communicator(self.comm, timeout=self.timeout, embedded=self.embedded)
        if made.size > 1 and self.timeout is not None and not self.is_guest:
            self.__dict__["_watchdog"] = watchdog = Watchdog(made, self.timeout)
            watchdog.start()
        return made

    @property
    def is_guest(self) -> bool:
        """Tell whether ``embedded`` or the environment variable MPIZERO_EMBEDDED is set. Not collective."""
        return guard.current().is_guest(self.embedded)

    @property
    def grid(self) -> ProcessGrid:
        """Return the groups of ranks for a model that is not split. The first access is collective."""
        return self.grid_of(None)

    def grid_of(self, axes: Axes | None, *, private: bool = False) -> ProcessGrid:
        """Return the groups of ranks for ``axes``, the numbers of pipeline stages, tensor and context ranks.

        ``axes=None`` means that the model is not split. With ``private=True`` ranks share no memory: this is for a
        model that does not fit the nodes' shared memory. The first call with the same arguments is collective.
        """
        grids = self._grids
        if (axes, private) not in grids:
            grids[axes, private] = ProcessGrid.create(
                self.communicator,
                share_node_memory=self.share_node_memory and not private,
                ranks_per_node=None if private else self.ranks_per_node,
                axes=axes,
            )
        return grids[axes, private]

    def holds(self, grid: ProcessGrid) -> bool:
        """Tell whether ``grid`` was returned by :meth:`grid_of` and is still open. Not collective."""
        return any(made is grid for made in self._grids.values())

    @property
    def _grids(self) -> dict[tuple[Axes | None, bool], ProcessGrid]:
        # No cached_property: before Python 3.12 all threads, which meet when a grid is made, would share its lock.
        grids: dict[tuple[Axes | None, bool], ProcessGrid] = self.__dict__.setdefault("_made_grids", {})
        return grids

    @property
    def unbound(self) -> WeakSet[Any]:
        """The optimizers that were created with this configuration and have no model yet. Not collective."""
        found: WeakSet[Any] = self.__dict__.setdefault("_unbound", WeakSet())
        return found

    def number_model(self) -> str:
        """Count one more model that uses this configuration; return "" for the first, then "model 2", "model 3" ...

        Not collective.
        """
        number = self.__dict__["_models"] = self.__dict__.get("_models", 0) + 1
        return f"model {number}" if number > 1 else ""

    def close(self) -> None:
        """Free the communicators made for this configuration and stop the thread that watches for timeouts. Collective.

        Close the models first. If the configuration was never used or is already closed, do nothing.
        """
        if "communicator" in self.__dict__:
            check_call(self.communicator, "ShardingConfig.close")
            self.communicator.run_deferred_closes()
            self._free()

    def _free(self) -> None:
        """Free what :meth:`close` frees, without first comparing the ranks' calls. Collective.

        After an error in a ``with`` block, ranks call this together when they make their next model.
        """
        made = self.__dict__
        if "_watchdog" in made:
            made.pop("_watchdog").stop()
        while self._grids:
            self._grids.popitem()[1].close()
        if "communicator" in made:
            communicator = made.pop("communicator")
            if communicator is not self.comm:
                communicator.close()

    def __enter__(self) -> Self:
        """Return this configuration. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the configuration. After an exception, postpone that until the ranks make their next model together."""
        if error is None:
            self.close()
        elif "communicator" in self.__dict__:  # the other ranks may not have raised
            self.communicator.defer_close(self._free)

    def loss_scale(self, given: DynamicLossScale | None) -> DynamicLossScale | None:
        """Return the loss scale to train with: ``given``, or a default one if ``mixed_precision`` is "float16"."""
        return DynamicLossScale() if given is None and self.mixed_precision == "float16" else given

    def grain_rule(self, model: Any = None, samples: tuple[Any, Any] | None = None) -> GrainRule:
        """Return the rule that cuts global batches into grains for ``model``; None stands for a model not known yet.

        ``samples`` are ``x`` and ``y`` of such samples as the model is trained on, where they are known.
        """
        if self.micro_batch is not None or model is None:
            return GrainRule(self.micro_batch, self.accumulate)
        if not hasattr(model, "efficient_samples"):
            return GrainRule(None, self.accumulate, efficient_samples(model))
        return GrainRule(None, self.accumulate, samples and model.efficient_samples(*samples), coarse=True)

    def grain_size(self, global_batch: int) -> int:
        """Return the number of samples in a full grain, without a model's part in the default of ``micro_batch``."""
        return self.grain_rule().grain_size(global_batch)

    def bucket_elements(self, itemsize: int) -> int | None:
        """Return ``bucket_mb`` as a number of elements of ``itemsize`` bytes; None if it is None."""
        return None if self.bucket_mb is None else elements_of(self.bucket_mb, itemsize)

    def comparable(self) -> dict[str, Any]:
        """Return the settings that must be equal on every rank, by name.

        These are all but ``comm`` and ``bad_steps``; of ``bad_steps`` only the limit is compared.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["comm"], values["bad_steps"]
        return {**values, "bad_steps.limit": self.bad_steps.limit}

    def with_tiles(self, tiles: Tiles) -> Self:
        """Return a copy with other tiles that shares this one's communicators, and is closed with it. Collective."""
        _ = self.communicator, self._grids, self.unbound  # made, before they are shared
        twin = self.replace(tiles=tiles)
        shared = {name: value for name, value in self.__dict__.items() if name not in {f.name for f in fields(self)}}
        twin.__dict__.update(shared)
        return twin

    def replace(self, **changes: Any) -> Self:
        """Return a copy in which the settings named in ``changes`` have the given values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{**values, **changes})


def elements_of(mebibytes: float, itemsize: int) -> int:
    """Return how many elements of ``itemsize`` bytes fit into ``mebibytes`` MiB, at least 1. Not collective."""
    return max(1, int(mebibytes * 2**20) // itemsize)


def check_bucket(bucket_mb: object, compression: str | None) -> None:
    """Check the setting ``bucket_mb``: None or MiB. Not collective.

    Raises
    ------
    ConfigError
        If it is something else, or is combined with gradient compression.
    """
    if bucket_mb is None:
        return
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not 0 < bucket_mb <= 4096:
        raise ConfigError(f"bucket_mb={bucket_mb!r}: expected None, or MiB of more than 0 and at most 4096")
    if compression is not None:
        raise ConfigError(
            f"bucket_mb={bucket_mb!r} with gradient_compression={compression!r}: what a compressed message leaves out "
            "depends on where it is cut, so its size is fixed; leave one of them out"
        )


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

    See [Note: copies] in ``sharding/grad_reduce.py``. A parameter that several stages use is among them only
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
