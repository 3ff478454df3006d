from __future__ import annotations

import math

import pytest

from mpizero import optim
from mpizero.errors import ConfigError, NonFiniteError
from mpizero.optim.elementwise import clip_factor


def test_a_norm_up_to_the_limit_is_left_alone_and_a_larger_one_brought_to_it():
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(1.0, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) * 4.0 == 1.0


def test_a_norm_that_is_not_finite_cannot_be_clipped():
    for norm in (math.inf, math.nan):
        with pytest.raises(NonFiniteError, match="must be skipped"):
            clip_factor(norm, 1.0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_the_limit_must_be_a_positive_number(limit):
    with pytest.raises(ConfigError, match="limit="):
        clip_factor(1.0, limit)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps_in_a_row():
    state = optim.DynamicLossScale(initial=8.0, interval=3).start()
    scales = []
    for finite in (True, True, False, True, True, True, True, False):
        state = state.after(finite=finite)
        scales.append(state.scale)
    assert scales == [8, 8, 4, 4, 4, 8, 8, 4]


def test_the_loss_scale_stays_in_its_range():
    state = optim.DynamicLossScale(initial=2.0, smallest=1.0, largest=4.0, interval=1).start()
    for _ in range(5):
        state = state.after(finite=True)
    assert state.scale == 4.0
    for _ in range(5):
        state = state.after(finite=False)
    assert state.scale == 1.0
