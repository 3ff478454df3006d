"""Define the inputs and the result of a training run.

:class:`RunSetup` has model, data and settings of a run; :class:`RunRecord` has the data by which a checkpoint
identifies the run, and :class:`Wording` the names of options or methods for error messages. :class:`TrainingResult` is
the result. :class:`Improvement` follows a validation metric: which step is the best so far, and whether the run still
improves. :class:`Speed` and the functions after it compute and format metrics of a step.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from mpizero.data import Source
from mpizero.errors import ConfigError
from mpizero.layout import AXES, Grains
from mpizero.sharding.config import PLACEMENTS
from mpizero.train.callbacks import Metric
from mpizero.train.config.schema import CheckpointSection, LoopSection


@dataclass(frozen=True)
class Wording:
    """Hold texts for error messages that tell the user what to do, for the command line or for :class:`Trainer`.

    Attributes
    ----------
    resume, resume_from, afresh : str
        How to resume, to resume from a step ("{}" stands for the step), and to start a new run.
    folder : str
        Name of the setting with the run's folder.
    override : str
        How to change a setting at a resume ("{}" stands for its name); "" if that is not possible.
    """

    resume: str
    resume_from: str
    afresh: str
    folder: str
    override: str = ""


COMMAND = Wording("--resume", "--resume-from {}", "without --resume", "checkpoint.folder", "--override {}=...")
LIBRARY = Wording("trainer.resume()", "trainer.resume({})", "with trainer.fit()", "run")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Hold the description of a run that is saved in its checkpoints and events.

    Attributes
    ----------
    settings : dict of dict
        JSON values by section and name, saved in every checkpoint. A run resumes only with equal settings, except for
        those that do not change the result (:func:`mpizero.train.config.schema.changes`).
    about : dict
        JSON values that are saved with the samples of skipped steps.
    fingerprint : str
        Hash of the training data, by which a resumed run checks that it has the same data.
    validation_fingerprint : str
        Hash of the validation samples; "" if there are none.
    contents : dict
        Hashes and sizes of both data sets, from :func:`~mpizero.train.data_identity.shared_contents`.
    code : mapping of str to str
        SHA-256 of the files of the user's functions that made model and data, by file name; a resumed run reports
        which files have changed.
    task : str
        "language", "classification", "regression", or "" if the model does not declare one.
    units_per_sample : int
        Number of tokens in a sample for a language model, else 1.
    description : str
        One line about model, layout and data; for "", :meth:`RunSetup.described` makes the line.
    wording : Wording
        Texts for messages to the user.
    overridden : tuple of str
        Keys of settings that may differ from those of the saved run at a resume.
    """

    settings: dict[str, dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    fingerprint: str
    validation_fingerprint: str = ""
    contents: dict[str, Any] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    task: str = ""
    units_per_sample: int = 1
    description: str = ""
    wording: Wording = LIBRARY
    overridden: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """Hold model, data, settings and callbacks of a run.

    Attributes
    ----------
    model : Model
        The sharded model with its optimizer.
    source, validation : Source
        The samples for training, and the samples for validation (None if there are none).
    loop : LoopSection
        Number of steps, global batch, validation, time limits.
    checkpoints : CheckpointSection
        Where and how often checkpoints are saved, and which are kept.
    record : RunRecord
        The description of the run for its checkpoints and events.
    metrics : dict
        The user's validation metrics by name.
    callbacks : sequence
        Objects whose methods the run calls.
    shows_progress : bool
        Whether rank 0 shows progress and messages.
    begin : callable or None
        Function that is called on all ranks before the first step of a run that does not resume, to load start values,
        and that returns a message for the user.
    """

    model: Any
    source: Any
    validation: Any
    loop: LoopSection
    checkpoints: CheckpointSection
    record: RunRecord
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    callbacks: Sequence[Any] = ()
    shows_progress: bool = True
    begin: Callable[[], str] | None = None

    @property
    def comm(self) -> Any:
        """The ranks that train."""
        return self.model.mesh.communicator

    @property
    def takes_all(self) -> bool:
        """True if every step takes all samples, because the optimizer is a full-batch method."""
        return self.model._engine.updater.method is not None

    @property
    def strategy(self) -> str:
        """The name of the model's ZeRO strategy, such as "zero2"."""
        saved_as = self.model._engine.placement.saved_as
        return next(name for name, candidate in PLACEMENTS.items() if candidate.saved_as == saved_as)

    def layout(self) -> dict[str, Any]:
        """Return the sizes of the axes of parallelism by name, and the name of the schedule. Not collective."""
        axes, parallel_layout = self.model._engine.grid.axes, self.model._parallel_layout
        schedule = parallel_layout.schedule if parallel_layout is not None and axes.pipeline > 1 else None
        domain = {"context": 1, "domain": list(self.model.mesh.domain)} if self.model.mesh.domain else {}
        return {**axes.sizes, **domain, "schedule": schedule}

    def improvement(self) -> Improvement | None:
        """Return a new :class:`Improvement` if ``checkpoint.best`` or ``train.patience`` is set, else None."""
        best, patience = self.checkpoints.best, self.loop.patience
        if best is None and patience is None:
            return None
        count = 0 if self.validation is None else validation_count(self.loop, self.validation)
        measured = f"{count} samples{' with the average of the parameters' if self.loop.validate_ema else ''}"
        return Improvement(best or "validation_loss", patience, self.loop.min_delta, measured)

    def described(self) -> str:
        """Return one line about the run: model, layout, numbers of samples, grains. Not collective."""
        if self.record.description:
            return self.record.description
        model, batch, ranks = self.model, self.loop.global_batch, self.comm.size
        exactness = model._engine.exactness_suffix
        split = [f"{axis} {size}" for axis, size in self.layout().items() if axis in AXES and size > 1]
        if cut := model.mesh.domain:
            split.append(f"domain {' x '.join(map(str, cut))}")
        where = " x ".join(split) if len(split) > 1 or cut else f"{ranks} rank{'s' if ranks > 1 else ''}"
        validation = f" and {len(self.validation):,} validation" if self.validation is not None else ""
        grains = Grains(batch, model.grain_size(batch)).described(model.config.accumulate)
        known = f"{len(self.source):,} training" if isinstance(self.source, Source) else "online training"
        return (
            f"{type(model.wrapped_model).__name__} with {model.parameter_count:,} parameters, {self.strategy} on "
            f"{where}{exactness}; {known}{validation} samples; {batch} a step in {grains}"
        )


def validation_count(loop: LoopSection, validation: Sized) -> int:
    """Return the number of samples of a validation: ``validate_samples``, but at most all; 0 means all."""
    return min(len(validation), loop.validate_samples or len(validation))


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Hold the result of a run that has ended; equal on all ranks.

    Attributes
    ----------
    steps : int
        Number of steps that the run has done, including those before a resume.
    loss : float or None
        Loss of the last step, or of the last iterate of a full-batch method; None if it was not finite.
    parameters_sha256 : str
        SHA-256 of the bytes of all parameters, in declared order.
    bits : str
        "every CPU" if the type of CPU does not matter to the bits, else "this CPU, because ", followed by the other
        libraries or functions that compute results: see :class:`ModelMetadata`.
    ranks : int
        Number of ranks.
    strategy : str
        Name of the ZeRO strategy, such as "zero2".
    layout : dict
        Sizes of the axes "pipeline", "tensor", "data" and "context", and the "schedule" (None without a pipeline). If
        the space of fields is cut, also "domain": into how many parts along each axis of space.
    unit : str
        "tokens" or "samples".
    speed : float or None
        Median of tokens or samples per second over undisturbed steps (see :class:`Speed`); None if there was no step.
    parameter_count : int
        Number of parameter elements of the whole model.
    losses : array of float
        Losses of the steps of this call of ``fit`` or ``resume``, up to the step ``steps``.
    validations : tuple of dict
        Metrics of each validation of this call: "step", "validation_loss", "perplexity" or "accuracy", and the user's
        own metrics.
    overrides : tuple of dict
        Settings that were changed when the run was resumed, each with "step", "key", "was" and "now".
    stopped : str
        The reason for which the run has ended before its last step: no improvement, a callback, or "converged: " with
        the message of a full-batch method; "" if it has done all steps.
    best : dict or None
        The best value of the metric of ``best`` or ``patience``: "metric", "value", "step", and "checkpoint" (path of
        its checkpoint, or None). None if neither is set, or no value was finite.
    method : dict or None
        The outcome of a full-batch method: "converged", "message", "iterations", and "largest_gradient", the largest
        magnitude in the gradient at the last iterate. None with any other optimizer.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x = np.linspace(0.0, 1.0, 8).reshape(8, 1)
    >>> source = mz.data.ArraySource(x, 2 * x)
    >>> line = mz.nn.MLP(1, [], 1, task="regression", dtype="float64")
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     arguments = {"optimizer": mz.Adam(lr=0.1), "steps": 2, "global_batch": 4, "progress": False}
    ...     with mz.Trainer(line, source, config, **arguments, validation=0.25, validate_every=2) as trainer:
    ...         result = trainer.fit()
    >>> result.ranks, result.strategy, result.unit, len(result.parameters_sha256)
    (1, 'zero2', 'samples', 64)
    >>> sorted(result.history[-1])
    ['loss', 'step', 'validation_loss']
    """

    steps: int
    loss: float | None
    parameters_sha256: str
    bits: str
    ranks: int
    strategy: str
    layout: dict[str, Any]
    unit: str
    speed: float | None
    parameter_count: int
    losses: array[float] = field(default_factory=lambda: array("d"), repr=False)
    validations: Sequence[dict[str, Any]] = ()
    overrides: Sequence[dict[str, Any]] = ()
    stopped: str = ""
    best: dict[str, Any] | None = None
    method: dict[str, Any] | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dictionary for each step of this call: "step", "loss", and the metrics of a validation after it."""
        validations = {one["step"]: one for one in self.validations}
        first = self.steps - len(self.losses) + 1
        return [
            {"step": step, "loss": finite(loss), **validations.get(step, {})}
            for step, loss in enumerate(self.losses, first)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, which ``mpizero train`` prints and the file ``run_complete`` contains."""
        values: dict[str, Any] = {
            "steps": self.steps,
            "loss": self.loss,
            "parameters_sha256": self.parameters_sha256,
            "bits": self.bits,
            "ranks": self.ranks,
            "strategy": self.strategy,
            "tokens_per_second": self.speed if self.unit == "tokens" else None,
            "parameter_count": self.parameter_count,
            "layout": self.layout,
        }
        if self.unit == "samples":
            values["samples_per_second"] = self.speed
        special = {"overrides": list(self.overrides), "stopped": self.stopped, "best": self.best, "method": self.method}
        return values | {name: value for name, value in special.items() if value}


#: Metrics that a validation may have without metrics of the user.
VALIDATION_METRICS = ("validation_loss", "perplexity", "accuracy")


@dataclass
class Improvement:
    """Follow one validation metric over a run: its best value so far, and whether it still improves.

    Every rank gets the same values of the metric, so all ranks come to the same decision.

    Parameters
    ----------
    metric : str
        Name of the metric. Small values are good; with "-" before the name large values are good.
    patience : int or None
        Number of validations in a row without an improvement after which the run ends; None never ends the run.
    min_delta : float
        For ``patience``, a value is an improvement if it is better than the last improvement by more than
        ``min_delta``.
    measured : str
        Description of the samples and parameters with which the metric is computed. A resumed run with another
        description does not compare its values with the best value of the checkpoint.

    Attributes
    ----------
    value, step : float and int, or None
        The best value so far, and the step after which it was measured.
    reference : float or None
        The value of the last improvement.
    stalled : int
        Number of validations since the last improvement.
    """

    metric: str = "validation_loss"
    patience: int | None = None
    min_delta: float = 0.0
    measured: str = ""
    value: float | None = None
    step: int | None = None
    reference: float | None = None
    stalled: int = 0

    @property
    def name(self) -> str:
        """Name of the metric without the "-" before it."""
        return self.metric.removeprefix("-")

    @property
    def exhausted(self) -> bool:
        """True if the last ``patience`` validations have brought no improvement."""
        return self.patience is not None and self.stalled >= self.patience

    @property
    def reason(self) -> str:
        """Message that the metric has not improved, for a run that ends because of :attr:`exhausted`."""
        best = "no value was finite" if self.value is None else f"best {self.value:.6g} after step {self.step}"
        return f"no improvement of {self.name} in {self.stalled} validations ({best})"

    def see(self, step: int, metrics: Mapping[str, float | None]) -> bool:
        """Record the metrics of a validation after ``step``; return True if the followed metric is the best so far.

        Not collective. A metric that is None, because it was not finite, is no improvement.

        Raises
        ------
        ConfigError
            If ``metrics`` does not have the metric that this object follows.
        """
        if self.name not in metrics:
            raise ConfigError(
                f"best={self.metric!r}: this model has no such metric; its validations have {', '.join(metrics)}"
            )
        value = metrics[self.name]
        better = value is not None and (self.value is None or self._score(value) < self._score(self.value))
        if value is not None and (
            self.reference is None or self._score(value) < self._score(self.reference) - self.min_delta
        ):
            self.reference, self.stalled = value, 0
        else:
            self.stalled += 1
        if better:
            self.value, self.step = value, step
        return better

    def _score(self, value: float) -> float:
        return -value if self.metric.startswith("-") else value

    def state(self) -> dict[str, Any]:
        """Return metric, best value, step and so on as a dict of JSON values, which a checkpoint stores."""
        names = ("metric", "measured", "value", "step", "reference", "stalled")
        return {name: getattr(self, name) for name in names}

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Set the state to a result of :meth:`state`; return "", or a message if that result is ignored.

        ``saved`` is ignored if it is of another metric, or was measured on other samples or parameters (``measured``).
        """
        if not saved:
            return ""
        if saved.get("metric") != self.metric:
            return f"the best value so far was of {saved.get('metric')}: {self.metric} begins anew"
        if (before := saved.get("measured", self.measured)) != self.measured:  # early versions did not save "measured"
            return f"the best {self.name} so far was measured on {before}: it begins anew on {self.measured}"
        self.value, self.step, self.reference = (saved.get(name) for name in ("value", "step", "reference"))
        self.stalled = int(saved.get("stalled", 0))
        return ""


#: Number of first steps that are left out of the median speed: they compile kernels and touch memory first.
WARM_UP_STEPS = 3


@dataclass
class Speed:
    """Measure the speed of every step in tokens or samples per second, and the median over undisturbed steps.

    The first steps of a session, and a step after a checkpoint or a validation, count as disturbed.

    Attributes
    ----------
    unit : str
        "tokens" or "samples".
    """

    unit: str
    _rates: list[float] = field(default_factory=list)
    _all: list[float] = field(default_factory=list)
    _disturbed: bool = False

    def step(self, units: float, seconds: float) -> float:
        """Record that a step of ``units`` tokens or samples took ``seconds``, and return its units per second."""
        rate = units / seconds if seconds > 0 else 0.0
        self._all.append(rate)
        if len(self._all) > WARM_UP_STEPS and not self._disturbed:
            self._rates.append(rate)
        self._disturbed = False
        return rate

    def disturb(self) -> None:
        """Leave the next step out of the median; called after a checkpoint or a validation, which slow it down."""
        self._disturbed = True

    def median(self) -> float | None:
        """Return the median speed of undisturbed steps, or of all steps if none is undisturbed; None without steps."""
        rates = self._rates or self._all
        return statistics.median(rates) if rates else None


def finite(value: float | None) -> float | None:
    """Return ``value``, but None for NaN and infinities, which JSON cannot express."""
    return value if value is None or math.isfinite(value) else None


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if exp(loss) exceeds the range of a float."""
    return math.exp(loss) if loss < 709 else math.inf


def short(value: float | None) -> str:
    """Format a number with four significant digits; return "-" for None."""
    return "-" if value is None else f"{value:.4g}"
