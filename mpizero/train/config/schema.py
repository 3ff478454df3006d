"""Define the configuration of a run: one frozen dataclass per table of the TOML file, checked when it is made.

:class:`RunConfig` combines the sections. Those of the training itself are defined here: :class:`TrainSection`, whose
:class:`LoopSection` :class:`mpizero.Trainer` shares, the optimizers' by name (``OPTIMIZERS``), and
:class:`CheckpointSection`; the others are in ``train/config/sections.py``. The functions below them compare
a run's configuration with that of its checkpoint, and decide which settings a resumed run may change, if it is asked to
by name (``--override``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from mpizero._util.checks import fraction, number, positive, whole
from mpizero._util.names import nearest
from mpizero.checkpoint.format import ALIGNMENT, ALIGNMENT_LIMIT
from mpizero.errors import ConfigError
from mpizero.train.config.checks import ConfigSection, choice, duration, flag, many, optional, setting, shown, text
from mpizero.train.config.sections import (
    KINDS,
    VECTOR_METHODS,
    VECTOR_SECTIONS,
    DataSection,
    MadeDataSection,
    ModelSection,
    ParallelSection,
    VectorMethodSection,
    compression,
)

#: The value of ``global_batch`` that stands for all training samples, until their number is known.
ALL_SAMPLES = 0


def _batch(value: Any) -> int:
    return ALL_SAMPLES if value == ALL_SAMPLES and type(value) is int else whole(1)(value)


@dataclass(frozen=True, kw_only=True)
class LoopSection(ConfigSection):
    """Hold the settings of the training loop: its steps, its samples, when it validates and when it ends."""

    steps: int = setting(200, whole(1))
    global_batch: int = setting(64, _batch)
    seed: int = setting(0, whole(0, 2**63 - 1))
    validate_every: int = setting(50, whole(0))
    validate_samples: int = setting(512, whole(0))
    validate_ema: bool = setting(False, flag)
    patience: int | None = setting(None, optional(whole(1)))
    min_delta: float = setting(0.0, number())
    time_limit: float | None = setting(None, optional(duration))
    time_reserve: float | None = setting(None, optional(duration))
    prefetch: int = setting(0, whole(0))

    def check_combination(self) -> None:
        """Raise an error for a ``patience`` without validations, or a ``time_reserve`` not less than ``time_limit``."""
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
            If another global batch was given, or batches that are read ahead.
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


#: Settings that may differ between a saved run and the run that resumes it: none changes the mathematics (tensor and
#: context groups, and GPUs, round sums differently). Training data are compared by content, not by path.
FREE_SECTIONS = ("parallel", "checkpoint")
FREE_KEYS = (
    "train.steps",
    "train.threads",
    "train.device",
    "train.optimizer_device",
    "train.direct_messages",
    "train.validate_every",
    "train.validate_samples",
    "train.validate_ema",
    "train.check_every",
    "train.patience",
    "train.min_delta",
    "train.time_limit",
    "train.time_reserve",
    "train.prefetch",
    "train.timeout",
    "model.activation_checkpointing",
    "data.make",
    *(f"data.{kind}" for kind in KINDS),
)
#: The setting with the step at which the learning rate schedule ends.
LENGTH = "optimizer.schedule_steps"
#: Names of the optimizers with a learning rate.
STEPPING = ("sgd", "adam", "adamw", "rmsprop", "lion", "lamb", "muon", "soap")


@dataclass(frozen=True, kw_only=True)
class TrainSection(LoopSection):
    """Hold the settings of batches, computing and the training loop."""

    micro_batch: int | None = setting(None, optional(whole(1)))
    accumulate: int = setting(1, whole(1))
    clip: float = setting(0.0, number())
    gradient_compression: str | None = setting(None, optional(compression))
    threads: int = setting(1, whole(1, 1024))
    device: str = setting("cpu", choice("cpu", "cuda"))
    optimizer_device: str | None = setting(None, optional(choice("cpu", "cuda")))
    direct_messages: bool = setting(True, flag)
    mixed_precision: str | None = setting(None, optional(choice("bfloat16", "float16")))
    check_every: int = setting(50, whole(0))
    ema: float | None = setting(None, optional(number(0.0, 1.0, above=True)))
    timeout: float = setting(600.0, duration)

    def check_combination(self) -> None:
        """Raise an error for grains larger than the global batch, GPU settings on CPUs, or wrong time limits."""
        super().check_combination()
        if self.global_batch != ALL_SAMPLES:
            self._check_grains()
        if self.validate_ema and self.ema is None:
            raise self.reject("validate_ema", "needs train.ema, the average of the parameters, such as 0.999")
        for name in ("optimizer_device", "mixed_precision"):
            if getattr(self, name) not in (None, "cpu") and self.device == "cpu":
                raise self.reject(name, 'is for GPUs: set train.device = "cuda" with it')

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
class OptimizerSection(ConfigSection):
    """Hold the settings of all optimizers with a learning rate; subclasses add their own."""

    named = "optimizer"

    name: str = setting("adamw", choice(*STEPPING, *VECTOR_METHODS))
    lr: float = setting(3e-4, positive)
    schedule: str = setting("constant", choice("constant", "linear", "cosine"))
    schedule_steps: int | None = setting(None, optional(whole(1)))
    warmup: int = setting(0, whole(0))
    end: float = setting(0.0, number())
    weight_decay: float = setting(0.0, number())

    def check_combination(self) -> None:
        """Raise an error if ``end`` or ``schedule_steps`` is given for a constant rate, or ``end`` is above ``lr``."""
        for name in ("end", "schedule_steps"):
            if getattr(self, name) and self.schedule == "constant":
                raise self.reject(name, 'belongs to the schedules "linear" and "cosine"; a constant rate has no end')
        if self.end > self.lr:
            raise self.reject("end", f"must be at most optimizer.lr = {self.lr}")


@dataclass(frozen=True, kw_only=True)
class SgdSection(OptimizerSection):
    """Hold the settings of stochastic gradient descent."""

    lr: float = setting(0.01, positive)
    momentum: float = setting(0.0, fraction)
    dampening: float = setting(0.0, fraction)
    nesterov: bool = setting(False, flag)

    def check_combination(self) -> None:
        """Raise an error for Nesterov momentum or dampening if ``momentum`` is 0, and for Nesterov with dampening."""
        super().check_combination()
        if self.nesterov and (not self.momentum or self.dampening):
            raise self.reject("nesterov", "needs optimizer.momentum > 0 and optimizer.dampening = 0")
        if self.dampening and not self.momentum:
            raise self.reject("dampening", "needs optimizer.momentum > 0")


_BETAS = many(fraction, count=2)


@dataclass(frozen=True, kw_only=True)
class AdamSection(OptimizerSection):
    """Hold the settings of Adam; weight decay is added to the gradient."""

    betas: tuple[float, float] = setting((0.9, 0.999), _BETAS)
    eps: float = setting(1e-8, positive)


@dataclass(frozen=True, kw_only=True)
class AdamwSection(AdamSection):
    """Hold the settings of AdamW: Adam with weight decay applied to the weights directly."""

    weight_decay: float = setting(0.01, number())


@dataclass(frozen=True, kw_only=True)
class LambSection(AdamSection):
    """Hold the settings of LAMB: Adam with a trust ratio for every tensor."""

    eps: float = setting(1e-6, positive)
    weight_decay: float = setting(0.01, number())


@dataclass(frozen=True, kw_only=True)
class TensorSection(AdamwSection):
    """Hold the settings of optimizers that update whole matrices; AdamW updates the other parameters."""

    exclude: tuple[str, ...] = setting((), many(text))
    adamw_lr_scale: float = setting(1.0, number())


@dataclass(frozen=True, kw_only=True)
class MuonSection(TensorSection):
    """Hold the settings of Muon: momentum whose matrices are made nearly orthogonal."""

    lr: float = setting(0.02, positive)
    momentum: float = setting(0.95, fraction)
    nesterov: bool = setting(True, flag)
    iterations: int = setting(5, whole(1))
    scale: str = setting("original", choice("original", "match_rms_adamw"))
    output_axis: int = setting(1, whole(0, 1))


@dataclass(frozen=True, kw_only=True)
class SoapSection(TensorSection):
    """Hold the settings of SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

    lr: float = setting(3e-3, positive)
    betas: tuple[float, float] = setting((0.95, 0.95), _BETAS)
    frequency: int = setting(10, whole(1))
    max_dimension: int = setting(10_000, whole(1))


