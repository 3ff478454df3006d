"""Copies past the caches move every byte and no other, wherever they come from."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.memory import LINE, PAGE, copy_past_cache


def aligned(size: int) -> np.ndarray:
    room = np.full(size + LINE, 7, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + size]


@pytest.mark.parametrize("size", [0, LINE - 1, LINE, PAGE, 4 * PAGE + 3 * LINE + 5, 9 * PAGE])
@pytest.mark.parametrize("shift", [0, 1, 4, LINE])
def test_every_byte_is_copied_and_none_besides(size: int, shift: int, rng: np.random.Generator) -> None:
    source, target = rng.integers(0, 256, size + shift).astype(np.uint8), aligned(size + 2 * LINE)
    copy_past_cache(source[shift:], target[:size])
    np.testing.assert_array_equal(target[:size], source[shift:])
    assert (target[size:] == 7).all()


def test_python_alone_copies_the_same(rng: np.random.Generator) -> None:
    source, target = rng.integers(0, 256, 5 * PAGE + 9).astype(np.uint8), aligned(5 * PAGE + 9)
    copy_past_cache.python(source, target)
    np.testing.assert_array_equal(target, source)
