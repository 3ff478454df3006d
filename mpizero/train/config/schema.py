"""Define the configuration of a run: one frozen dataclass per table of the TOML file, checked when it is made.

:class:`RunConfig` combines the sections. This module defines :class:`TrainSection`, :class:`CheckpointSection`, and
:class:`LoopSection`, the part of TrainSection that :class:`mpizero.Trainer` has, too; the other sections are in
``train/config/sections.py`` and ``train/config/optimizers.py``. The functions below the classes compare a run's
configuration with that of its checkpoint, and decide which settings a resumed run may change, from the argument
``resume`` in the declaration of each setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Self

from mpizero._util.checks import flag, number, whole
from mpizero._util.names import nearest
from mpizero._util.settings import ConfigSection, Resume, duration, like, one_of, optional, setting, shown, text
from mpizero.checkpoint.format import ALIGNMENT, ALIGNMENT_LIMIT
from mpizero.errors import ConfigError
from mpizero.sharding.config import ComputeSettings, check_bucket
from mpizero.sharding.mesh import Mesh
from mpizero.train.config.optimizers import (
    OPTIMIZERS,
    OptimizerSection,
    RateSection,
    VectorMethodSection,
    optimizer_section,
)
from mpizero.train.config.sections import (
    MODELS,
    DataSection,
    MadeDataSection,
    MadeModelSection,
    ModelSection,
    ParallelSection,
)

#: The value of ``global_batch`` that stands for all training samples, until their number is known.
ALL_SAMPLES = 0


def _batch(value: Any) -> int:
    return ALL_SAMPLES if value == ALL_SAMPLES and type(value) is int else whole(1)(value)


@dataclass(frozen=True, kw_only=True)
class LoopSection(ConfigSection):
    """Hold the settings of the training loop: steps, global batch, validation, early stops and time limits."""

    steps: int = setting(200, whole(1), resume="free")
    global_batch: int = setting(64, _batch, resume="never")
    seed: int = setting(0, whole(0, 2**63 - 1))
    validate_every: int = setting(50, whole(0), resume="free")
    validate_samples: int = setting(512, whole(0), resume="free")
    validate_ema: bool = setting(False, flag, resume="free")
    patience: int | None = setting(None, optional(whole(1)), resume="free")
    min_delta: float = setting(0.0, number(), resume="free")
    time_limit: float | None = setting(None, optional(duration), resume="free")
    time_reserve: float | None = setting(None, optional(duration), resume="free")
    prefetch: int = setting(0, whole(0), resume="free")

    def check_combination(self) -> None:
        """Raise SettingError for contradictions, such as ``patience`` without validations."""
        if self.patience is not None and not self.validate_every:
            raise self.reject("patience", "counts validations: set train.validate_every > 0 with it")
        if self.min_delta and self.patience is None:
            raise self.reject("min_delta", "belongs to train.patience, which is not given")
        if self.time_limit is not None and self.time_reserve is not None and self.time_reserve >= self.time_limit:
            raise self.reject("time_reserve", f"must be less than train.time_limit = {self.time_limit}")

    def of_all(self, count: int, method: str) -> Self:
        """Return this section with a global batch of all ``count`` training samples, which ``method`` needs.

        Raises
        ------
        SettingError
            If ``global_batch`` is set to a number other than ``count``, or ``prefetch`` is set.
        """
        if self.global_batch not in (ALL_SAMPLES, count):
            raise self.reject(
                "global_batch",
                f"must be left out with {method}, or be the number of training samples, which is {count}: each of its "
                "steps evaluates all of them",
            )
        if self.prefetch:
            raise self.reject("prefetch", f"must be left out with {method}: the samples of all its steps are read once")
        return replace(self, global_batch=count)


#: Key of the setting that says at which step the learning rate schedule ends.
LENGTH = "optimizer.schedule_steps"


@dataclass(frozen=True, kw_only=True)
class TrainSection(ComputeSettings, LoopSection):
    """Hold the section ``[train]``: settings of the training loop, and of :class:`~mpizero.Config` for computation."""

    check_every: int = like(ComputeSettings, "check_every", default=50)
    timeout: float = like(Mesh, "timeout")

    def check_combination(self) -> None:
        """Raise SettingError for contradictions, such as grains larger than the global batch."""
        super().check_combination()
        if self.global_batch != ALL_SAMPLES:
            self._check_grains()
        if self.validate_ema and self.ema is None:
            raise self.reject("validate_ema", "needs train.ema, the average of the parameters, such as 0.999")

    def _check_grains(self) -> None:
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise self.reject(
                "micro_batch", f"must be at most train.global_batch = {self.global_batch}, of which it is a part"
            )
        if (grain := (self.micro_batch or 1) * self.accumulate) > self.global_batch:
            raise self.reject(
                "accumulate", f"makes grains of {grain} samples, more than train.global_batch = {self.global_batch}"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(ConfigSection):
    """Hold the section ``[checkpoint]``: where, when and how checkpoints are saved; ``every = 0``: only at the end."""

    folder: str = setting("run/checkpoints", text, resume="free")
    every: int = setting(100, whole(0), resume="free")
    keep: int = setting(2, whole(1), resume="free")
    keep_every: int = setting(0, whole(0), resume="free")
    best: str | None = setting(None, optional(text), resume="free")
    asynchronous: bool = setting(False, flag, resume="free")
    backend: str = setting("direct", one_of("direct", "mpio"), resume="free")
    alignment: int = setting(ALIGNMENT, whole(ALIGNMENT, ALIGNMENT_LIMIT), resume="free")

    def check_combination(self) -> None:
        """Raise SettingError if ``alignment`` is not a power of two, or for asynchronous saves with parallel HDF5."""
        if self.alignment & (self.alignment - 1):
            raise self.reject("alignment", f"must be a power of two from {ALIGNMENT} to {ALIGNMENT_LIMIT}")
        if self.asynchronous and self.backend != "direct":
            raise self.reject(
                "asynchronous",
                'needs checkpoint.backend = "direct": parallel HDF5 calls MPI, which nothing beside training may',
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Hold a whole configuration; the constructor checks that its sections do not contradict each other.

    ``folder``, which is not a setting, is the folder of the configuration file. Paths in ``model.make`` and
    ``data.make`` are relative to this folder.
    """

    model: ModelSection
    data: DataSection | MadeDataSection
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = optimizer_section("adamw")()
    checkpoint: CheckpointSection = CheckpointSection()
    folder: str = "."

    def __post_init__(self) -> None:
        """Raise ConfigError if sections contradict each other."""
        self._check_optimizer()
        dtype = getattr(self.model, "dtype", "float32")  # a model that a function makes is checked when it is made
        for name in ("mixed_precision", "wire"):
            if getattr(self.train, name) is not None and dtype != "float32":
                raise self.train.reject(name, f"needs model.dtype = float32, it is {dtype}")
        if self.train.wire is not None and self.parallel.sample_parts > 1:
            key = "domain" if self.parallel.domain else "context"
            parts = shown(getattr(self.parallel, key))
            raise self.train.reject("wire", f"cannot be used with parallel.{key} = {parts}")
        self.model.check_data(self.data)
        check_bucket(self.parallel, self.train.gradient_compression, self.train.named("gradient_compression"))
        if self.checkpoint.best is not None and not self.train.validate_every:
            raise self.checkpoint.reject("best", "is chosen by validations: set train.validate_every > 0 with it")
        self.model.check_layout(self.parallel)

    def _check_optimizer(self) -> None:
        optimizer, train = self.optimizer, self.train
        if isinstance(optimizer, VectorMethodSection):
            optimizer.check_run(train, self.model)
            return
        if train.global_batch == ALL_SAMPLES:
            raise train.reject("global_batch", "must be a whole number >= 1")
        assert isinstance(optimizer, RateSection)
        length, explicit = optimizer.schedule_steps or train.steps, optimizer.schedule_steps is not None
        if optimizer.warmup > length:
            whose = "optimizer.schedule_steps" if explicit else "train.steps"
            raise optimizer.reject("warmup", f"must be at most {whose} = {length}")

    def with_tiles(self, tiles: dict[str, int] | None) -> RunConfig:
        """Return this configuration with ``parallel.tiles``; unchanged if ``tiles`` is None or equals group sizes."""
        if tiles is None or all(getattr(self.parallel, axis) == count for axis, count in tiles.items()):
            return self
        return replace(self, parallel=replace(self.parallel, tiles=tiles))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all settings, including defaults, as JSON values by section and key."""
        sections = [getattr(self, item.name) for item in fields(self) if item.name != "folder"]
        return {section.title(): section.to_dict() for section in sections}


Tables = Mapping[str, Mapping[str, Any]]


def section_kind(title: str, tables: Tables) -> type[ConfigSection]:
    """Return the class of the section ``title``; keys such as ``model.name`` and ``data.make`` select among several.

    Not collective. For an unknown section, the class has no settings.
    """
    table = tables.get(title, {})
    if title == "optimizer":
        name = table.get("name", "adamw")
        return optimizer_section(name) if name in OPTIMIZERS else OptimizerSection
    if title == "model":
        return MadeModelSection if "make" in table else MODELS.get(table.get("name", ""), ModelSection)
    if title == "data":
        return MadeDataSection if "make" in table else DataSection
    plain: dict[str, type[ConfigSection]]
    plain = {"train": TrainSection, "parallel": ParallelSection, "checkpoint": CheckpointSection}
    return plain.get(title, ConfigSection)


def defaults_of(kind: type[ConfigSection]) -> dict[str, Any]:
    """Return the default of each setting that has one, by the setting's name. Not collective."""
    return {item.name: item.default for item in fields(kind) if item.default is not MISSING}