@dataclass(frozen=True, kw_only=True)
class RmspropSection(OptimizerSection):
    """Hold the settings of RMSprop."""

    alpha: float = setting(0.99, fraction)
    eps: float = setting(1e-8, positive)


@dataclass(frozen=True, kw_only=True)
class LionSection(OptimizerSection):
    """Hold the settings of Lion: the sign of an interpolated momentum."""

    lr: float = setting(1e-4, positive)
    betas: tuple[float, float] = setting((0.9, 0.99), _BETAS)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(ConfigSection):
    """Hold the folder of checkpoints, and how often and how they are saved; ``every = 0`` saves at the end only."""

    folder: str = setting("run/checkpoints", text)
    every: int = setting(100, whole(0))
    keep: int = setting(2, whole(1))
    keep_every: int = setting(0, whole(0))
    best: str | None = setting(None, optional(text))
    asynchronous: bool = setting(False, flag)
    backend: str = setting("direct", choice("direct", "mpio"))
    alignment: int = setting(ALIGNMENT, whole(ALIGNMENT, ALIGNMENT_LIMIT))

    def check_combination(self) -> None:
        """Raise an error if the alignment is not a power of two, or for asynchronous saves with parallel HDF5."""
        if self.alignment & (self.alignment - 1):
            raise self.reject("alignment", f"must be a power of two from {ALIGNMENT} to {ALIGNMENT_LIMIT}")
        if self.asynchronous and self.backend != "direct":
            raise self.reject(
                "asynchronous",
                'needs checkpoint.backend = "direct": parallel HDF5 calls MPI, which nothing beside training may',
            )


