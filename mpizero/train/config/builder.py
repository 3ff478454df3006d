"""Build the objects of a run from its configuration: data, model, optimizer, sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from mpizero import optim
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.data.batches import choose_grains
from mpizero.errors import ConfigError
from mpizero.layout import Grains
from mpizero.layout.flat import FlatLayout
from mpizero.sharding import HybridShardedModel, ShardedModelBase, ShardingConfig, distribute
from mpizero.sharding.partition import blocks_of
from mpizero.train.config.data_identity import data_fingerprint, shared_contents
from mpizero.train.config.model_and_data import (
    build_model,
    build_source,
    task_of,
    units_per_sample,
    user_functions,
    users_modules,
    with_batch,
)
from mpizero.train.config.parallel_section import ParallelSection
from mpizero.train.config.sections import Config, OptimizerSection
from mpizero.train.config.vector_sections import LbfgsSection, VectorMethodSection


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
    name : str
        Name of the model in messages.
    task : str
        "language", "classification" or "regression"; "" if it is not known.
    units_per_sample : int
        Number of tokens in a sample for a language model, else 1.
    fingerprint : str
        Hash of the training data, by which a resumed run checks that it has the same data.
    validation_fingerprint : str
        The same of the validation samples; "" if there are none.
    contents : dict
        What identifies the contents of both (:func:`~mpizero.train.config.data_identity.shared_contents`).
    code : mapping of str to str
        Hashes of the files of the user's functions that made model and data, by file name; empty if there are none.
    """

    config: Config
    comm: Communicator
    source: Any
    validation: Any
    sharding: ShardingConfig
    model: Any
    optimizer: Any
    name: str
    task: str
    units_per_sample: int
    fingerprint: str
    validation_fingerprint: str
    contents: dict[str, Any]
    code: Mapping[str, str] = field(default_factory=dict)

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
            f"{self.name} with {self.model.parameter_count:,} parameters, "
            f"{parallel.describe(self.comm.size)}{self.model.engine.told_exactness}; "
            f"{len(self.source):,} training and {len(self.validation):,} validation samples; "
            f"{train.global_batch} a step in {grains.described(train.accumulate)}{idle}"
            f"{self.model.engine.compute_device.describe()}"
        )


@contextmanager
def build(config: Config, comm: Communicator) -> Iterator[TrainingJob]:
    """Build the objects of a run, yield them as a :class:`TrainingJob`, and free them after the ``with`` block.

    Collective over ``comm``.
    """
    with users_modules(config):
        with all_ranks(comm):
            source, validation = build_source(config)
            config = with_batch(config, source)
            wrapped = build_model(config, source, validation)
            optimizer = build_optimizer(config)
            _check_bounds(config, optimizer, wrapped)
            fingerprint = data_fingerprint(source)
            held = data_fingerprint(validation) if len(validation) else ""
            task = task_of(wrapped)
            units = units_per_sample(task, source)
            code = {k: v for function in user_functions(config).values() for k, v in function.files().items()}
        agree_equal(
            comm, lambda: {"the training data": fingerprint[:16], "the validation data": held[:16]}, "agree data"
        )
        contents = shared_contents(comm, source, validation)
        sharding = build_sharding(config, comm)
        with lay_out(wrapped, optimizer, config.parallel, sharding) as model:
            with all_ranks(comm):
                choose_grains(model, source, config.train.global_batch)
            model.reserve(config.train.global_batch)
            yield TrainingJob(
                config=config,
                comm=comm,
                source=source,
                validation=validation,
                sharding=sharding,
                model=model,
                optimizer=model.optimizer,
                name=config.model.described,
                task=task,
                units_per_sample=units,
                fingerprint=fingerprint,
                validation_fingerprint=held,
                contents=contents,
                code=code,
            )
        sharding.close()


def _check_bounds(config: Config, optimizer: Any, model: Any) -> None:
    """Raise a SettingError if bounds are for parameters that the model does not have. Not collective."""
    if not isinstance(config.optimizer, LbfgsSection):
        return
    try:
        optimizer.check_names([entry.spec.name for entry in FlatLayout.build(blocks_of(model)).parameters])
    except ConfigError as error:
        raise config.optimizer.reject("bounds", str(error).partition("bounds: ")[2]) from None


def lay_out(model: Any, optimizer: Any, parallel: ParallelSection, sharding: ShardingConfig) -> ShardedModelBase:
    """Divide a model and its optimizer over ranks, and return the sharded model.

    Collective over the ranks of ``sharding``. ``parallel`` gives the strategy, and how the model is split.
    """
    if not parallel.splits_model:
        return distribute(model, optimizer, strategy=parallel.strategy, config=sharding)
    return HybridShardedModel(model, sharding, **parallel.arguments(), optimizer=optimizer)


def build_optimizer(config: Config) -> Any:
    """Build the optimizer, with its learning rate schedule if it has one.

    Not collective.
    """
    section = config.optimizer
    if isinstance(section, VectorMethodSection):
        methods = {"l-bfgs": optim.LBFGS, "cg": optim.NonlinearCG, "newton-cg": optim.NewtonCG}
        return methods[section.name](**{k.name: getattr(section, k.name) for k in fields(section) if k.name != "name"})
    kinds = {
        "sgd": optim.SGD,
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "rmsprop": optim.RMSprop,
        "lion": optim.Lion,
        "lamb": optim.LAMB,
        "muon": optim.Muon,
        "soap": optim.SOAP,
    }
    rate = {item.name for item in fields(OptimizerSection)} - {"weight_decay"}
    own = {item.name: getattr(section, item.name) for item in fields(section) if item.name not in rate}
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

    Not collective. They do not depend on the sizes of the layout of the run over ranks.
    """
    placed = ("device", "optimizer_device", "direct_messages", "mixed_precision")
    names = ("micro_batch", "accumulate", "threads", "timeout", *placed)
    own = {"clip": config.train.clip or None, "tiles": config.parallel.tiles}
    return {name: getattr(config.train, name) for name in (*names, "ema")} | own


def build_sharding(config: Config, comm: Communicator) -> ShardingConfig:
    """Build the :class:`ShardingConfig` of a training.

    Not collective.
    """
    train, parallel = config.train, config.parallel
    return ShardingConfig(
        comm=comm,
        gradient_compression=train.gradient_compression,
        grain_assignment=parallel.grain_assignment,
        share_node_memory=parallel.share_node_memory,
        ranks_per_node=parallel.ranks_per_node,
        bucket_mb=parallel.bucket_mb,
        check_every=train.check_every,
        **computing_settings(config),
    )
