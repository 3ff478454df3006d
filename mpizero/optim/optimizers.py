"""Implement SGD, Adam, AdamW, RMSprop, Lion and LAMB; SGD, Adam, AdamW and RMSprop are defined as in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mpizero import kernels
from mpizero._util.checks import flag, fraction, positive, require
from mpizero._util.names import explains
from mpizero.errors import ArgumentError, ConfigError
from mpizero.optim.flat_optimizer import FlatOptimizer, RowSum
from mpizero.types import Array, LearningRate


def _decay_rates(owner: str, betas: Any) -> tuple[float, float]:
    """Check that ``betas`` is a pair of decay rates, each in [0, 1), and return it."""
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"{owner}: betas={betas!r}: expected two numbers >= 0 and < 1")
    return require(f"{owner}: betas[0]", betas[0], fraction), require(f"{owner}: betas[1]", betas[1], fraction)


@explains
@dataclass(frozen=True, kw_only=True)
class SGD(FlatOptimizer):
    """Implement gradient descent, optionally with momentum or Nesterov momentum (Sutskever et al. 2013).

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.0.
    momentum, dampening : float
        The momentum array m is updated with the gradient g: ``m = momentum * m + (1 - dampening) * g``, and ``m = g``
        in the first step. With ``momentum = 0`` there is no momentum array.
    nesterov : bool
        Whether to step along ``g + momentum * m`` instead of ``m``. It requires ``momentum > 0`` and ``dampening = 0``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> w, g, sgd = np.array([1.0, 2.0]), np.array([0.5, -0.5]), mz.SGD(lr=0.1)
    >>> sgd.apply(w, g, {}, sgd.hyper(step=1, group=0, dtype=w.dtype))  # as a sharded model does, on its shard
    >>> w
    array([0.95, 2.05])
    >>> mz.SGD(lr=0.1, momentum=0.9, nesterov=True).slots
    ('momentum_buffer',)
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
        """Name of the momentum array; no name if :attr:`momentum` is 0, because there is no such array then."""
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
    """Implement Adam (Kingma & Ba 2015); ``weight_decay`` times the parameters is added to the gradient.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.0.
    betas : pair of float
        Decay rates, in [0, 1), of the moving averages of the gradient and of the squared gradient.
    eps : float
        Number > 0 that is added to the square root in the denominator.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [4.0], [6.0]])
    >>> line = mz.nn.MLP(1, [], 1, task="regression", dtype="float64")
    >>> with mz.ZeRO1Model(line, mz.ShardingConfig(comm="self"), optimizer=mz.Adam(lr=0.5)) as model:
    ...     losses = [model.train(x, y) for _ in range(20)]
    ...     sorted(model.optimizer.state_dict()["state"])
    ['exp_avg', 'exp_avg_sq']
    >>> losses[-1] < losses[0] / 10
    True
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _check(self, owner: str) -> None:
        object.__setattr__(self, "betas", _decay_rates(owner, self.betas))
        require(f"{owner}: eps", self.eps, positive)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays that hold the moving averages of the gradient and of the squared gradient."""
        return ("exp_avg", "exp_avg_sq")

    def _averages(self, step: int) -> tuple[tuple[float, ...], float, float]:
        """Return the weights ``(beta1, 1 - beta1, beta2, 1 - beta2)`` and the factors of the bias correction.

        The factors are ``1 / (1 - beta1**step)``, for the average of the gradient, and ``1 / sqrt(1 - beta2**step)``,
        for the root of the average of the squared gradient (paper, section 3).
        """
        beta1, beta2 = self.betas
        rates = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
        return rates, 1.0 / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return decay, *rates, lr * first, second, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Implement Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    Before a step, parameters are multiplied by ``1 - lr * weight_decay``.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.01.
    betas, eps
        As in :class:`Adam`.

    Examples
    --------
    >>> import mpizero as mz
    >>> adamw = mz.AdamW(lr=mz.optim.cosine(3e-3, steps=100, warmup=10), weight_decay=0.1)
    >>> adamw.lr(9), adamw.weight_decay
    (0.003, 0.1)
    >>> mz.AdamW(lr=-1.0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: AdamW: lr=-1.0: expected a finite number >= 0
    """

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
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.01 by default, and ``weight_decay`` 0.0.
    alpha : float
        Decay rate, in [0, 1), of the moving average of the squared gradient.
    eps : float
        Number > 0 that is added to the square root in the denominator.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> rmsprop, w, g = mz.RMSprop(lr=0.1), np.zeros(2), np.array([1.0, -4.0])
    >>> state = {slot: np.zeros(2) for slot in rmsprop.slots}
    >>> rmsprop.apply(w, g, state, rmsprop.hyper(step=1, group=0, dtype=w.dtype))
    >>> w.round(4), state["square_avg"]
    (array([-1.,  1.]), array([0.01, 0.16]))
    """

    lr: LearningRate = field(default=1e-2, kw_only=False)
    alpha: float = 0.99
    eps: float = 1e-8

    def _check(self, owner: str) -> None:
        require(f"{owner}: alpha", self.alpha, fraction)
        require(f"{owner}: eps", self.eps, positive)

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the array that holds the moving average of the squared gradient."""
        return ("square_avg",)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        return lr, decay, self.alpha, 1.0 - self.alpha, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class Lion(FlatOptimizer):
    """Implement Lion (Chen et al. 2023), with decoupled weight decay.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.0001 by default, and ``weight_decay`` 0.0.
    betas : pair of float
        Weights, in [0, 1), of the moving average m of the gradient g. The step goes along the sign of ``betas[0] * m +
        (1 - betas[0]) * g``; then m becomes ``betas[1] * m + (1 - betas[1]) * g``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> lion, w, g = mz.Lion(lr=0.25), np.zeros(2), np.array([1.0, -40.0])
    >>> state = {slot: np.zeros(2) for slot in lion.slots}
    >>> lion.apply(w, g, state, lion.hyper(step=1, group=0, dtype=w.dtype))
    >>> w  # steps have the size of the learning rate, whatever the gradient's
    array([-0.25,  0.25])
    """

    lr: LearningRate = field(default=1e-4, kw_only=False)
    betas: tuple[float, float] = (0.9, 0.99)

    def _check(self, owner: str) -> None:
        object.__setattr__(self, "betas", _decay_rates(owner, self.betas))

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the array that holds the moving average of the gradient."""
        return ("exp_avg",)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        beta1, beta2 = self.betas
        return 1.0 - lr * decay, lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 0.0


@explains
@dataclass(frozen=True, kw_only=True)
class LAMB(Adam):
    """Implement LAMB (You et al. 2020): Adam's direction, scaled so that a tensor's step has ``lr`` times its norm.

    LAMB needs the norm of every tensor and the norm of the direction in which it is updated. So a step takes two passes
    over memory: the first computes the directions, the second updates the parameters.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.01.
    betas, eps
        As in :class:`Adam`; ``eps`` is 1e-6 by default.

    Examples
    --------
    >>> import mpizero as mz
    >>> lamb = mz.LAMB(lr=0.01)
    >>> lamb.trust_ratio(weight_norm=2.0, direction_norm=0.5)  # the step of this tensor has the norm 0.01 * 2.0
    4.0
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), lamb, comm="self") as model:
    ...     model.optimizer.wrapped_optimizer is lamb
    True
    """

    eps: float = 1e-6
    weight_decay: float = 0.01

    needs_tensor_norms: ClassVar[bool] = True

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return decay, *rates, first, second, self.eps, lr

    def direction(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Update the moving averages in ``state`` with the gradient ``g``; overwrite ``g`` with the direction."""
        slots = (state[slot] for slot in self.slots)
        kernels.backend(w).optimizer.lamb_direction(w, g, *slots, hyper, 0, w.size)

    def direction_tree(self, rows: RowSum, w: Array, u: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Compute the averaged gradient that ``rows`` describes; update ``state``, and write the direction to ``u``.

        All this takes one pass over memory. ``u`` may be a slice of a row of ``rows``, if it starts at column
        ``rows.first``.
        """
        slots = (state[slot] for slot in self.slots)
        kernels.backend(w).fused.lamb_direction_tree(*rows, w, u, *slots, hyper, 0, w.size)

    @staticmethod
    def trust_ratio(weight_norm: float, direction_norm: float) -> float:
        """Return the factor on a tensor's learning rate: ``weight_norm / direction_norm``, or 1 if one of them is 0."""
        return weight_norm / direction_norm if weight_norm > 0.0 and direction_norm > 0.0 else 1.0

    def apply_direction(self, w: Array, u: Array, hyper: Array, ratio: float) -> None:
        """Update a tensor along its direction: ``w -= lr * ratio * u``, with the learning rate ``lr`` of ``hyper``."""
        rate = np.array([float(hyper[-1]) * ratio], hyper.dtype)
        kernels.backend(w).optimizer.lamb_apply(w, u, rate, 0, w.size)

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Raise an error, because LAMB needs the norm of a whole tensor.

        Raises
        ------
        TypeError
            Always. Use ``direction`` and ``apply_direction``.
        """
        raise ArgumentError("LAMB needs per-tensor norms: use direction, trust_ratio and apply_direction")
