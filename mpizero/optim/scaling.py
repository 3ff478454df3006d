"""Compute the factors by which gradients are multiplied for clipping by the global norm and for loss scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mpizero._util.checks import number, positive, require, whole
from mpizero._util.names import explains
from mpizero.errors import ConfigError, NonFiniteError


def clip_factor(norm: float, limit: float) -> float:
    """Compute the factor that clips gradients: 1.0 if ``norm`` is at most ``limit``, otherwise ``limit / norm``.

    ``norm`` is the norm of the whole gradient, over all ranks. (PyTorch divides by ``norm + 1e-6``.)

    Raises
    ------
    ConfigError
        If ``limit`` is not a finite number > 0.
    NonFiniteError
        If ``norm`` is infinite or NaN.
    """
    require("clip: limit", limit, positive)
    if not math.isfinite(norm):
        raise NonFiniteError(f"the global gradient norm is {norm}; such a step must be skipped, not clipped")
    return 1.0 if norm <= limit else limit / norm


@explains
@dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Hold the rules by which the loss scale changes (Micikevicius et al. 2018).

    A step is good if all its gradients are finite; otherwise it has overflowed.

    Attributes
    ----------
    initial, smallest, largest : float
        The scale of the first step, and the smallest and the largest scale allowed. Scaling is exact if the scale is a
        power of two.
    growth, backoff : float
        The scale is multiplied by ``growth`` after ``interval`` good steps in a row, and by ``backoff`` after an
        overflow.
    interval : int
        Number of good steps in a row after which the scale grows.

    Examples
    --------
    >>> import mpizero as mz
    >>> state = mz.DynamicLossScale(initial=1024.0, interval=2).start()
    >>> state.after(finite=False).scale  # an overflow: the step is skipped
    512.0
    >>> state.after(finite=True).after(finite=True).scale
    2048.0
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     sharded = mz.ZeRO2Optimizer(mz.AdamW(), config, loss_scale=mz.DynamicLossScale(initial=1024.0))
    ...     sharded.loss_scale.initial
    1024.0
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        owner = type(self).__name__
        require(f"{owner}: smallest", self.smallest, positive)
        require(f"{owner}: largest", self.largest, number(self.smallest))
        require(f"{owner}: initial", self.initial, number(self.smallest))
        if self.initial > self.largest:
            raise ConfigError(f"{owner}: initial={self.initial!r}: expected at most {self.largest!r}")
        require(f"{owner}: growth", self.growth, number(1.0, above=True))
        require(f"{owner}: backoff", self.backoff, number(below=1.0, above=True))
        require(f"{owner}: interval", self.interval, whole(1))

    def start(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState(self, self.initial)


@dataclass(frozen=True)
class LossScaleState:
    """Hold the current loss scale, and the number of good steps since it last changed; they are equal on all ranks."""

    policy: DynamicLossScale
    scale: float
    good_steps: int = 0

    def after(self, *, finite: bool) -> LossScaleState:
        """Return the state after one more step; ``finite`` says whether all gradients of that step were finite."""
        policy = self.policy
        if not finite:
            return replace(self, scale=max(self.scale * policy.backoff, policy.smallest), good_steps=0)
        if self.good_steps + 1 < policy.interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * policy.growth, policy.largest), good_steps=0)
