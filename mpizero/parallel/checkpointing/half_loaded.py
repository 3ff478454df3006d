"""Describe a model that an interrupted load left with parts of two states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class HalfLoaded:
    """Name arrays of a model that may hold parts of two states, since reading ended amid them.

    The arrays are the same on every rank; the reason is the rank's own error, or what it was told of another's.
    """

    paths: frozenset[str]
    reason: str

    def without(self, paths: Iterable[str]) -> HalfLoaded | None:
        """Return what is left when ``paths`` have been loaded whole. Not collective."""
        left = self.paths.difference(paths)
        return HalfLoaded(left, self.reason) if left else None

    def __str__(self) -> str:
        """Say what is wrong, why, and the way out."""
        more = f" and {len(self.paths) - 1} more arrays" if len(self.paths) > 1 else ""
        return (
            f"half loaded: {min(self.paths)}{more} may hold parts of two states, since a checkpoint that had been "
            f"verified could not be read again ({self.reason}): load one whole, with the optimizer's state, by "
            "load_model, load_state or deserialize, or make a new model"
        )