def section_kinds() -> list[type[ConfigSection]]:
    """Return the classes of all sections that have a fixed set of keys. Not collective."""
    optimizers = map(optimizer_section, OPTIMIZERS)
    return [TrainSection, ParallelSection, CheckpointSection, DataSection, *optimizers, *MODELS.values()]


def _declaration(key: str, config: Tables) -> Mapping[str, Any]:
    """Return the metadata of the setting ``key`` in the sections of a configuration, such as its check."""
    title, _, name = key.partition(".")
    for item in fields(section_kind(title, config)):
        if item.name == name:
            return item.metadata
    return {"resume": "never" if title == "data" else "override"}  # the argument of a function of the user's


def _resume_rule(key: str, config: Tables) -> Resume:
    rule: Resume = _declaration(key, config).get("resume", "override")
    return rule


def mathematics(config: Tables) -> dict[str, Any]:
    """Return the settings that determine the result of training, by keys such as ``train.seed``.

    ``config`` is the result of :meth:`RunConfig.to_dict`. A setting that ``config`` lacks, because the run was saved
    before there was the setting, has its default. The settings that are not returned may differ between a saved run and
    the run that resumes it, because they do not change the mathematics, at most the rounding of sums (in tensor and
    context groups, and on GPUs). Training data are compared by content, not by path.
    """
    flat = {
        f"{section}.{key}": value
        for section, keys in config.items()
        for key, value in (defaults_of(section_kind(section, config)) | dict(keys)).items()
    }
    if flat.get("optimizer.schedule") in ("linear", "cosine"):
        flat[LENGTH] = flat.get(LENGTH) or flat.get("train.steps")
    else:
        flat.pop(LENGTH, None)
    return {
        key: None if value == _declaration(key, config).get("off") else value
        for key, value in sorted(flat.items())
        if _resume_rule(key, config) != "free"
    }