OPTIMIZERS: dict[str, type[OptimizerSection | VectorMethodSection]] = {
    "sgd": SgdSection,
    "adam": AdamSection,
    "adamw": AdamwSection,
    "rmsprop": RmspropSection,
    "lion": LionSection,
    "lamb": LambSection,
    "muon": MuonSection,
    "soap": SoapSection,
    **VECTOR_SECTIONS,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Hold a whole configuration; the constructor checks that its sections fit together.

    ``folder`` is the folder of the configuration file, where relative paths of ``make`` start. It is no setting.
    """

    model: ModelSection
    data: DataSection | MadeDataSection
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection | VectorMethodSection = AdamwSection()
    checkpoint: CheckpointSection = CheckpointSection()
    folder: str = "."

    def __post_init__(self) -> None:
        """Raise an error for sections that do not fit together."""
        self._check_optimizer()
        dtype = getattr(self.model, "dtype", "float32")  # a model that a function makes is looked at when it is made
        if self.train.mixed_precision is not None and dtype != "float32":
            raise self.train.reject("mixed_precision", f"needs model.dtype = float32, it is {dtype}")
        self.model.check_data(self.data)
        if self.parallel.bucket_mb is not None and self.train.gradient_compression is not None:
            raise self.parallel.reject("bucket_mb", "must be left out with train.gradient_compression: it fixes sizes")
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
        length, given = optimizer.schedule_steps or train.steps, optimizer.schedule_steps is not None
        if optimizer.warmup > length:
            whose = "optimizer.schedule_steps" if given else "train.steps"
            raise optimizer.reject("warmup", f"must be at most {whose} = {length}")

    def with_tiles(self, tiles: dict[str, int] | None) -> RunConfig:
        """Return this configuration with ``parallel.tiles``; itself if these are the sizes of its groups, or None."""
        if tiles is None or all(getattr(self.parallel, axis) == count for axis, count in tiles.items()):
            return self
        return replace(self, parallel=replace(self.parallel, tiles=tiles))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return every setting, defaults included, as JSON values by section and key."""
        sections = [getattr(self, item.name) for item in fields(self) if item.name != "folder"]
        return {section.title(): section.to_dict() for section in sections}


def mathematics(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that determine the result of training, by names such as ``train.seed``.

    ``config`` is the result of :meth:`RunConfig.to_dict`.
    """
    flat = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    if flat.get("optimizer.schedule") in ("linear", "cosine"):
        flat[LENGTH] = flat.get(LENGTH) or flat.get("train.steps")
    else:
        flat.pop(LENGTH, None)
    return {
        key: value
        for key, value in sorted(flat.items())
        if key not in FREE_KEYS and key.partition(".")[0] not in FREE_SECTIONS
    }


#: Settings that decide which others there are.
_NAMES = ("model.name", "model.make", "optimizer.name")


def changes(saved: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return, by key, both values of the settings that make two configurations compute different results.

    Both are results of :meth:`RunConfig.to_dict`. A setting that a configuration lacks has the value None.
    Names come first: they decide which other settings there are.
    """
    before, now = mathematics(saved), mathematics(wanted)
    keys = sorted(before.keys() | now.keys(), key=lambda key: (key not in _NAMES, key))
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def described_change(key: str, values: tuple[Any, Any]) -> str:
    """Describe one item of what :func:`changes` returns."""
    hint = " (train.steps, where it is not given)" if key == LENGTH else ""
    return f"{key} was {shown(values[0])} in the saved run and is {shown(values[1])} now{hint}"


#: Settings on which the meaning of what is saved depends: names, shapes, element types, samples consumed.
_FIXED = (
    "model.name",
    "model.make",
    "model.dtype",
    *(f"model.{item.name}" for item in fields(ModelSection)),
    "optimizer.name",
    *(f"optimizer.{item.name}" for kind in VECTOR_SECTIONS.values() for item in fields(kind)),
    "train.global_batch",
    "train.micro_batch",
    "train.accumulate",
)


def overridable(key: str) -> bool:
    """Tell whether a resumed run may change a setting that determines the result. Not collective."""
    return not key.startswith("data.") and key not in _FIXED


def check_overridden(keys: Sequence[str], config: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the settings that a resumed run may change; ``config`` is the result of :meth:`RunConfig.to_dict`.

    Not collective. The keys of ``--override`` may be changed, and with one of the schedule also the step at which it
    ends.

    Raises
    ------
    ConfigError
        If a key is unknown, may be changed without this option, or cannot be changed in a run at all.
    """
    known = [f"{section}.{name}" for section, values in config.items() for name in values]
    for key in keys:
        if key not in known:
            raise ConfigError(f"--override {key}: there is no such setting{nearest(key, known)}")
        if not overridable(key):
            raise ConfigError(
                f"--override {key}: cannot change in a run, because what is saved depends on it; start another run, "
                "from this one's parameters if you like: model.start"
            )
        if key in FREE_KEYS or key.partition(".")[0] in FREE_SECTIONS:
            raise ConfigError(f"--override {key}: a resumed run takes it without this option, from its file or --set")
    ends = [LENGTH] if any(key.startswith("optimizer.schedule") for key in keys) else []
    return (*keys, *ends)
