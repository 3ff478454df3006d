"""Define ``Trainer``: training with resume, early stops, checkpoints, validation and metrics, in one object.

:class:`TrainerArguments` and the functions before it check the arguments of ``Trainer``, and build from them the
:class:`~mpizero.train.setup.RunSetup` that ``mpizero train`` builds from a configuration file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Self, cast

from mpizero import optim
from mpizero._util.checks import flag, require, whole
from mpizero._util.fingerprint import Fingerprint
from mpizero._util.names import ELSEWHERE, explains, nearest, shown
from mpizero._util.settings import SettingError
from mpizero._util.text import notice
from mpizero.comm.agreement import agree_equal, all_ranks, check_call
from mpizero.data import OnlineSource, Source
from mpizero.data.source import source_for
from mpizero.errors import ArgumentError, ConfigError, DataError, StateError
from mpizero.layout.flat import joined
from mpizero.sharding import Config, Mesh, Model, distribute
from mpizero.sharding.config import placement, ranks_and_settings
from mpizero.sharding.partition import blocks_of
from mpizero.train.callbacks import Metric, check_callbacks, check_metrics, state_name
from mpizero.train.config.build import task_of, units_per_sample
from mpizero.train.config.schema import ALL_SAMPLES, CheckpointSection, LoopSection
from mpizero.train.data_identity import data_fingerprint, shared_contents
from mpizero.train.loop import Preempted, TrainingLoop, run_session
from mpizero.train.run_folder import RunFolder, tiles_of_checkpoint
from mpizero.train.setup import RunRecord, RunSetup, TrainingResult
from mpizero.train.stopping import SIGNALS, JobContext, StopSignals

#: Further arguments of ``Trainer``, by the section that checks them.
LOOP = tuple(item.name for item in fields(LoopSection))
SAVING = tuple(item.name for item in fields(CheckpointSection) if item.name != "folder")


@contextmanager
def plain_settings() -> Iterator[None]:
    """Convert a :class:`SettingError` of the ``with`` block to a ConfigError: "train.steps" becomes "steps"."""
    try:
        yield
    except SettingError as error:
        text = re.sub(r"\b(train|loop|checkpoint|parallel|data)\.(?=[a-z])", "", error.message)
        raise ConfigError(f"Trainer: {text}") from None


def sections_of(run: object, settings: Mapping[str, Any]) -> tuple[LoopSection, CheckpointSection]:
    """Check the keyword arguments ``settings`` of ``Trainer``, and return them as sections of a configuration.

    Not collective. ``run`` is the path of the run's folder.

    Raises
    ------
    ArgumentError
        If a key of ``settings`` is no argument of ``Trainer``.
    ConfigError
        If a value is not allowed.
    """
    known = (*LOOP, *SAVING)
    for name in settings:
        if name not in known:
            raise ArgumentError(
                f"Trainer: there is no argument {shown(name)}{_meant(name, known)}; beside its own it takes "
                f"{', '.join(known)}"
            )
    if not isinstance(run, str | Path) or not str(run).strip():
        raise ArgumentError(f"Trainer: run={run!r:.80}: expected the path of the run's folder")
    with plain_settings():
        loop = LoopSection(**{name: value for name, value in settings.items() if name in LOOP})
        saving = {name: value for name, value in settings.items() if name in SAVING}
        return loop, CheckpointSection(folder=str(Path(run) / "checkpoints"), **saving)


def _meant(name: str, known: Sequence[str]) -> str:
    """Return a hint on what to use in place of ``name``, an unknown argument of ``Trainer``; "" if there is no hint."""
    if "epoch" in name:
        return f"{nearest(name, known)}: count steps, steps=epochs * len(source) // global_batch"
    if "sched" in name:
        return ": the rate is the optimizer's, such as mz.AdamW(lr=mz.optim.cosine(1e-3, steps=1000, warmup=50))"
    words, settings = (name, *ELSEWHERE.get(name.lower(), ())), [item.name for item in fields(Config)]
    own = [word for word in words if word in settings]
    if own and not any(word in known for word in words):
        return f": it is a setting, mz.Config({own[0]}=...)"
    return nearest(name, known)


def sources_of(source: object, validation: object, global_batch: int) -> tuple[Source | OnlineSource, Source | None]:
    """Return the samples for training and those for validation. Not collective.

    ``validation`` is a source, a fraction of ``source`` to hold back, or None.

    Raises
    ------
    ArgumentError
        If ``source`` or ``validation`` is not a source of samples.
    DataError
        If there are fewer training samples than ``global_batch``.
    """
    if isinstance(validation, Real) and isinstance(source, Source):  # a split shuffles: a share of 0 is none
        source, validation = source.split(float(validation)) if validation else (source, None)
    for name, value, kind in (("source", source, Source | OnlineSource), ("validation", validation, Source | None)):
        if not isinstance(value, kind):
            what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            way = source_for(value) or ", such as mz.data.ArraySource(x, y)"
            raise ArgumentError(f"Trainer: {name} is {what}: expected a source of samples{way}")
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
    """Raise ConfigError for ``best`` or ``patience`` without validations, or ``validate_ema`` without ``ema``.

    Not collective.
    """
    if loop.validate_ema and ema is None:
        raise ConfigError(
            "Trainer: validate_ema=True: needs the average of the parameters: give it config=mz.Config(ema=0.999)"
        )
    for name, value in (("best", checkpoints.best), ("patience", loop.patience)):
        if value is not None and validation is None:
            raise ConfigError(f"Trainer: {name}={value!r}: needs validation samples: give validation=..., such as 0.1")
        if value is not None and not loop.validate_every:
            raise ConfigError(f"Trainer: {name}={value!r}: needs validations: give validate_every > 0")


def check_sharded(model: Model, arguments: Mapping[str, Any]) -> None:
    """Raise an error if arguments for sharding are passed with a sharded model, or if the model cannot be trained.

    Not collective. ``arguments`` maps names such as "mesh" and "optimizer" to values; those not passed are None.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"Trainer: {name} is for a model that is not sharded yet; this {model._name} has its own: "
                f"leave {name} out"
            )
    _ = model.optimizer  # raises an error if the model has none
    if model._mean_every:
        raise ConfigError(
            f"Trainer: the ranks of this {model._name} train copies of their own (LocalSGDOptimizer), of "
            "which a checkpoint keeps only the mean, so no run could be resumed exactly; write the loop yourself"
        )


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """Hold the arguments of :class:`Trainer`, where they are described."""

    model: Any
    source: Any
    mesh: Any
    config: Any
    optimizer: Any
    strategy: Any
    validation: Any
    metrics: Any
    callbacks: Any
    run: Any
    progress: Any
    settings: Mapping[str, Any]

    @property
    def is_sharded(self) -> bool:
        """True if ``model`` is a sharded model."""
        return isinstance(self.model, Model)

    def ranks(self) -> tuple[Mesh, Config]:
        """Return the mesh and the config to train with; create those that were not passed. Not collective."""
        if self.is_sharded:
            return self.model.mesh, self.model.config
        return ranks_and_settings(self.mesh, self.config)

    def setup(self, mesh: Mesh, config: Config) -> RunSetup:
        """Check all arguments, shard the model, and return the :class:`RunSetup` of the run.

        Collective over ``mesh``; an error is raised on all ranks.
        """
        comm = mesh.communicator
        with all_ranks(comm):
            self._check(config)
            loop, checkpoints = sections_of(self.run, self._settings)
            source, validation = sources_of(self.source, self.validation, loop.global_batch)
            loop = self._with_batch(loop, source)
            check_validation(loop, checkpoints, validation, config.ema)
            metrics, callbacks = check_metrics(self.metrics or {}), check_callbacks(self.callbacks or ())
            require("Trainer: progress", self.progress, flag)
            fingerprint = source.fingerprint if isinstance(source, OnlineSource) else data_fingerprint(source)
            validation_fingerprint = "" if validation is None else data_fingerprint(validation)
        shared = {**vars(loop), **vars(checkpoints), "sharded": self.is_sharded}
        shared |= {"metrics": list(metrics), "callbacks": [state_name(one) for one in callbacks]}
        data = {"the training data": fingerprint[:16], "the validation data": validation_fingerprint[:16]}
        agree_equal(comm, lambda: {"the arguments of Trainer": shared, **data}, "agree Trainer")
        contents = shared_contents(comm, source, validation)
        model = self._placed(mesh, config, loop)
        return RunSetup(
            model=model,
            source=source,
            validation=validation,
            loop=loop,
            checkpoints=replace(checkpoints, folder=str(RunFolder(checkpoints.folder).checkpoints)),
            record=replace(record_of(model, source, loop, (fingerprint, validation_fingerprint)), contents=contents),
            metrics=metrics,
            callbacks=callbacks,
            shows_progress=self.progress,
        )

    @property
    def _method(self) -> optim.VectorMethod | None:
        """The optimizer if it is a full-batch method such as L-BFGS, else None."""
        optimizer = self.model.optimizer if self.is_sharded else self.optimizer
        method = getattr(optimizer, "wrapped_optimizer", optimizer)
        return method if isinstance(method, optim.VectorMethod) else None

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings of training loop and checkpoints; for a full-batch method ``global_batch`` may be missing.

        Raises
        ------
        ArgumentError
            If ``global_batch`` is missing with any other optimizer.
        """
        if self.settings["global_batch"] is not None:
            return dict(self.settings)
        if self._method is None:
            raise ArgumentError("Trainer: global_batch is missing: give the number of samples of a step, such as 64")
        return {**self.settings, "global_batch": ALL_SAMPLES}

    def _with_batch(self, loop: LoopSection, source: Source | OnlineSource) -> LoopSection:
        """Return ``loop``, with a global batch of all samples for a full-batch method. Not collective.

        Raises
        ------
        ConfigError
            If a full-batch method would not get the same samples in every step, or has a setting that only
            :func:`mpizero.minimize` allows; with any other optimizer, if ``global_batch`` is 0.
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

    def _check(self, config: Config) -> None:
        placement(self.strategy or "zero2")  # raises an error for an unknown strategy
        arguments = {name: getattr(self, name) for name in ("mesh", "config", "optimizer", "strategy")}
        if self.is_sharded:
            check_sharded(self.model, arguments)
        elif self.optimizer is None:
            raise ConfigError("Trainer: optimizer is missing: give one, such as optimizer=mz.AdamW(1e-3)")
        if not config.auto_sync_gradients:
            raise ConfigError(
                "Trainer: auto_sync_gradients=False leaves the update to your own loop; the trainer needs True"
            )

    def sharded_again(self, setup: RunSetup, mesh: Mesh, config: Config) -> RunSetup:
        """Close the run's model; return the run with a newly sharded model that has its start values. Collective."""
        setup.model.close()
        return replace(setup, model=self._placed(mesh, config, setup.loop))

    def _placed(self, mesh: Mesh, config: Config, loop: LoopSection) -> Model:
        """Return the sharded model, with allocated memory for the gradients of a step. Collective.

        Memory is allocated here because only before a checkpoint is loaded the model can fall back to private memory if
        shared memory is short.
        """
        model = self.model
        if not self.is_sharded:
            model = distribute(model, self.optimizer, self.strategy or "zero2", mesh=mesh, config=config)
        model.reserve(loop.global_batch)
        return cast(Model, model)


