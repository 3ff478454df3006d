"""Declare typical mistakes: each is a short function; the first line of its docstring says what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Mistake:
    """Hold the message and exit status that a job with a mistake must end with, and how to run it.

    The output must contain all texts ``says``, and with ``names_line`` name a line of the mistake's file. ``status``
    has all allowed ones if launchers return different ones. Each number of ``ranks`` is a job of its own.
    """

    says: tuple[str, ...]
    status: int | tuple[int, ...]
    ranks: tuple[int, ...] = (1, 2, 4)
    names_line: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def mistake(*says: str, status: int | tuple[int, ...], **settings: Any) -> Callable[[Any], Any]:
    """Return a decorator that declares a function as a mistake; arguments are attributes of :class:`Mistake`."""

    def declare(function: Any) -> Any:
        function.mistake = Mistake(says, status, **settings)
        return function

    return declare


def mistakes_of(module: Any) -> dict[str, Any]:
    """Return the mistakes (functions) that a module declares by name, in the order of their definition."""
    return {name: value for name, value in vars(module).items() if isinstance(getattr(value, "mistake", None), Mistake)}


def world() -> Any:
    """Return ``MPI.COMM_WORLD``."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def config(**settings: Any) -> Any:
    """Return a configuration of all ranks with these settings."""
    import mpizero as mz

    return mz.ShardingConfig(comm=world(), **settings)


def rank() -> int:
    """Return this process's rank in ``MPI.COMM_WORLD``."""
    return int(world().Get_rank())


def samples(count: int = 8) -> tuple[Array, Array]:
    """Return ``count`` samples for this rank: x of shape (count, 4) and y of shape (count, 2)."""
    x = np.random.default_rng(rank()).normal(size=(count, 4)).astype(np.float32)
    return x, x[:, :2] - x[:, 2:]


def parameters() -> dict[str, Array]:
    """Return initial parameters of a linear model from 4 to 2 numbers, by name."""
    return {"weight": np.full((4, 2), 0.1, np.float32), "bias": np.zeros(2, np.float32)}


def squares(parameters: Mapping[str, Array], batch: tuple[Any, Any]) -> tuple[float, dict[str, Array], float]:
    """Return the sum of squared errors of a linear model, its gradient, and the number of samples."""
    x, y = batch
    error = x @ parameters["weight"] + parameters["bias"] - y
    return float((error**2).sum()), {"weight": 2 * x.T @ error, "bias": 2 * error.sum(axis=0)}, float(len(x))
