"""Run a method of whole vectors, one evaluation after the other."""

from __future__ import annotations

from typing import Any

from mpizero.optim.vectors.method import MethodProgress, VectorMethod
from mpizero.optim.vectors.space import VectorSpace


class VectorRun:
    """Run a method of whole vectors on the vectors of a space.

    Attributes
    ----------
    progress : MethodProgress
        What the method has reached.
    """

    def __init__(self, method: VectorMethod, space: VectorSpace) -> None:
        self._method, self._space, self.progress = method, space, MethodProgress()

    def advance(self, loss: float) -> None:
        """Take the loss at the parameters, and set them to the next ones. Collective over all ranks."""
        self._method.advance(self._space, self.progress, loss)

    def retry(self) -> bool:
        """Take notice that the loss or its gradient is infinite or NaN; tell whether the parameters were changed.

        Collective over all ranks.
        """
        return self._method.reject(self._space, self.progress)

    def place(self, *, iterate: bool) -> None:
        """Set the parameters to the last iterate, or to those that the method wants to be evaluated next.

        Not collective. Before the first evaluation both are the start values, which stay as they are.
        """
        self._method.place(self._space, self.progress, iterate=iterate)

    def restore(self, saved: Any) -> None:
        """Go on with the progress that ``progress.saved()`` has returned. Not collective."""
        self.progress = MethodProgress.restored(saved)
