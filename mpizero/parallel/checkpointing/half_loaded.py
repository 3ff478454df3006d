"""Describe a model whose arrays contain old and loaded values, because loading a checkpoint failed half-way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class HalfLoaded:
    """List the arrays of a model that may contain old and loaded values, because reading a checkpoint failed half-way.

    ``paths`` are the names of these arrays in the checkpoint, the same on every rank. ``reason`` is the text of this
    rank's error, which may quote the error of another rank.
    """

    paths: frozenset[str]
    reason: str

    def without(self, paths: Iterable[str]) -> HalfLoaded | None:
        """Return the description without the arrays ``paths``, now loaded completely; None if no other is left."""
        left = self.paths.difference(paths)
        return HalfLoaded(left, self.reason) if left else None

    def __str__(self) -> str:
        """Return the text for error messages: what is wrong, why, and what the user can do."""
        more = f" and {len(self.paths) - 1} more arrays" if len(self.paths) > 1 else ""
        return (
            f"half loaded: {min(self.paths)}{more} may hold parts of two states, since a checkpoint that had been "
            f"verified could not be read again ({self.reason}): load one whole, with the optimizer's state, by "
            "load_model, load_state or deserialize, or make a new model"
        )
