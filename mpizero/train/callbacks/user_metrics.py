"""Compute the user's own validation metrics, with the same bits on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from mpizero._util.names import shown
from mpizero._util.pytree import map_arrays
from mpizero.errors import ArgumentError, ConfigError
from mpizero.layout import Grains
from mpizero.train.callbacks.callback_rounds import agree_after
from mpizero.types import Array

#: Type of a metric: takes the model and samples ``(x, y)``, and returns a sum over them, and their weight.
Metric = Callable[[Any, tuple[Any, Any]], tuple[float, float]]
#: Names in a step's line of metrics that no metric of the user may have.
RESERVED = (
    "step",
    "loss",
    "learning_rate",
    "gradient_norm",
    "bytes_sent",
    "memory",
    "skipped",
    "loss_spike",
    "bucket_mb",
    "validation_loss",
    "perplexity",
    "accuracy",
    "tokens_per_second",
    "samples_per_second",
    "iteration",
    "iterate_loss",
    "largest_gradient",
    "overrides",
)


def taken(name: object) -> bool:
    """Tell whether lines of metrics have figures of the library's of this name. Not collective."""
    return name in RESERVED or (isinstance(name, str) and name.endswith("_per_second"))


def check_metrics(metrics: object) -> dict[str, Metric]:
    """Return the metrics by name. Not collective.

    Raises
    ------
    ArgumentError
        If they are no dictionary of functions.
    ConfigError
        If a name is taken, or no name.
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"Trainer: metrics={metrics!r:.80}: expected a dictionary of functions, {{'name': function}}"
        )
    for name, function in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or taken(name):
            why = "every line of metrics has it already" if taken(name) else "letters, digits and _ make a name"
            raise ConfigError(f"Trainer: metrics: {shown(name)} cannot be the name of a metric: {why}")
        if not callable(function):
            raise ArgumentError(f"Trainer: metrics[{name!r}] is a {type(function).__name__}, not a function")
    return dict(metrics)


class UserMetrics:
    """Add up metrics over the samples of one validation.

    Every metric is called once for each grain, so it sees the same samples on any number of ranks, and its sums are
    added exactly (:func:`math.fsum`), so their order does not matter. All ranks call it equally often, because it may
    call collective methods of the model, such as ``predict``. A rank that has no more grains calls it with the first
    one, and the result is not counted.

    Parameters
    ----------
    metrics : dict
        The functions by name.
    model : ShardedModelBase
        The model.
    """

    def __init__(self, metrics: Mapping[str, Metric], model: Any) -> None:
        self._metrics, self._model = metrics, model
        self._sums: dict[str, list[tuple[float, float]]] = {name: [] for name in metrics}

    def add(self, source: Any, part: Array, size: int, own: tuple[Any, Any]) -> None:
        """Add the samples of ``source`` at the indices ``part``, of which ``own`` are those of this rank's grains.

        Collective over the model's ranks. ``size`` is the number of samples of a grain.
        """
        if not self._metrics:
            return
        group, grains = self._model.batch_group, Grains(len(part), size)
        mine = grains.assigned(group.rank, group.size)
        rounds = max(len(grains.assigned(rank, group.size)) for rank in range(group.size))
        comm = self._model.config.communicator
        try:
            spare: tuple[Any, Any] = own if len(mine) == rounds else source.samples(part[grains.span(0)])
            for number in range(rounds):
                counts = number < len(mine)
                batch = _part(own, number * size, size) if counts else spare
                for name, function in self._metrics.items():
                    found = _checked(name, function(self._model, batch))
                    if counts:
                        self._sums[name].append(found)
        except Exception as error:  # the report about a mismatch then shows it
            agree_after(comm, "the metrics", error)
            raise
        agree_after(comm, "the metrics", None)

    def figures(self) -> dict[str, float | None]:
        """Return the value of every metric: its sum over its weight; None if that is not finite.

        Collective over the model's ranks.
        """
        if not self._metrics:
            return {}
        everyone = self._model.batch_group.allgather_object(self._sums, "metrics")
        found: dict[str, float | None] = {}
        for name in self._metrics:
            pairs = [pair for sums in everyone for pair in sums[name]]
            finite = all(math.isfinite(value) for pair in pairs for value in pair)
            total, weight = (_sum(pair[place] for pair in pairs) if finite else math.nan for place in (0, 1))
            value = total / weight if weight and math.isfinite(weight) else math.nan
            found[name] = value if math.isfinite(value) else None
        # The groups of a split model have computed the same: all go on with the values of one.
        decided: dict[str, float | None] = self._model.config.communicator.broadcast_object(found, tag="metrics")
        return decided


def _sum(values: Iterable[float]) -> float:
    """Return the sum of finite numbers, rounded once; infinity if a float cannot hold it."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _part(samples: tuple[Any, Any], start: int, count: int) -> tuple[Any, Any]:
    x, y = (map_arrays(lambda leaf: leaf[start : start + count], values) for values in samples)
    return x, y


def _checked(name: str, found: Any) -> tuple[float, float]:
    pair = found if isinstance(found, tuple | list) and len(found) == 2 else (None, None)
    numbers = [value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value for value in pair]
    if not all(isinstance(value, Real) for value in numbers) or not float(numbers[1]) >= 0:  # type: ignore[arg-type]
        raise ConfigError(
            f"metric {name!r} returned {found!r:.80}: expected two numbers, the sum over the samples of the batch and "
            "their weight (of a mean: the mean times the number of samples, and that number)"
        )
    return float(numbers[0]), float(numbers[1])  # type: ignore[arg-type]