#: Settings that determine which other settings a section has.
_NAMES = ("model.name", "model.make", "optimizer.name")


def changes(saved: Tables, wanted: Tables) -> dict[str, tuple[Any, Any]]:
    """Return, by key, the two values of each setting in which two configurations differ and that changes results.

    Both arguments are results of :meth:`RunConfig.to_dict`. A setting that a configuration lacks has the value None.
    Names of models and optimizers come first, because they determine which other settings exist.
    """
    before, now = mathematics(saved), mathematics(wanted)
    keys = sorted(before.keys() | now.keys(), key=lambda key: (key not in _NAMES, key))
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def described_change(key: str, values: tuple[Any, Any]) -> str:
    """Describe, for an error message, the setting ``key`` with its two ``values`` in the result of :func:`changes`."""
    hint = " (train.steps, where it is not given)" if key == LENGTH else ""
    return f"{key} was {shown(values[0])} in the saved run and is {shown(values[1])} now{hint}"


def overridable(key: str, config: Tables) -> bool:
    """Return whether ``--override`` may change the setting ``key`` of a resumed run. Not collective."""
    return _resume_rule(key, config) != "never"


def check_overridden(keys: Sequence[str], config: Tables) -> tuple[str, ...]:
    """Check the keys of ``--override``, and return the keys of all settings that the resumed run may change.

    Not collective. ``config`` is the result of :meth:`RunConfig.to_dict`. If a key is one of the learning rate
    schedule, the step at which the schedule ends may change, too.

    Raises
    ------
    ConfigError
        If a key is unknown, or its setting may change without ``--override``, or must not change in a run.
    """
    known = [f"{section}.{name}" for section, values in config.items() for name in values]
    for key in keys:
        if key not in known:
            raise ConfigError(f"--override {key}: there is no such setting{nearest(key, known)}")
        if not overridable(key, config):
            raise ConfigError(
                f"--override {key}: cannot change in a run, because what is saved depends on it; start another run, "
                "from this one's parameters if you like: model.start"
            )
        if _resume_rule(key, config) == "free":
            raise ConfigError(f"--override {key}: a resumed run takes it without this option, from its file or --set")
    ends = [LENGTH] if any(key.startswith("optimizer.schedule") for key in keys) else []
    return (*keys, *ends)