#: The settings of :class:`Config` that determine results, beside the numbers of samples.
_RECORDED = ("clip", "gradient_compression", "wire", "wire_parameters", "ema", "mixed_precision")


def record_of(
    model: Model, source: Source | OnlineSource, loop: LoopSection, fingerprints: tuple[str, str]
) -> RunRecord:
    """Return the :class:`RunRecord` of a run of ``Trainer``. Not collective.

    ``fingerprints`` are hashes of the training data and of the validation data.
    """
    config, wrapped = model.config, model.wrapped_model
    blocks = blocks_of(wrapped)
    frozen = [joined(block, spec.name) for block, specs in blocks.items() for spec in specs if not spec.trainable]
    settings: dict[str, dict[str, Any]] = {
        "trainer": {"global_batch": loop.global_batch, "seed": loop.seed, "frozen": frozen or None},
        # A setting that is off is recorded as None, like one that did not exist yet when the run was saved.
        "config": {name: getattr(config, name) or None for name in _RECORDED},
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
    """Return the settings of a model of the library that determine results, such as sizes, seed and dropout."""
    if not _is_library_object(wrapped):
        return {"name": type(wrapped).__name__}
    settings = getattr(wrapped, "fingerprint", None) or (
        {one.name: getattr(wrapped, one.name) for one in fields(wrapped)} if is_dataclass(wrapped) else {}
    )
    return {"name": type(wrapped).__name__} | {
        name: value
        for name, value in settings.items()
        if isinstance(value, int | float | str | None) and name != "activation_checkpointing"
    }


def _optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optimizer of the library, except the learning rate, which is compared at a load."""
    if not isinstance(optimizer, optim.FlatOptimizer | optim.VectorMethod):
        return {"name": type(optimizer).__name__}
    settings = {name: value for name, value in vars(optimizer).items() if name != "lr" and not name.startswith("_")}
    return {"name": type(optimizer).__name__, **{name: _recorded(value) for name, value in settings.items()}}


def _recorded(value: Any) -> int | float | str | None:
    """Return the form in which a checkpoint stores a setting: the value, its text, or a hash for large objects."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, tuple):  # of numbers, of patterns, or of parameter groups
        return str(value)
    from mpizero.optim.regularization import Regularization  # here, because few methods need it

    if isinstance(value, Regularization):  # terms that the user has written count by name, as the user's own models
        value = {
            name: term if _is_library_object(term) else getattr(term, "__qualname__", type(term).__qualname__)
            for name, term in value.terms.items()
        }
    return Fingerprint().digest(value).hex()


def _is_library_object(value: Any) -> bool:
    """Return whether the class of an object is defined in mpizero."""
    return type(value).__module__.startswith("mpizero.")


@explains
class Trainer:
    """Train a model, as ``mpizero train`` does: with checkpoints, resume, early stops, validation, metrics, callbacks.

    Construction, :meth:`fit`, :meth:`resume` and :meth:`close` are collective over the ranks. All ranks
    pass the same arguments. docs/trainer.md is a guide.

    Parameters
    ----------
    model : model, or sharded model
        A model that is not sharded, from whose start values each :meth:`fit` begins; or a sharded model with its
        optimizer, which is trained from its current state, and which the caller closes.
    source : Source
        The training samples; an ``OnlineSource`` is allowed, too.
    config : Config or ShardingConfig or None
        The settings; None takes the defaults. Must be left out with a sharded model.
    mesh : Mesh or None
        The ranks, and the numbers of pipeline stages, tensor and context ranks that split the model; None takes all
        ranks that the launcher has started, or those of a ShardingConfig. Must be left out with a sharded model.
    optimizer : optimizer
        The optimizer, such as ``mz.AdamW(1e-3)``. Must be left out with a sharded model.
    steps, global_batch : int
        Number of training steps, and number of samples in a step. With a full-batch method such as ``mz.LBFGS()``, all
        steps use all samples: ``global_batch`` may be left out, and ``steps`` is the largest number of evaluations.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        The arrays that the ranks shard; "zero2" by default. Must be left out with a sharded model.
    validation : Source, float or None
        The validation samples, or a fraction of ``source`` to hold back for validation; None or 0 does not validate.
    metrics : dict
        Functions by name. A function is called with the sharded model and samples ``(x, y)``, and returns a sum over
        the samples, and a weight. The metric is the sum over all validation samples divided by their total weight. In
        place of numbers it may return two arrays (samples, space, channels), which are summed with the same bits on
        every cut of space; with a domain it must, and gets and returns this rank's part of fields.
    callbacks : list
        Objects whose methods are called during the run, see :class:`Callback`.
    run : path
        Folder of the run, with ``metrics.jsonl`` and ``checkpoints/``; files of an earlier run in this folder are moved
        to its subfolder ``earlier/``.
    progress : bool
        Whether rank 0 shows progress and messages on standard error.
    **settings
        Settings of the configuration file under the same names and with the same defaults: of ``[train]`` ``seed``,
        ``validate_every``, ``validate_samples``, ``validate_ema``, ``patience``, ``min_delta``, ``time_limit``,
        ``time_reserve``, ``prefetch``; of ``[checkpoint]`` ``every``, ``keep``, ``keep_every``, ``best``,
        ``asynchronous``, ``backend``, ``alignment``.

    Raises
    ------
    TypeError
        On every rank, if an argument is of a wrong type or unknown.
    ConfigError
        On every rank, if a value is not allowed, values contradict each other, or ranks pass different values.
    DataError
        On every rank, if there are too few samples.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x = np.linspace(0.0, 1.0, 8).reshape(8, 1)
    >>> source = mz.data.ArraySource(x, 2 * x)
    >>> line = mz.nn.MLP(1, [], 1, task="regression", dtype="float64")
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     arguments = {"optimizer": mz.Adam(lr=0.1), "steps": 5, "global_batch": 4, "progress": False}
    ...     with mz.Trainer(line, source, config, **arguments) as trainer:
    ...         result = trainer.fit()
    >>> result.steps, result.losses[-1] < result.losses[0]
    (5, True)
    """

    def __init__(
        self,
        model: Any,
        source: Source,
        config: Config | None = None,
        *,
        mesh: Mesh | None = None,
        optimizer: Any = None,
        steps: int,
        global_batch: int | None = None,
        strategy: str | None = None,
        validation: Source | float | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Iterable[Any] | None = (),
        run: str | Path = "run",
        progress: bool = True,
        **settings: Any,
    ) -> None:
        arguments = TrainerArguments(
            model=model,
            source=source,
            mesh=mesh,
            config=config,
            optimizer=optimizer,
            strategy=strategy,
            validation=validation,
            metrics=metrics,
            callbacks=callbacks,
            run=run,
            progress=progress,
            settings={"steps": steps, "global_batch": global_batch, **settings},
        )
        self._arguments: TrainerArguments | None = None if arguments.is_sharded else arguments
        self._mesh, self._config = arguments.ranks()
        owns = self._mesh is not mesh and self._mesh is not getattr(config, "mesh", None)
        self._created_mesh = self._mesh if owns and not arguments.is_sharded else None
        self._begin(arguments.setup(self._mesh, self._config), None)

    @classmethod
    def of_setup(cls, setup: RunSetup, context: JobContext) -> Self:
        """Return the trainer of a run that was built from a configuration file. Not collective.

        ``context`` holds the signal handlers of the caller, the command's start time, and its environment.
        """
        made = cls.__new__(cls)
        made._arguments = made._created_mesh = None
        made._mesh, made._config = setup.model.mesh, setup.model.config
        made._begin(setup, context)
        return made

    def _begin(self, setup: RunSetup, context: JobContext | None) -> None:
        self._setup, self._context = setup, context
        self._loop: TrainingLoop | None = None
        self._closed = False

    # ------------------------------------------------------------------ training

    def fit(self) -> TrainingResult:
        """Train from the first step to the last one, and return the result.

        Files of an earlier run in the run's folder are moved to its subfolder ``earlier/``. If the model was not
        sharded when it was passed, each call trains it from its start values.

        Raises
        ------
        Preempted
            If the run was asked to stop; its state is saved, and :meth:`resume` continues it, in this program or in the
            next. A program that does not catch this exception ends with status 75.
        NonFiniteError
            After too many skipped steps in a row, as ``config.bad_steps`` says.
        Exception
            An exception of a callback or metric, on the ranks where it was raised; RemoteError on other ranks.
        """
        return self._result_of(self.run_session())

    def resume(self, step: int | None = None) -> TrainingResult:
        """Continue the run in the run's folder from its newest undamaged checkpoint, or from that of ``step``.

        The checkpoint may come from any number of ranks and any layout; the result has the same bits as if the run had
        not been interrupted. Without a checkpoint the run starts from the first step. The errors of :meth:`fit` are
        raised, too.

        Raises
        ------
        ConfigError
            If the checkpoint is of a run with other settings or other data; the message names the difference.
        CheckpointError
            If no checkpoint can be loaded though there are some, or that of ``step`` cannot; no file was changed.
        """
        return self._result_of(self.run_session(resume=True, resume_from=step))

    def run_session(self, *, resume: bool = False, resume_from: int | None = None) -> TrainingResult | Preempted:
        """Train like :meth:`fit` or :meth:`resume`, but return a :class:`Preempted` instead of raising it."""
        if self._closed:
            raise StateError("this trainer is closed: make a new one")
        if self._loop is not None and self._loop.running:
            raise StateError("this trainer is training already: a callback cannot start another run of it")
        check_call(self._setup.comm, "Trainer.resume" if resume else "Trainer.fit")
        if resume_from is not None:
            require("Trainer.resume: step", resume_from, whole(0))
        if self._arguments is not None:
            self._shard_again(self._arguments, resume_from, resumes=resume or resume_from is not None)
        arguments: dict[str, Any] = {"resume": resume, "resume_from": resume_from, "attach": self._attach}
        if self._context is not None:
            return run_session(self._setup, self._context, **arguments)
        signals = StopSignals(() if self._setup.model.mesh.is_guest else SIGNALS)
        with plain_settings():
            outcome = run_session(self._setup, JobContext(signals, environment=os.environ), **arguments)
        return outcome if isinstance(outcome, Preempted) else self._unless_signalled(outcome, signals)

    def _shard_again(self, arguments: TrainerArguments, step: int | None, *, resumes: bool) -> None:
        """Shard the model anew if it was trained already, or if a checkpoint to resume from has other tiles."""
        setup, config = self._setup, self._config
        if resumes and config.tiles is None:
            checkpoints = RunFolder(setup.checkpoints.folder).checkpoints
            tiles = tiles_of_checkpoint(checkpoints, setup.comm, step)
            if tiles not in (None, setup.model._engine.partitioned.parallel_layout.wanted_virtual_ranks):
                config = config.with_tiles(tiles)
        if self._loop is not None or config.tiles != setup.model.config.tiles:
            self._setup = arguments.sharded_again(setup, self._mesh, config)

    def _unless_signalled(self, result: TrainingResult, signals: StopSignals) -> TrainingResult | Preempted:
        """Return the result of a complete run, but a :class:`Preempted` if a rank got a stop signal near its end.

        A result would let the program continue, though the signal has asked it to end. Collective; signals are not
        caught any more.
        """
        reasons = self._setup.comm.allgather_object(signals.reason(self.rank), "late signals")
        reason = next(filter(None, reasons), "")
        if not reason:
            return result
        how_to_resume = self._setup.record.wording.resume
        return Preempted(
            f"stopped by {reason}: the run is complete after step {result.steps}, {how_to_resume} returns its result"
        )

    def _result_of(self, outcome: TrainingResult | Preempted) -> TrainingResult:
        if not isinstance(outcome, Preempted):
            return outcome
        if self.rank == 0:
            notice(str(outcome))  # which ends the program silently
        raise outcome

    def _attach(self, loop: TrainingLoop) -> Self:
        self._loop = loop
        return self

    def stop(self, reason: str) -> None:
        """Request, in a callback's method on any rank, that all ranks end the run after this step. Not collective.

        The run ends as after its last step: with a checkpoint, and a result whose ``stopped`` is ``reason``.
        """
        if self._loop is None:
            raise StateError("trainer.stop is for the methods of callbacks, while the run trains")
        self._loop.callbacks.stop(reason)

    # ------------------------------------------------------------------ state (not collective)

    @property
    def model(self) -> Any:
        """The sharded model."""
        return self._setup.model

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return int(self._setup.comm.rank)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self._setup.comm.size)

    @property
    def step(self) -> int:
        """The number of steps done, including those before a resume."""
        return 0 if self._loop is None else self._loop.step

    @property
    def figures(self) -> dict[str, Any]:
        """The metrics of the last step by name, as in its line of ``metrics.jsonl``.

        Bytes sent and memory are those of this rank, all other metrics are equal on all ranks. The metrics of a
        validation after the step are added when they are computed.
        """
        return {} if self._loop is None else dict(self._loop.metrics)

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return RunFolder(self._setup.checkpoints.folder).root

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Close the sharded model and the mesh if this trainer has created them. A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        """Return this trainer. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the trainer; after an exception, defer closing until all ranks make another model or mesh together."""
        if self._closed:
            return
        self._closed = True
        raised = (None, None, None) if isinstance(error, Preempted) else (kind, error, trace)
        if self._arguments is not None:
            self._setup.model.__exit__(*raised)
        if self._created_mesh is not None:
            self._created_mesh.__exit__(*raised)
