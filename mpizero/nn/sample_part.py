"""Describe a part of a sample, for the random masks of its elements."""

from __future__ import annotations

from typing import NamedTuple


class SamplePart(NamedTuple):
    """Describe which elements of each sample an array holds, where a rank has only a part of each sample.

    The part consists of planes. Each plane consists of ``rows`` rows, and each row of ``width`` contiguous elements.
    Element j of row r of plane p is element ``offset + p * plane_step + r * row_step + j`` of the whole sample, counted
    in C order. If ``rows`` is 1, the part is contiguous: consecutive positions of a sequence, for example, or the
    scores of consecutive heads.
    """

    offset: int
    width: int
    rows: int = 1
    row_step: int = 0
    plane_step: int = 0
