"""Hold what one training run is made of: model, data, settings, and what the run records about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from mpizero.data import Source
from mpizero.layout import AXES, Grains
from mpizero.sharding.config import PLACEMENTS
from mpizero.train.callbacks.user_metrics import Metric
from mpizero.train.config.loop_section import LoopSection
from mpizero.train.config.sections import CheckpointSection
from mpizero.train.run.improvement import Improvement


@dataclass(frozen=True)
class Wording:
    """Hold the words by which error messages name what a user can do: those of the command line, or of Python.

    Attributes
    ----------
    resume, resume_from, afresh : str
        How to resume, to resume from a step (with "{}" for the step), and to start at the beginning.
    folder : str
        Name of the setting with the run's folder.
    override : str
        How to go on with another value of a setting, with "{}" for its name; "" if that is not possible.
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
    """Hold what a run records about itself in its files.

    Attributes
    ----------
    settings : dict of dict
        JSON values by section and name, saved in every checkpoint. A run resumes only with equal settings, except for
        those that do not change the result (:func:`mpizero.train.config.sections.difference`).
    about : dict
        JSON values that are saved beside the samples of skipped steps.
    fingerprint : str
        Hash of the training data, by which a resumed run checks that it has the same data.
    validation_fingerprint : str
        The same of the validation samples; "" if there are none.
    contents : dict
        What identifies the contents of both (:func:`~mpizero.train.config.data_identity.shared_contents`).
    code : mapping of str to str
        Hashes of the files of the user's functions that made model and data, by file name; a resume tells of changes.
    task : str
        "language", "classification", "regression", or "" if it is unknown.
    units_per_sample : int
        Number of tokens in a sample for a language model, else 1.
    description : str
        One line about model, layout and data; "" makes one.
    wording : Wording
        How messages name what the user can do.
    overridden : tuple of str
        Settings that may differ from those of the saved run when it resumes.
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
    """Hold what a run trains, and how.

    Attributes
    ----------
    model : ShardedModelBase
        The sharded model with its optimizer.
    source, validation : Source
        The samples for training, and the samples for validation (None if there are none).
    loop : LoopSection
        Steps, samples of a step, validation, time limits.
    checkpoints : CheckpointSection
        Where and how often checkpoints are saved, and which are kept.
    record : RunRecord
        What the run records about itself.
    metrics : dict
        The user's validation metrics by name.
    callbacks : sequence
        Objects whose methods the run calls.
    shows_progress : bool
        Whether rank 0 shows progress and messages.
    begin : callable or None
        Called on all ranks before the first step of a run that does not resume, to load start values. It returns a
        message to show.
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
        return self.model.config.communicator

    @property
    def takes_all(self) -> bool:
        """True if every step takes all samples, because the optimizer is a method of whole vectors."""
        return self.model.engine.updater.method is not None

    @property
    def strategy(self) -> str:
        """The name of the model's ZeRO strategy, such as "zero2"."""
        saved_as = self.model.engine.placement.saved_as
        return next(name for name, row in PLACEMENTS.items() if row.saved_as == saved_as)

    def layout(self) -> dict[str, Any]:
        """Return the sizes of the axes of parallelism by name, and the name of the schedule. Not collective."""
        axes, parallel_layout = self.model.engine.grid.axes, self.model.parallel_layout
        schedule = parallel_layout.schedule if parallel_layout is not None and axes.pipeline > 1 else None
        return {**{axis: getattr(axes, axis) for axis in AXES}, "schedule": schedule}

    def improvement(self) -> Improvement | None:
        """Return a new object that follows the best value, if checkpoints or the end of the run depend on it."""
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
        exactness = model.engine.told_exactness
        split = [f"{axis} {size}" for axis, size in self.layout().items() if axis in AXES and size > 1]
        where = " x ".join(split) if len(split) > 1 else f"{ranks} rank{'s' if ranks > 1 else ''}"
        held_back = f" and {len(self.validation):,} validation" if self.validation is not None else ""
        grains = Grains(batch, model.grain_size(batch)).described(model.config.accumulate)
        known = f"{len(self.source):,} training" if isinstance(self.source, Source) else "online training"
        return (
            f"{type(model.wrapped_model).__name__} with {model.parameter_count:,} parameters, {self.strategy} on "
            f"{where}{exactness}; {known}{held_back} samples; {batch} a step in {grains}"
        )


def validation_count(loop: LoopSection, validation: Sized) -> int:
    """Return the number of samples of a validation: ``validate_samples``, but at most all; 0 takes all."""
    return min(len(validation), loop.validate_samples or len(validation))
