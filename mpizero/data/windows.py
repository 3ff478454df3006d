"""Compute which elements of an array are sample i: a slice along one axis, or a window along several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from mpizero._util.checks import require, whole
from mpizero.errors import ConfigError, DataError


@dataclass(frozen=True)
class Windows:
    """Number the samples of an array: windows at regular places, those along ``axis`` slowest, then by axis.

    Attributes
    ----------
    axis : int
        The axis along which samples lie.
    lengths, strides : mapping of int to int
        Length of a window, and distance between the starts of neighbouring ones, by axis. Other axes are read whole.
        If ``axis`` has no length, a sample is one index along it, without this axis.
    counts : mapping of int to int
        Number of windows along each of these axes, in the order in which samples are numbered.
    """

    axis: int
    lengths: Mapping[int, int]
    strides: Mapping[int, int]
    counts: Mapping[int, int]

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        axis: int,
        lengths: Mapping[int, int] | None,
        strides: Mapping[int, int] | None,
        lead: int = 0,
        label: str = "the array",
    ) -> Self:
        """Return the windows of an array of ``shape``, of which the last ``lead`` indices along ``axis`` start none.

        ``label`` names the array in error messages.

        Raises
        ------
        ConfigError
            If an axis, length, stride or lead cannot be used.
        DataError
            If the array is too short for one window.
        """
        lengths, strides = _axes("window", lengths, len(shape)), _axes("stride", strides, len(shape))
        if odd := [number for number in strides if number not in lengths and number != axis]:
            raise ConfigError(f"stride={dict(strides)}: axis {odd[0]} has no length in window={dict(lengths)}")
        require("lead", lead, whole(0))
        order = [axis, *sorted(set(lengths) - {axis})]
        steps = {number: strides.get(number, lengths.get(number, 1)) for number in order}
        counts = {}
        for number in order:
            room = shape[number] - lengths.get(number, 1) - (lead if number == axis else 0)
            if room < 0:
                told = f" and lead={lead}" if lead and number == axis else ""
                raise DataError(
                    f"{label} has shape {shape}: axis {number} is too short for a window of "
                    f"{lengths.get(number, 1)}{told}"
                )
            counts[number] = room // steps[number] + 1
        return cls(axis, lengths, steps, counts)

    def __len__(self) -> int:
        return prod(self.counts.values())

    @property
    def are_rows(self) -> bool:
        """Tell whether sample i is index i along axis 0."""
        return self.axis == 0 and not self.lengths and self.strides[0] == 1

    def starts(self, sample: int) -> dict[int, int]:
        """Return where window number ``sample`` starts, by axis."""
        found = {}
        for number in reversed(self.counts):
            sample, inside = divmod(sample, self.counts[number])
            found[number] = inside * self.strides[number]
        return found

    def block(self, sample: int, shape: tuple[int, ...], shift: int = 0) -> tuple[slice, ...]:
        """Return the elements of window number ``sample`` in an array of ``shape``, ``shift`` later along ``axis``.

        Axes of the window that the array lacks are left out.
        """
        starts = self.starts(sample)
        starts[self.axis] += shift
        return tuple(
            slice(starts[number], starts[number] + self.lengths.get(number, 1)) if number in starts else slice(0, size)
            for number, size in enumerate(shape)
        )


def _axes(name: str, given: Any, axes: int) -> dict[int, int]:
    """Check a mapping from axes to whole numbers >= 1; return it sorted by axis."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r}: expected a mapping from axes to numbers of indices, such as {{0: 4}}")
    for number, length in given.items():
        require(f"{name}: axis", number, whole(0, axes - 1))
        require(f"{name}[{number}]", length, whole(1))
    return dict(sorted(given.items()))
