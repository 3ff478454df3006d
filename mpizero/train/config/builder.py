"""Build the objects of a run from its configuration: data, model, optimizer, sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero import data, nn, optim
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.equality import agree_equal
from mpizero.errors import DataError
from mpizero.layout import Grains
from mpizero.parallel import HybridShardedModel, ShardedModelBase, ShardingConfig, distribute
from mpizero.train.config.parallel_section import ParallelSection
from mpizero.train.config.sections import Config, DataSection, GptSection, MlpSection, OptimizerSection
from mpizero.train.config.setting_checks import rejected

#: Number of samples in the hash by which a resumed run recognizes its training data.
FINGERPRINT_SAMPLES = 64


@dataclass(frozen=True)
class TrainingJob:
    """Hold the built objects of a run.

    Attributes
    ----------
    config : Config
        The configuration of the run.
    comm : Communicator
        The ranks that train.
    source, validation : Source
        The samples for training, and the samples held back for validation.
    sharding : ShardingConfig
        How the ranks compute, communicate and share memory.
    model, optimizer : ShardedModelBase, its optimizer
        The sharded model and its optimizer, ready to train.
    task : str
        "language", "classification" or "regression".
    units_per_sample : int
        Number of tokens in a sample for a language model, else 1.
    fingerprint : str
        Hash of the training data, by which a resumed run checks that it has the same data.
    """

    config: Config
    comm: Communicator
    source: Any
    validation: Any
    sharding: ShardingConfig
    model: Any
    optimizer: Any
    task: str
    units_per_sample: int
    fingerprint: str

    def describe(self) -> str:
        """Describe the run in one line: model, layout, numbers of samples, grains.

        Not collective.
        """
        train, parallel, sharing = self.config.train, self.config.parallel, self.model.batch_group.size
        grains = Grains(train.global_batch, self.model.grain_size(train.global_batch))
        who = "replicas" if parallel.splits_model else "ranks"
        count = grains.count
        idle = f"; {who} {count} to {sharing - 1} have no grain and only help" if sharing > count else ""
        return (
            f"{self.config.model.name} with {self.model.parameter_count:,} parameters, "
            f"{parallel.describe(self.comm.size)}; "
            f"{len(self.source):,} training and {len(self.validation):,} validation samples; "
            f"{train.global_batch} a step in {grains.described(train.accumulate)}{idle}"
            f"{self.model.engine.compute_device.describe()}"
        )


@contextmanager
def build(config: Config, comm: Communicator) -> Iterator[TrainingJob]:
    """Build the objects of a run, yield them as a :class:`TrainingJob`, and free them after the ``with`` block.

    Collective over ``comm``.
    """
    with all_ranks(comm):
        source, validation = build_source(config)
        check_samples(config, source)
        wrapped = build_model(config, source, validation)
        fingerprint = data_fingerprint(source)
    agree_equal(comm, lambda: {"the training data": fingerprint}, "agree data")
    sharding = build_sharding(config, comm)
    model = lay_out(wrapped, build_optimizer(config), config.parallel, sharding)
    section = config.model
    task = section.task if isinstance(section, MlpSection) else "language"
    units = section.sequence if isinstance(section, GptSection) else 1
    with model:
        model.reserve(config.train.global_batch)
        yield TrainingJob(
            config=config,
            comm=comm,
            source=source,
            validation=validation,
            sharding=sharding,
            model=model,
            optimizer=model.optimizer,
            task=task,
            units_per_sample=units,
            fingerprint=fingerprint,
        )
    sharding.close()


def lay_out(model: Any, optimizer: Any, parallel: ParallelSection, sharding: ShardingConfig) -> ShardedModelBase:
    """Divide a model and its optimizer over ranks, and return the sharded model.

    Collective over the ranks of ``sharding``. ``parallel`` gives the strategy, and how the model is split.
    """
    if not parallel.splits_model:
        return distribute(model, optimizer, strategy=parallel.strategy, config=sharding)
    return HybridShardedModel(model, sharding, **parallel.arguments(), optimizer=optimizer)


def build_source(config: Config) -> tuple[Any, Any]:
    """Open the data; return the samples for training and the samples held back for validation.

    Not collective.

    Raises
    ------
    DataError
        If data are missing, empty, or too short; the message names the file.
    """
    section = config.data
    parts: tuple[Any, Any] = _open(section, config).split(section.validation)
    return parts


def check_samples(config: Config, source: Any) -> None:
    """Raise an error if the global batch is larger than the number of training samples in ``source``.

    Not collective.
    """
    if len(source) < config.train.global_batch:
        raise rejected(
            "train.global_batch",
            config.train.global_batch,
            f"must be at most the number of training samples, which is {len(source)}",
        )


def _open(section: DataSection, config: Config) -> Any:
    if isinstance(config.model, GptSection):
        assert section.text is not None
        paths = "stdlib" if section.text == ("stdlib",) else list(section.text)
        return data.TextSource(paths, sequence=config.model.sequence)
    if section.hdf5 is not None:
        return data.Hdf5Source(section.hdf5["path"], section.hdf5["x"], section.hdf5["y"])
    if section.arrays == "digits":
        return data.digits()
    return data.NpySource(section.arrays["x"], section.arrays["y"])


def build_model(config: Config, *sources: Any) -> Any:
    """Build the model; an MLP takes its numbers of features and outputs from the data.

    Not collective. ``sources`` are the samples for training and for validation. The number of classes is the larger
    one of the two.
    """
    section = config.model
    return make_model(config, _widths(section, sources) if isinstance(section, MlpSection) else None)


def make_model(config: Config, widths: Sequence[int] | None) -> Any:
    """Build the model; ``widths`` are the numbers of features and outputs of an MLP, None for a GPT.

    Not collective.

    Raises
    ------
    DataError
        If the model is an MLP and ``widths`` are not two numbers.
    """
    section, seed = config.model, config.train.seed
    if isinstance(section, GptSection):
        return nn.GPT(
            dim=section.dim,
            layers=section.layers,
            heads=section.heads,
            sequence=section.sequence,
            dropout=section.dropout,
            tied=section.tied,
            activation_checkpointing=section.activation_checkpointing,
            dtype=section.dtype,
            seed=seed,
        )
    assert isinstance(section, MlpSection)
    if not isinstance(widths, list | tuple) or len(widths) != 2:
        raise DataError(f"an mlp takes features and outputs from its data, got {widths!r}")
    return nn.MLP(
        widths[0],
        section.hidden,
        widths[1],
        activation=section.activation,
        task=section.task,
        dtype=section.dtype,
        seed=seed,
    )


def widths_of(model: Any) -> tuple[int, int] | None:
    """Return the ``widths`` with which :func:`make_model` makes a model of this size; None for a GPT.

    Not collective.
    """
    return (model.features, model.outputs) if isinstance(model, nn.MLP) else None


def _widths(section: MlpSection, sources: Sequence[Any]) -> tuple[int, int]:
    """Return the number of features of a sample, and the number of classes (regression: of values) to predict."""
    x, y = sources[0].samples(np.arange(1))
    if x.ndim != 2:
        raise DataError(f"an mlp takes samples of one axis (samples, features), the data have shape {x.shape[1:]} each")
    if section.task == "regression":
        if y.ndim != 2:
            raise DataError(f'task = "regression" takes targets (samples, outputs), the data\'s have {y.ndim} axes')
        return x.shape[1], y.shape[1]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(
            f'task = "classification" takes whole numbers (samples,) as targets, the data have {y.dtype} '
            f"with {y.ndim} axes"
        )
    return x.shape[1], max(map(classes, sources))


def classes(source: Any) -> int:
    """Return the number of classes of a source: one more than its largest target.

    Not collective.

    Raises
    ------
    DataError
        If a target is negative.
    """
    largest = -1
    for start in range(0, len(source), 4096):
        _, y = source.samples(np.arange(start, min(start + 4096, len(source))))
        if y.min() < 0:
            raise DataError(f"classes are numbered from 0; sample {start + int(y.argmin())} has {int(y.min())}")
        largest = max(largest, int(y.max()))
    return largest + 1


def build_optimizer(config: Config) -> Any:
    """Build the optimizer with its learning rate schedule.

    Not collective.
    """
    section = config.optimizer
    kinds = {
        "sgd": optim.SGD,
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "rmsprop": optim.RMSprop,
        "lion": optim.Lion,
        "lamb": optim.LAMB,
    }
    own = {
        key: getattr(section, key)
        for key in ("weight_decay", "betas", "eps", "alpha", "momentum", "dampening", "nesterov")
        if hasattr(section, key)
    }
    return kinds[section.name](lr=learning_rate(section, config.train.steps), **own)


def learning_rate(section: OptimizerSection, steps: int) -> Any:
    """Build the learning rate schedule that ``section`` describes.

    Not collective. "linear" and "cosine" end after ``section.schedule_steps`` steps; if that is None, after ``steps``.
    """
    if section.schedule == "constant":
        return optim.constant(section.lr, warmup=section.warmup)
    schedule = {"linear": optim.linear, "cosine": optim.cosine}[section.schedule]
    return schedule(section.lr, steps=section.schedule_steps or steps, warmup=section.warmup, end=section.end)


def computing_settings(config: Config) -> dict[str, Any]:
    """Return the keyword arguments of :class:`ShardingConfig` that determine how a rank computes.

    Not collective. They do not depend on the layout of the run over ranks.
    """
    placed = ("device", "optimizer_device", "direct_messages", "mixed_precision")
    names = ("micro_batch", "accumulate", "threads", "timeout", *placed)
    return {name: getattr(config.train, name) for name in names} | {"clip": config.train.clip or None}


def build_sharding(config: Config, comm: Communicator) -> ShardingConfig:
    """Build the :class:`ShardingConfig` of a training.

    Not collective.
    """
    train, parallel = config.train, config.parallel
    return ShardingConfig(
        comm=comm,
        gradient_compression=train.gradient_compression,
        share_node_memory=parallel.share_node_memory,
        ranks_per_node=parallel.ranks_per_node,
        bucket_mb=parallel.bucket_mb,
        check_every=train.check_every,
        **computing_settings(config),
    )


def data_fingerprint(source: Any) -> str:
    """Return a hash of a source's length and of :data:`FINGERPRINT_SAMPLES` samples, evenly spaced in it.

    Not collective.
    """
    count = min(FINGERPRINT_SAMPLES, len(source))
    x, y = source.samples(np.arange(count, dtype=np.int64) * len(source) // max(count, 1))
    digest = hashlib.sha256(f"{len(source)} {x.dtype} {x.shape} {y.dtype} {y.shape}".encode())
    digest.update(np.ascontiguousarray(x).tobytes())
    digest.update(np.ascontiguousarray(y).tobytes())
    return digest.hexdigest()
