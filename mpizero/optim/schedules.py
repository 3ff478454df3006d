"""Define learning-rate schedules: constant, linear and cosine, each with a linear warm-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpizero._util.checks import number, require, whole
from mpizero._util.names import explains
from mpizero.errors import ConfigError
from mpizero.kernels.elementary import cos_sin_turn


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Compute the learning rate of every step; ``schedule(0)`` is the learning rate of the first step.

    Step s (from 0) of the warm-up has the learning rate ``lr * (s + 1) / warmup``. After the warm-up the learning rate
    goes from ``lr`` at step ``warmup`` to ``end`` at step ``steps``, and stays at ``end``. With the constant shape it
    stays at ``lr``.

    Attributes
    ----------
    shape : str
        "constant", "linear" or "cosine" (Loshchilov & Hutter 2017).
    lr, end : float
        Learning rates right after the warm-up, and from step ``steps`` on.
    steps, warmup : int
        The step at which ``end`` is reached (0 for the constant shape), and the number of steps of the warm-up.

    Examples
    --------
    >>> import mpizero as mz
    >>> rate = mz.optim.linear(1.0, steps=6, warmup=2)
    >>> isinstance(rate, mz.optim.Schedule)
    True
    >>> [rate(step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    shape: str
    lr: float
    steps: int = 0
    warmup: int = 0
    end: float = 0.0

    def __post_init__(self) -> None:
        require(f"{self.shape}: lr", self.lr, number())
        require(f"{self.shape}: end", self.end, number())
        require(f"{self.shape}: warmup", self.warmup, whole())
        if self.shape != "constant":
            require(f"{self.shape}: steps", self.steps, whole(1))
            if self.warmup > self.steps:
                raise ConfigError(f"{self.shape}: warmup={self.warmup!r}: expected at most steps={self.steps}")

    def __call__(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0)."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.lr
        done = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        left = 1.0 - done if self.shape == "linear" else 0.5 * (1.0 + float(cos_sin_turn(0.5 * done, np.float64)[0]))
        return self.end + (self.lr - self.end) * left


@explains
def constant(lr: float, warmup: int = 0) -> Schedule:
    """Return a schedule that stays at ``lr`` after ``warmup`` steps of linear warm-up.

    Parameters
    ----------
    lr : float
        Learning rate right after the warm-up.
    warmup : int
        Number of steps, from the first one, in which the rate rises linearly to ``lr``.

    Returns
    -------
    Schedule
        A function of the step, counted from 0, for the argument ``lr`` of an optimizer.

    Raises
    ------
    ConfigError
        If a number is negative or not finite.

    Examples
    --------
    >>> import mpizero as mz
    >>> rate = mz.optim.constant(0.5, warmup=2)
    >>> [rate(step) for step in range(4)]
    [0.25, 0.5, 0.5, 0.5]
    """
    return Schedule(shape="constant", lr=lr, warmup=warmup)


@explains
def linear(lr: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Return a schedule that goes linearly from ``lr``, at step ``warmup``, to ``end``, at step ``steps``.

    Parameters
    ----------
    lr : float
        Learning rate right after the warm-up.
    steps : int
        Step at which ``end`` is reached; later steps keep it.
    warmup : int
        Number of steps, from the first one, in which the rate rises linearly to ``lr``.
    end : float
        The last learning rate.

    Returns
    -------
    Schedule
        A function of the step, counted from 0, for the argument ``lr`` of an optimizer.

    Raises
    ------
    ConfigError
        If a number is negative or not finite, or ``warmup`` is more than ``steps``.

    Examples
    --------
    >>> import mpizero as mz
    >>> rate = mz.optim.linear(1.0, steps=4, end=0.5)
    >>> [rate(step) for step in range(6)]
    [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    >>> mz.AdamW(lr=rate).lr(2)
    0.75
    """
    return Schedule(shape="linear", lr=lr, steps=steps, warmup=warmup, end=end)


@explains
def cosine(lr: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Return a schedule that follows half a cosine from ``lr``, at step ``warmup``, to ``end``, at step ``steps``.

    Parameters
    ----------
    lr : float
        Learning rate right after the warm-up.
    steps : int
        Step at which ``end`` is reached; later steps keep it.
    warmup : int
        Number of steps, from the first one, in which the rate rises linearly to ``lr``.
    end : float
        The last learning rate.

    Returns
    -------
    Schedule
        A function of the step, counted from 0, for the argument ``lr`` of an optimizer.

    Raises
    ------
    ConfigError
        If a number is negative or not finite, or ``warmup`` is more than ``steps``.

    Examples
    --------
    >>> import mpizero as mz
    >>> rate = mz.optim.cosine(1.0, steps=4)
    >>> [round(rate(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return Schedule(shape="cosine", lr=lr, steps=steps, warmup=warmup, end=end)
