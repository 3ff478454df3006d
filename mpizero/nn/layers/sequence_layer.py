"""Define the base class of layers that must know where in the whole sequences the positions of their input lie."""

from __future__ import annotations

from mpizero.nn.layer import Layer
from mpizero.types import Run


class SequenceLayer(Layer):
    """Know which positions of whole sequences an input has: all of them here, a part in a context-parallel form.

    A split form asks its unsplit layer, which may be a context-parallel form: its ranks then split the part of a
    context group's rank as they split whole sequences.
    """

    def located(self, run: Run, shape: tuple[int, ...] | None) -> Run:
        """Return ``run`` with the length of the whole sequences, and the ranges of positions that an input has.

        ``shape`` (samples, positions, ...) is the input's; None if ``run.length`` is known. Collective over the context
        group in a context-parallel form, if ``run.length`` is 0.
        """
        return run if shape is None or len(shape) < 2 else run.on_whole(shape[1])

    def own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a sample whose whole shape is ``shape`` (length, ...).

        Not collective.
        """
        return shape
