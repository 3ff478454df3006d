"""Run a method of whole vectors on the ranges of the parameters that a rank updates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.errors import ConfigError, NonFiniteError
from mpizero.nn.models import unfrozen
from mpizero.optim.minimizers import MethodProgress, VectorRun
from mpizero.optim.regularization import TRIAL
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.optimizer.regularized import RegularizedGradient
from mpizero.parallel.optimizer.sharded_update import Updater
from mpizero.parallel.optimizer.sharded_vectors import ShardedVectors
from mpizero.types import Array


class VectorUpdater(Updater):
    """Run a method of whole vectors: a step takes one evaluation, and sets the parameters to the next ones to evaluate.

    The parameters have the meaning of :class:`Updater`'s.
    """

    method: VectorRun

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.vectors = ShardedVectors(self, self.optimizer.bounds, self.optimizer.preconditioner)
        self.method = VectorRun(self.optimizer, self.vectors)
        terms = self.optimizer.regularization
        _, store, scope = args
        self._regularized = (
            None if terms is None else RegularizedGradient(terms, store, self.pieces, replicated=scope.replicated)
        )

    def update(self, reduced: Array, threads: int, loss: float) -> None:
        """Take the loss and its reduced gradient at the parameters, and set the parameters to the next ones.

        Collective over all ranks.

        Raises
        ------
        NonFiniteError
            If the regularization of the start values is infinite or NaN.
        """
        self.vectors.threads = threads
        for run in self.runs:
            np.copyto(self.state[TRIAL][run.state : run.state + run.size], reduced[run.gradient :][: run.size])
        loss = self._with_terms(loss)
        if math.isfinite(loss):
            self.method.advance(loss)
        elif not self.method.retry() and self.method.progress.stage == "first":
            raise NonFiniteError("the regularization of the start values, or its gradient, is not finite")
        self._take_averages(self._parameters(), reduced)
        self._made()

    def _with_terms(self, loss: float) -> float:
        """Add the regularization to ``TRIAL``, which is a gradient or a product, and to the loss. Collective."""
        if self._regularized is None:
            return loss
        progress = self.method.progress
        if progress.stage == "product" and self.optimizer.exact:
            self._regularized.add_products(self.state[progress.along], self.state[TRIAL])
            return loss
        return loss + self._regularized.add(self.state[TRIAL])

    def reset(self) -> None:
        """Set state, step count and progress to those before the first step. Not collective."""
        super().reset()
        self.method.progress = MethodProgress()


def check_vector_method(optimizer: Any, config: ShardingConfig, model: Any, *, scaled: bool) -> None:
    """Check that a training can use a method of whole vectors, whose line searches need the exact loss and gradient.

    ``model`` is the user's. ``scaled`` tells whether there is a loss scale.

    Raises
    ------
    ConfigError
        If a setting does not go together with the method. The message names it.
    """
    name, dropout = type(optimizer).__name__, getattr(unfrozen(model), "dropout", 0.0)
    clash = {
        f"clip={config.clip}": config.clip is not None,
        f"ema={config.ema}": config.ema is not None,
        f"gradient_compression={config.gradient_compression!r}": config.gradient_compression is not None,
        f"device={config.device!r}": config.device != "cpu",
        "a loss scale": scaled,
        f"the model's dropout={dropout}": isinstance(dropout, float) and dropout > 0.0,
    }
    for setting, given in clash.items():
        if given:
            raise ConfigError(
                f"{name} needs the loss and its exact gradient, in the memory of the host: leave out {setting}"
            )
