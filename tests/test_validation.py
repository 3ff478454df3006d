"""Checks of numbers: what is accepted, and that the error says what refuses a value."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from mpizero._util.checks import require, unmasked, whole
from mpizero.errors import ConfigError, LayoutError


@pytest.mark.parametrize("value", [1, np.int32(7), 2**63 - 1])
def test_integers_of_python_and_numpy_are_accepted(value: int) -> None:
    assert require("samples", value, whole(1)) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, ">= 1"), (True, ">= 1"), (1.0, ">= 1"), (float("inf"), ">= 1"), (2**63, "from 1 to 9223372036854775807")],
)
def test_an_error_names_the_bound_that_refuses_an_integer(value: object, expected: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^samples={value!r}: expected a whole number {expected}$".replace("(", r"\(")
    ):
        require("samples", value, whole(1))
    with pytest.raises(ConfigError, match="expected a whole number of ranks from 1 to 8$"):
        require("ranks", 2**64, whole(1, 8, " of ranks"))


def test_masked_arrays_are_told_also_while_another_thread_imports_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unmasked([1.0], "x") == [1.0]
    masked = np.ma.masked_array([1.0], mask=[1])
    with pytest.raises(LayoutError, match="x is a masked array, whose mask would be lost"):
        unmasked([masked], "x")
    monkeypatch.setitem(sys.modules, "numpy.ma", ModuleType("numpy.ma"))
    assert unmasked([1.0], "x") == [1.0]
