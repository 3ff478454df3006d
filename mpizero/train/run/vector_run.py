"""Train by a method of whole vectors: the same samples in every step, and the last iterate for all who look."""

from __future__ import annotations

from typing import Any, Self

from mpizero.data import Source
from mpizero.data.batches import whole_batch
from mpizero.errors import StateError
from mpizero.optim.minimizers import MethodProgress
from mpizero.train.run.metrics import finite


class SameBatch:
    """Iterate over this rank's part of all samples, which is read once and is the same in every step.

    The first step is collective over the ranks of ``model``.
    """

    #: What random numbers of a pass over the samples are keyed by.
    epoch = 0

    def __init__(self, source: Source, model: Any) -> None:
        self._source, self._model = source, model
        self._samples: tuple[Any, Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        if self._samples is None:
            self._samples = whole_batch(self._source, self._model)
        return self._samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Do nothing: no thread reads ahead."""


class MethodWatch:
    """Follow the method of whole vectors that trains a model. With any other optimizer, methods do nothing.

    Between steps the parameters are those of the next trial, but callbacks, validations and checkpoints get those of
    the last iterate.

    Parameters
    ----------
    model : ShardedModelBase
        The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._shown: int | None = None  # the version of the parameters while they are the iterate's

    @property
    def progress(self) -> MethodProgress | None:
        """The progress of the method; None if there is no such method. Not collective."""
        updater = self._model.engine.updater
        return None if updater is None or updater.method is None else updater.method.progress

    @property
    def loss(self) -> float | None:
        """The loss of the last iterate; None if there is none yet. Not collective."""
        found = self.progress
        return None if found is None or found.stage == "first" else finite(found.loss)

    @property
    def reason(self) -> str:
        """Why the method wants no further step; "" if it does want one. Not collective."""
        found = self.progress
        if found is None or found.stage != "done":
            return ""
        return f"converged: {found.message}" if found.converged else found.message

    def figures(self) -> dict[str, Any]:
        """Return what a line of metrics has about the method. Not collective."""
        found = self.progress
        if found is None:
            return {}
        largest = None if found.stage == "first" else finite(found.norm)
        return {"iteration": found.iterations, "iterate_loss": self.loss, "largest_gradient": largest}

    def result(self) -> dict[str, Any] | None:
        """Return what the result of a run has about the method; None without one. Not collective."""
        found = self.progress
        if found is None:
            return None
        own = {"converged": found.converged, "message": found.message, "iterations": found.iterations}
        return {**own, "largest_gradient": self.figures()["largest_gradient"]}

    def told(self) -> str:
        """Return a message about the end of the run; "" without such a method. Not collective."""
        found = self.progress
        if found is None:
            return ""
        state = f"loss {found.loss:.6g}, largest gradient {found.norm:.3g}" if self.loss is not None else "no iterate"
        counts = f"after {found.iterations} iterations, {found.evaluations} evaluations"
        return f"{self.reason or 'not converged'} ({state} {counts})"

    def begin(self) -> None:
        """Set the parameters to those of the next trial, before the first step of this call. Collective."""
        self._shown = None
        if self.progress is not None:
            self._model.engine.place_trial()
            self._model.invalidate_cache()

    def show_iterate(self) -> None:
        """Set the parameters to the last iterate, until :meth:`go_on`. Collective."""
        if self.progress is not None and self._shown is None:
            self._model.engine.place_iterate()
            self._model.invalidate_cache()
            self._shown = self._model.engine.store.version

    def go_on(self) -> None:
        """Set the parameters to those of the next trial again, if the iterate was shown. Collective.

        Raises
        ------
        StateError
            If the parameters were changed meanwhile.
        """
        if self._shown is None:
            return
        if self._shown != self._model.engine.store.version:
            name = type(self._model.optimizer.wrapped_optimizer).__name__
            raise StateError(
                f"a callback has changed the parameters, which only {name} may change: they are its iterate"
            )
        self.begin()
