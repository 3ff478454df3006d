"""Implement SGD, Adam, AdamW, RMSprop, Lion and LAMB; the first four with PyTorch's definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mpizero import kernels
from mpizero.errors import ArgumentError, ConfigError
from mpizero.names import explains
from mpizero.optim.flat_optimizer import FlatOptimizer, RowSum
from mpizero.types import Array, LearningRate
from mpizero.validation import flag, fraction, positive, require


def _decay_rates(owner: str, betas: Any) -> tuple[float, float]:
    """Check that ``betas`` is a pair of decay rates, each in [0, 1), and return it."""
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"{owner}: betas={betas!r}: expected two numbers >= 0 and < 1")
    return require(f"{owner}: betas[0]", betas[0], fraction), require(f"{owner}: betas[1]", betas[1], fraction)


@explains
@dataclass(frozen=True, kw_only=True)
class SGD(FlatOptimizer):
    """Implement gradient descent, with momentum and Nesterov's variant (Sutskever et al. 2013).

    Attributes
    ----------
    momentum, dampening : float
        ``m = momentum * m + (1 - dampening) * g``; in the first step ``m = g``. With momentum 0 there is no state.
    nesterov : bool
        Step along ``g + momentum * m``; needs momentum and no dampening.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def _check(self, owner: str) -> None:
        require(f"{owner}: momentum", self.momentum, fraction)
        require(f"{owner}: dampening", self.dampening, fraction)
        if require(f"{owner}: nesterov", self.nesterov, flag) and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError(
                f"{owner}: nesterov=True with momentum={self.momentum!r}, dampening={self.dampening!r} is not "
                "allowed; expected momentum > 0 and dampening = 0"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the momentum array; no name where momentum is 0."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def _kernel(self) -> str:
        return "momentum" if self.momentum else "sgd"

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        if not self.momentum:
            return lr, decay
        keep = 1.0 if step == 1 else 1.0 - self.dampening
        return lr, decay, self.momentum, keep, *((1.0, self.momentum) if self.nesterov else (0.0, 1.0))


@explains
@dataclass(frozen=True, kw_only=True)
class Adam(FlatOptimizer):
    """Implement Adam (Kingma & Ba 2015); weight decay is added to the gradient.

    Attributes
    ----------
    betas : pair of float
        Decay rates of the averages of gradient and squared gradient, in [0, 1).
    eps : float
        Number > 0 that is added to the square root in the denominator.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _check(self, owner: str) -> None:
        object.__setattr__(self, "betas", _decay_rates(owner, self.betas))
        require(f"{owner}: eps", self.eps, positive)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays that hold the averages of the gradient and of the squared gradient."""
        return ("exp_avg", "exp_avg_sq")

    def _averages(self, step: int) -> tuple[tuple[float, ...], float, float]:
        """Return the rates of both averages, then the factors that correct their start at zero (paper, section 3)."""
        beta1, beta2 = self.betas
        rates = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
        return rates, 1.0 / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return decay, *rates, lr * first, second, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Implement Adam with decoupled weight decay (Loshchilov & Hutter 2019); it has the arguments of :class:`Adam`."""

    weight_decay: float = 0.01

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return 1.0 - lr * decay, *rates, lr * first, second, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class RMSprop(FlatOptimizer):
    """Implement RMSprop (Tieleman & Hinton 2012), not centred and without momentum.

    Attributes
    ----------
    alpha : float
        Decay rate of the average of the squared gradient, in [0, 1).
    eps : float
        Number > 0 that is added to the square root in the denominator.
    """

    lr: LearningRate = field(default=1e-2, kw_only=False)
    alpha: float = 0.99
    eps: float = 1e-8

    def _check(self, owner: str) -> None:
        require(f"{owner}: alpha", self.alpha, fraction)
        require(f"{owner}: eps", self.eps, positive)

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the array that holds the average of the squared gradient."""
        return ("square_avg",)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        return lr, decay, self.alpha, 1.0 - self.alpha, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class Lion(FlatOptimizer):
    """Implement Lion (Chen et al. 2023), with decoupled weight decay.

    Attributes
    ----------
    betas : pair of float
        Weights of the gradient's average, in [0, 1): the first in the direction of the step, the second in the update
        of the average itself.
    """

    lr: LearningRate = field(default=1e-4, kw_only=False)
    betas: tuple[float, float] = (0.9, 0.99)

    def _check(self, owner: str) -> None:
        object.__setattr__(self, "betas", _decay_rates(owner, self.betas))

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the array that holds the average of the gradient."""
        return ("exp_avg",)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        beta1, beta2 = self.betas
        return 1.0 - lr * decay, lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 0.0


@explains
@dataclass(frozen=True, kw_only=True)
class LAMB(Adam):
    """Implement LAMB (You et al. 2020): Adam's direction, scaled so that the step of a tensor is ``lr`` times its norm.

    LAMB needs the norm of every tensor and of its direction. So a step takes two passes over memory: the first computes
    the directions, the second applies them. LAMB takes the arguments of :class:`Adam`.
    """

    eps: float = 1e-6
    weight_decay: float = 0.01

    needs_tensor_norms: ClassVar[bool] = True

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return decay, *rates, first, second, self.eps, lr

    def direction(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Update the averages, and overwrite ``g`` with the direction of the step."""
        slots = (state[slot] for slot in self.slots)
        kernels.backend(w).optimizer.lamb_direction(w, g, *slots, hyper, 0, w.size)

    def direction_tree(self, rows: RowSum, w: Array, u: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Sum rows of gradients, divide the sum, and write the direction of the step to ``u``, in one pass over memory.

        ``u`` may be a part of one of the rows, if it has the same columns.
        """
        slots = (state[slot] for slot in self.slots)
        kernels.backend(w).fused.lamb_direction_tree(*rows, w, u, *slots, hyper, 0, w.size)

    @staticmethod
    def trust_ratio(weight_norm: float, direction_norm: float) -> float:
        """Compute the factor on a tensor's learning rate, its norm over its direction's norm; 1 where either is 0."""
        return weight_norm / direction_norm if weight_norm > 0.0 and direction_norm > 0.0 else 1.0

    def apply_direction(self, w: Array, u: Array, hyper: Array, ratio: float) -> None:
        """Update a tensor along its direction: ``w -= lr * ratio * u``."""
        rate = np.array([float(hyper[-1]) * ratio], hyper.dtype)
        kernels.backend(w).optimizer.lamb_apply(w, u, rate, 0, w.size)

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Raise an error, because the norm of a tensor cannot be computed from a part of it.

        Raises
        ------
        TypeError
            Always. Use ``direction`` and ``apply_direction``.
        """
        raise ArgumentError("LAMB needs per-tensor norms: use direction, trust_ratio and apply_direction")
