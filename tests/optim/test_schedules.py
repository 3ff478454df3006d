from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero import optim
from mpizero.errors import ConfigError
from mpizero.optim.elementwise import rate_at


def test_warm_up_rises_in_equal_steps_to_the_rate_then_constant_stays():
    schedule = optim.constant(0.8, warmup=4)
    assert [schedule(step) for step in (0, 1, 3, 4, 1000)] == pytest.approx([0.2, 0.4, 0.8, 0.8, 0.8])


def test_cosine_falls_along_half_a_wave():
    schedule = optim.cosine(1.0, steps=8, end=0.2)
    assert schedule(0) == 1.0
    assert schedule(2) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert schedule(4) == pytest.approx(0.6)
    assert schedule(8) == schedule(100) == pytest.approx(0.2)


@given(steps=st.integers(1, 50), data=st.data(), shape=st.sampled_from([optim.linear, optim.cosine]))
def test_rates_rise_during_the_warm_up_and_never_after(steps, data, shape):
    warmup = data.draw(st.integers(0, steps))
    rates = [shape(0.3, steps=steps, warmup=warmup, end=0.1)(step) for step in range(steps + 5)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(0 < rate <= 0.3 for rate in rates)


def test_a_schedule_is_a_value():
    assert optim.cosine(0.1, 10) == optim.cosine(0.1, 10) != optim.linear(0.1, 10)
    assert hash(optim.cosine(0.1, 10)) == hash(optim.cosine(0.1, 10))


def test_a_schedule_may_return_an_array_without_axes_as_those_of_other_libraries_do():
    array = np.array(0.25, np.float32)
    assert rate_at("SGD", lambda step: array, 3) == 0.25
    assert isinstance(rate_at("SGD", lambda step: array, 3), float)
    with pytest.raises(ConfigError, match=r"SGD: lr\(3\)"):
        rate_at("SGD", lambda step: array[None], 3)
