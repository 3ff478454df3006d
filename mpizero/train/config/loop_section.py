"""Define the settings of the training loop, which ``[train]`` and :class:`mpizero.Trainer` share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from mpizero._util.checks import number, whole
from mpizero.train.config.setting_checks import ConfigSection, duration, flag, optional, setting

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
