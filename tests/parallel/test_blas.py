"""Different builds of BLAS are named; equal ones are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpizero.sharding.device import different_builds, numpy_builds


def test_equal_builds_are_silent() -> None:
    assert different_builds([["openblas 1"], ["openblas 1"]]) is None


def test_the_first_rank_that_differs_is_named_with_both_builds() -> None:
    message = different_builds([["openblas 1 for Zen"], ["openblas 1 for Zen"], ["openblas 1 for SkylakeX"]])
    assert message is not None
    assert "rank 2" in message
    assert "Zen" in message
    assert "SkylakeX" in message


def library(path: Path, version: str) -> dict[str, str]:
    return {"user_api": "blas", "internal_api": "openblas", "version": version, "filepath": str(path)}


def test_a_copy_that_another_package_brought_does_not_count() -> None:
    packages = Path(np.__file__).parent.parent
    own = library(packages / "numpy.libs" / "libopenblas.so", "2")
    other = library(packages / "scipy.libs" / "libopenblas.so", "1")
    assert numpy_builds([other, own]) == numpy_builds([own]) == ["openblas 2 for unknown cores"]


def test_a_blas_of_the_system_counts_where_numpy_has_none_of_its_own() -> None:
    assert numpy_builds([library(Path("/usr/lib/libopenblas.so"), "3")]) == ["openblas 3 for unknown cores"]
