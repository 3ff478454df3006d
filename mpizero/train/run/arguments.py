"""Check the arguments of ``Trainer``, and make of them what a run consists of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, cast

from mpizero import optim
from mpizero._util.checks import flag, require
from mpizero._util.fingerprint import Fingerprint
from mpizero._util.names import nearest, shown
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.data import OnlineSource, Source
from mpizero.errors import ArgumentError, ConfigError, DataError
from mpizero.layout.flat import joined
from mpizero.optim.regularization import Regularization
from mpizero.sharding import ShardedModelBase, ShardingConfig
from mpizero.sharding.partition import blocks_of
from mpizero.train.callbacks.callback import check_callbacks, state_name
from mpizero.train.callbacks.user_metrics import check_metrics
from mpizero.train.config.builder import lay_out
from mpizero.train.config.data_identity import data_fingerprint, shared_contents
from mpizero.train.config.loop_section import ALL_SAMPLES, LoopSection
from mpizero.train.config.model_and_data import task_of, units_per_sample
from mpizero.train.config.parallel_section import ParallelSection
from mpizero.train.config.sections import CheckpointSection
from mpizero.train.config.setting_checks import SettingError
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunRecord, RunSetup

#: Further arguments of ``Trainer``, by the section that checks them.
LOOP = tuple(item.name for item in fields(LoopSection))
SAVING = tuple(item.name for item in fields(CheckpointSection) if item.name != "folder")
#: Keys of a layout that are settings of the :class:`ShardingConfig`.
OF_CONFIG = ("share_node_memory", "ranks_per_node", "bucket_mb", "tiles")


@contextmanager
def plain_settings() -> Iterator[None]:
    """Convert a :class:`SettingError` of the ``with`` block to a ConfigError that names arguments without sections."""
    try:
        yield
    except SettingError as error:
        text = re.sub(r"\b(train|loop|checkpoint|parallel|data)\.(?=[a-z])", "", error.message)
        raise ConfigError(f"Trainer: {text}") from None


def sections_of(run: object, settings: Mapping[str, Any]) -> tuple[LoopSection, CheckpointSection]:
    """Return the checked settings of loop and checkpoints; ``run`` is the run's folder. Not collective.

    Raises
    ------
    ArgumentError
        If there is no argument of a name.
    ConfigError
        If a value is not allowed.
    """
    known = (*LOOP, *SAVING)
    for name in settings:
        if name not in known:
            raise ArgumentError(
                f"Trainer: there is no argument {shown(name)}{nearest(name, known)}; beside its own it takes "
                f"{', '.join(known)}"
            )
    if not isinstance(run, str | Path) or not str(run).strip():
        raise ArgumentError(f"Trainer: run={run!r:.80}: expected the path of the run's folder")
    with plain_settings():
        loop = LoopSection(**{name: value for name, value in settings.items() if name in LOOP})
        saving = {name: value for name, value in settings.items() if name in SAVING}
        return loop, CheckpointSection(folder=str(Path(run) / "checkpoints"), **saving)


def sources_of(source: object, validation: object, global_batch: int) -> tuple[Source | OnlineSource, Source | None]:
    """Return the samples for training and those for validation. Not collective.

    ``validation`` is a source, a share of ``source``, or None.

    Raises
    ------
    ArgumentError
        If one is no source.
    DataError
        If there are fewer samples than a global batch has.
    """
    if isinstance(validation, Real) and isinstance(source, Source):  # a split shuffles: a share of 0 is none
        source, validation = source.split(float(validation)) if validation else (source, None)
    online = isinstance(source, OnlineSource)
    for name, given in (("source", source), ("validation", validation)):
        if (
            not isinstance(given, Source)
            and not (online and name == "source")
            and not (given is None and name == "validation")
        ):
            what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
            raise ArgumentError(
                f"Trainer: {name} is {what}: expected a source of samples, such as mz.data.ArraySource(x, y)"
            )
    assert isinstance(source, Source | OnlineSource)
    if isinstance(source, Source) and len(source) < global_batch:
        raise DataError(
            f"Trainer: global_batch={global_batch}: must be at most the number of training samples, which is "
            f"{len(source)}"
        )
    return source, validation if isinstance(validation, Source) and len(validation) else None


def check_validation(
    loop: LoopSection, checkpoints: CheckpointSection, validation: Source | None, ema: float | None
) -> None:
    """Raise ConfigError if ``best`` or ``patience`` has no validations, or ``validate_ema`` no average ``ema``.

    Not collective.
    """
    if loop.validate_ema and ema is None:
        raise ConfigError(
            "Trainer: validate_ema=True: needs the average of the parameters: give it ShardingConfig(ema=0.999)"
        )
    for name, value in (("best", checkpoints.best), ("patience", loop.patience)):
        if value is not None and validation is None:
            raise ConfigError(f"Trainer: {name}={value!r}: needs validation samples: give validation=..., such as 0.1")
        if value is not None and not loop.validate_every:
            raise ConfigError(f"Trainer: {name}={value!r}: needs validations: give validate_every > 0")


def check_sharded(model: ShardedModelBase, given: Mapping[str, Any]) -> None:
    """Raise an error if a model that is sharded already comes with arguments for sharding, or cannot be trained.

    Not collective. ``given`` are these arguments by name; those that were not given are None.
    """
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"Trainer: {name} is for a model that is not sharded yet; this {type(model).__name__} has its own: "
                f"leave {name} out"
            )
    _ = model.optimizer  # or an error that says how to give one
    if model.keeps_copies:
        raise ConfigError(
            f"Trainer: the ranks of this {type(model).__name__} train copies of their own (LocalSGDOptimizer), of "
            "which a checkpoint keeps only the mean, so no run could be resumed exactly; write the loop yourself"
        )


def check_config(config: ShardingConfig) -> None:
    """Raise ConfigError if ``config.auto_sync_gradients`` is False. Not collective."""
    if not config.auto_sync_gradients:
        raise ConfigError(
            "Trainer: auto_sync_gradients=False leaves the update to your own loop; the trainer needs True"
        )


def parallel_section(strategy: Any, parallel: Any) -> ParallelSection:
    """Return the checked layout over ranks. Not collective."""
    if parallel is not None and not isinstance(parallel, Mapping):
        raise ArgumentError(
            f"Trainer: parallel={parallel!r:.80}: expected a dictionary of sizes, such as {{'pipeline': 2}}"
        )
    sizes = dict(parallel or {})
    known = [item.name for item in fields(ParallelSection) if item.name not in (*OF_CONFIG, "strategy")]
    for name in sizes:
        if name in OF_CONFIG:
            raise ConfigError(f"Trainer: parallel: {name} is a setting of the ShardingConfig: give it there")
        if name not in known:
            raise ConfigError(
                f"Trainer: parallel: {shown(name)} is unknown{nearest(name, known)}; known: {', '.join(known)}"
            )
    with plain_settings():
        return ParallelSection(strategy=strategy or "zero2", **sizes)


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """Hold the arguments of :class:`~mpizero.train.run.trainer.Trainer`, which describes them."""

    model: Any
    source: Any
    config: Any
    optimizer: Any
    strategy: Any
    parallel: Any
    validation: Any
    metrics: Any
    callbacks: Any
    run: Any
    progress: Any
    settings: Mapping[str, Any]

    @property
    def is_sharded(self) -> bool:
        """True if the model is sharded already."""
        return isinstance(self.model, ShardedModelBase)

    def ranks(self) -> ShardingConfig:
        """Return the configuration to train with, a new one if none was given. Not collective."""
        if self.is_sharded:
            found: ShardingConfig = self.model.config
            return found
        if not isinstance(self.config, ShardingConfig | None):
            raise ArgumentError(f"Trainer: config={self.config!r:.80}: expected a ShardingConfig")
        return ShardingConfig() if self.config is None else self.config

    def setup(self, ranks: ShardingConfig) -> RunSetup:
        """Check all arguments, shard the model, and return what the run consists of.

        Collective over ``ranks``; all ranks raise the same error.
        """
        comm = ranks.communicator
        with all_ranks(comm):
            self._check(ranks)
            layout = parallel_section(self.strategy, self.parallel)
            loop, checkpoints = sections_of(self.run, self._settings)
            source, validation = sources_of(self.source, self.validation, loop.global_batch)
            loop = self._with_batch(loop, source)
            check_validation(loop, checkpoints, validation, ranks.ema)
            metrics, callbacks = check_metrics(self.metrics or {}), check_callbacks(self.callbacks or ())
            require("Trainer: progress", self.progress, flag)
            fingerprint = source.fingerprint if isinstance(source, OnlineSource) else data_fingerprint(source)
            held = "" if validation is None else data_fingerprint(validation)
        shared = {**vars(loop), **vars(checkpoints), **vars(layout), "sharded": self.is_sharded}
        shared |= {"metrics": list(metrics), "callbacks": [state_name(one) for one in callbacks]}
        data = {"the training data": fingerprint[:16], "the validation data": held[:16]}
        agree_equal(comm, lambda: {"the arguments of Trainer": shared, **data}, "agree Trainer")
        contents = shared_contents(comm, source, validation)
        model = self._placed(layout, ranks, loop)
        return RunSetup(
            model=model,
            source=source,
            validation=validation,
            loop=loop,
            checkpoints=replace(checkpoints, folder=str(RunFolder(checkpoints.folder).checkpoints)),
            record=replace(record_of(model, source, loop, (fingerprint, held)), contents=contents),
            metrics=metrics,
            callbacks=callbacks,
            shows_progress=self.progress,
        )

    @property
    def _method(self) -> optim.VectorMethod | None:
        """The method of whole vectors that trains the model; None if the optimizer is another."""
        given = self.model.optimizer if self.is_sharded else self.optimizer
        found = getattr(given, "wrapped_optimizer", given)
        return found if isinstance(found, optim.VectorMethod) else None

    @property
    def _settings(self) -> dict[str, Any]:
        """The arguments of loop and checkpoints; without ``global_batch``, a method of whole vectors takes all samples.

        Raises
        ------
        ArgumentError
            If any other optimizer is given no ``global_batch``.
        """
        if self.settings["global_batch"] is not None:
            return dict(self.settings)
        if self._method is None:
            raise ArgumentError("Trainer: global_batch is missing: give the number of samples of a step, such as 64")
        return {**self.settings, "global_batch": ALL_SAMPLES}

    def _with_batch(self, loop: LoopSection, source: Source | OnlineSource) -> LoopSection:
        """Return the settings of the loop with the number of samples of a step. Not collective.

        Raises
        ------
        ConfigError
            If a method of whole vectors does not get the same samples in every step.
        """
        method = self._method
        if method is None:
            if loop.global_batch == ALL_SAMPLES:
                raise ConfigError("Trainer: global_batch=0: expected a whole number >= 1")
            return loop
        name = type(method).__name__
        if isinstance(source, OnlineSource):
            raise ConfigError(f"Trainer: {name} needs the same samples in every step; an OnlineSource gives each once")
        if isinstance(method, optim.NewtonCG) and method.exact:
            raise ConfigError(f"Trainer: {name}(exact=True): only mz.minimize takes products of the model")
        with plain_settings():
            return loop.of_all(len(source), name)

    def _check(self, ranks: ShardingConfig) -> None:
        given = {name: getattr(self, name) for name in ("config", "optimizer", "strategy", "parallel")}
        if self.is_sharded:
            check_sharded(self.model, given)
        elif self.optimizer is None:
            raise ConfigError("Trainer: optimizer is missing: give one, such as optimizer=mz.AdamW(1e-3)")
        check_config(ranks)

    def sharded_again(self, setup: RunSetup, config: ShardingConfig) -> RunSetup:
        """Close the run's model; return the run with a new one of ``config`` that has the start values. Collective."""
        setup.model.close()
        layout = parallel_section(self.strategy, self.parallel)
        return replace(setup, model=self._placed(layout, config, setup.loop))

    def _placed(self, layout: ParallelSection, ranks: ShardingConfig, loop: LoopSection) -> ShardedModelBase:
        """Return the sharded model, with memory for the gradients of a step. Collective.

        Now the model can still move to private memory where shared memory is short, not once a checkpoint is loaded.
        """
        model = self.model
        if not self.is_sharded:
            with plain_settings():
                layout.check_ranks(ranks.communicator.size)
            model = lay_out(model, self.optimizer, layout, ranks)
        model.reserve(loop.global_batch)
        return cast(ShardedModelBase, model)


