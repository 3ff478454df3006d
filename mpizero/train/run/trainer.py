"""Define ``Trainer``: training with resume, early stops, checkpoints, validation and metrics, in one object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero._util.text import notice
from mpizero.comm.agreement import check_call
from mpizero.data import Source
from mpizero.errors import StateError
from mpizero.sharding import ShardingConfig
from mpizero.train.callbacks.user_metrics import Metric
from mpizero.train.run.arguments import TrainerArguments, plain_settings
from mpizero.train.run.loop import TrainingLoop
from mpizero.train.run.result import TrainingResult
from mpizero.train.run.resume import tiles_of_checkpoint
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunSetup
from mpizero.train.run.visit import Preempted, run_visit
from mpizero.train.stopping.signals import SIGNALS, StopSignals
from mpizero.train.stopping.wall_time import JobContext


@explains
class Trainer:
    """Train a model, as ``mpizero train`` does: with checkpoints, resume, early stops, validation, metrics, callbacks.

    Construction, :meth:`fit`, :meth:`resume` and :meth:`close` are collective over the ranks of ``config``. All ranks
    pass the same arguments. docs/trainer.md says how to use it.

    Parameters
    ----------
    model : model, or sharded model
        What to train: a model that is not sharded yet, of which each :meth:`fit` starts anew; or a sharded model with
        its optimizer, which is trained as it is, and which the caller closes.
    source : Source
        The training samples.
    config : ShardingConfig or None
        The ranks, and how they compute; None takes the default settings. Left out with a sharded model.
    optimizer : optimizer
        The optimizer, such as ``mz.AdamW(1e-3)``. Left out with a sharded model.
    steps, global_batch : int
        Number of training steps, and of samples in each. A method of whole vectors such as ``mz.LBFGS()`` takes all
        samples: ``global_batch`` may be left out, and ``steps`` is the most evaluations.
    strategy : {"ddp", "zero1", "zero2", "zero3"}
        What the ranks shard; "zero2" if it is not given. Left out with a sharded model.
    parallel : dict
        How the model is split over ranks: the keys ``pipeline``, ``tensor``, ``context``, ``data``, ``schedule``,
        ``virtual_stages``, ``order``, ``cuts`` of the section ``[parallel]``. Left out with a sharded model.
    validation : Source, float or None
        The samples for validation, or a share of ``source`` that is held back for it; None or 0 does not validate.
    metrics : dict
        Functions by name. Each takes the sharded model and samples ``(x, y)``, and returns a sum over the samples and
        their weight. Their quotient over all validation samples is written to the metrics.
    callbacks : list
        Objects whose methods are called, see :class:`Callback`.
    run : path
        Folder of the run, with ``metrics.jsonl`` and ``checkpoints/``; what an earlier run has left there is moved to
        ``earlier/`` in it.
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
        On every rank, if a value is not allowed, values do not fit together, or ranks pass different ones.
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
        config: ShardingConfig | None = None,
        *,
        optimizer: Any = None,
        steps: int,
        global_batch: int | None = None,
        strategy: str | None = None,
        parallel: Mapping[str, Any] | None = None,
        validation: Source | float | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Iterable[Any] | None = (),
        run: str | Path = "run",
        progress: bool = True,
        **settings: Any,
    ) -> None:
        given = TrainerArguments(
            model=model,
            source=source,
            config=config,
            optimizer=optimizer,
            strategy=strategy,
            parallel=parallel,
            validation=validation,
            metrics=metrics,
            callbacks=callbacks,
            run=run,
            progress=progress,
            settings={"steps": steps, "global_batch": global_batch, **settings},
        )
        ranks = given.ranks()
        self._given: TrainerArguments | None = None if given.is_sharded else given
        self._config = ranks
        self._own_config = ranks if config is None and not given.is_sharded else None
        self._begin(given.setup(ranks), None)

    @classmethod
    def of_setup(cls, setup: RunSetup, context: JobContext) -> Self:
        """Return the trainer of a run that is checked already, as a configuration describes it. Not collective.

        ``context`` holds the signals that the caller catches.
        """
        made = cls.__new__(cls)
        made._given = made._own_config = None
        made._config = setup.model.config
        made._begin(setup, context)
        return made

    def _begin(self, setup: RunSetup, context: JobContext | None) -> None:
        self._setup, self._context = setup, context
        self._loop: TrainingLoop | None = None
        self._closed = False

    # ------------------------------------------------------------------ training

    def fit(self) -> TrainingResult:
        """Train from the first step to the last one, and return the result.

        What an earlier run has left in the run's folder is moved aside. A model that was given unsharded starts from
        its start values each time.

        Raises
        ------
        Preempted
            If the run was asked to stop; its state is saved, and :meth:`resume` continues it, in this program or in the
            next. A program that does not catch it ends with status 75.
        NonFiniteError
            After too many skipped steps in a row, as ``config.bad_steps`` says.
        Exception
            What a callback or a metric raises; other ranks raise RemoteError.
        """
        return self._result_of(self.visit())

    def resume(self, step: int | None = None) -> TrainingResult:
        """Continue the run in the run's folder from its newest good checkpoint, or from the one of ``step``.

        The checkpoint may come from any number of ranks and any layout, the result has the same bits as if the run had
        not been interrupted. Without any checkpoint the run starts at the beginning. Errors of :meth:`fit` are raised,
        too.

        Raises
        ------
        ConfigError
            If the checkpoint is of a run with other settings or other data; the message names what differs.
        CheckpointError
            If a checkpoint exists that cannot be used; nothing was changed.
        """
        return self._result_of(self.visit(resume=True, resume_from=step))

    def visit(self, *, resume: bool = False, resume_from: int | None = None) -> TrainingResult | Preempted:
        """Train as :meth:`fit` or :meth:`resume`, but return a :class:`Preempted` instead of raising it. Collective."""
        if self._closed:
            raise StateError("this trainer is closed: make a new one")
        if self._loop is not None and self._loop.running:
            raise StateError("this trainer is training already: a callback cannot start another run of it")
        check_call(self._setup.comm, "Trainer.resume" if resume else "Trainer.fit")
        if resume_from is not None:
            require("Trainer.resume: step", resume_from, whole(0))
        if self._given is not None:
            self._shard_again(self._given, resume_from, resumes=resume or resume_from is not None)
        arguments: dict[str, Any] = {"resume": resume, "resume_from": resume_from, "attach": self._attach}
        if self._context is not None:
            return run_visit(self._setup, self._context, **arguments)
        signals = StopSignals(() if self._setup.model.config.is_guest else SIGNALS)
        with plain_settings():
            outcome = run_visit(self._setup, JobContext(signals, environment=os.environ), **arguments)
        return outcome if isinstance(outcome, Preempted) else self._unless_signalled(outcome, signals)

    def _shard_again(self, given: TrainerArguments, step: int | None, *, resumes: bool) -> None:
        """Shard the model anew if it was trained already, or if a checkpoint to resume from has other tiles."""
        setup, config = self._setup, self._config
        if resumes and config.tiles is None:
            checkpoints = RunFolder(setup.checkpoints.folder).checkpoints
            tiles = tiles_of_checkpoint(checkpoints, setup.comm, step)
            if tiles not in (None, setup.model.engine.partitioned.parallel_layout.asked_tiles):
                config = config.with_tiles(tiles)
        if self._loop is not None or config.tiles != setup.model.config.tiles:
            self._setup = given.sharded_again(setup, config)

    def _unless_signalled(self, result: TrainingResult, signals: StopSignals) -> TrainingResult | Preempted:
        """Return the result of a complete run, but a :class:`Preempted` if a signal came too late to stop it.

        It has asked the program to end, which would go on as if there had been none. Collective; the signals are not
        caught any more.
        """
        reasons = self._setup.comm.allgather_object(signals.reason(self.rank), "late signals")
        reason = next(filter(None, reasons), "")
        if not reason:
            return result
        way_on = self._setup.record.wording.resume
        return Preempted(
            f"stopped by {reason}: the run is complete after step {result.steps}, {way_on} returns its result"
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
        """Ask, in a method of a callback on any rank, that all ranks end the run after this step. Not collective.

        The run ends as if this were its last step: with a checkpoint and a result, whose ``stopped`` is the reason.
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
        """The number of this rank."""
        return int(self._setup.comm.rank)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self._setup.comm.size)

    @property
    def step(self) -> int:
        """The number of steps done, those before a resume included."""
        return 0 if self._loop is None else self._loop.step

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the last step by name, as its line of ``metrics.jsonl`` has them.

        Bytes sent and memory are those of this rank, the rest is equal on all ranks. Validation figures are among them
        only after the validation.
        """
        return {} if self._loop is None else dict(self._loop.figures)

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return RunFolder(self._setup.checkpoints.folder).root

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Close what this trainer has made: the sharded model, and the configuration. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._given is not None:
            self._setup.model.close()
        if self._own_config is not None:
            self._own_config.close()

    def __enter__(self) -> Self:
        """Return this trainer. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the trainer; after an exception that other ranks may not have raised, leave that to a later call."""
        if error is None or isinstance(error, Preempted):
            self.close()
            return
        self._closed = True
        if self._given is not None:
            self._setup.model.__exit__(kind, error, trace)
        if self._own_config is not None:
            self._own_config.__exit__(kind, error, trace)
