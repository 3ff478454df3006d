"""Different builds of BLAS are named; equal ones are not."""

from __future__ import annotations

from mpizero.parallel.blas import different_builds


def test_equal_builds_are_silent() -> None:
    assert different_builds([["openblas 1"], ["openblas 1"]]) is None


def test_the_first_rank_that_differs_is_named_with_both_builds() -> None:
    message = different_builds([["openblas 1 for Zen"], ["openblas 1 for Zen"], ["openblas 1 for SkylakeX"]])
    assert message is not None
    assert "rank 2" in message
    assert "Zen" in message
    assert "SkylakeX" in message