def record_of(
    model: ShardedModelBase, source: Source | OnlineSource, loop: LoopSection, fingerprints: tuple[str, str]
) -> RunRecord:
    """Return what a run of ``Trainer`` records about itself. Not collective.

    ``fingerprints`` are those of the training and of the validation data.
    """
    config, wrapped = model.config, model.wrapped_model
    blocks = blocks_of(wrapped)
    frozen = [joined(block, spec.name) for block, specs in blocks.items() for spec in specs if not spec.trainable]
    settings: dict[str, dict[str, Any]] = {
        "trainer": {"global_batch": loop.global_batch, "seed": loop.seed, "frozen": frozen or None},
        "config": {name: getattr(config, name) for name in ("clip", "gradient_compression", "ema", "mixed_precision")},
        "optimizer": _optimizer_settings(model.optimizer.wrapped_optimizer),
        "wrapped_model": _model_settings(wrapped),
    }
    task = task_of(wrapped)
    return RunRecord(
        settings=settings,
        fingerprint=fingerprints[0],
        validation_fingerprint=fingerprints[1],
        task=task,
        units_per_sample=1 if isinstance(source, OnlineSource) else units_per_sample(task, source),
    )


def _model_settings(wrapped: Any) -> dict[str, Any]:
    """Return the settings of the library's own models that change results, such as sizes, seed and dropout."""
    if not _is_own(wrapped):
        return {"name": type(wrapped).__name__}
    own = getattr(wrapped, "fingerprint", None) or (
        {one.name: getattr(wrapped, one.name) for one in fields(wrapped)} if is_dataclass(wrapped) else {}
    )
    return {"name": type(wrapped).__name__} | {
        name: value
        for name, value in own.items()
        if isinstance(value, int | float | str | None) and name != "activation_checkpointing"
    }


def _optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return the settings of the library's own optimizers, but for the learning rate, which a load compares itself."""
    if not isinstance(optimizer, optim.FlatOptimizer | optim.VectorMethod):
        return {"name": type(optimizer).__name__}
    own = {name: value for name, value in vars(optimizer).items() if name != "lr" and not name.startswith("_")}
    return {"name": type(optimizer).__name__, **{name: _recorded(value) for name, value in own.items()}}


def _recorded(value: Any) -> int | float | str | None:
    """Return what a checkpoint records of a setting: itself or its text, or a hash if it may hold large arrays."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, tuple):  # of numbers, of patterns, or of parameter groups
        return str(value)
    if isinstance(value, Regularization):  # of the user's own terms the names, as of a user's own model
        value = {
            name: term if _is_own(term) else getattr(term, "__qualname__", type(term).__qualname__)
            for name, term in value.terms.items()
        }
    return Fingerprint().digest(value).hex()


def _is_own(value: Any) -> bool:
    """Tell whether an object is of one of mpizero's own classes."""
    return type(value).__module__.startswith("mpizero.")
