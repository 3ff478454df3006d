"""A line search ends where both Wolfe conditions hold, wherever they can; functions of Moré and Thuente's paper."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from mpizero.optim.minimizers import LineSearch, Point


def phi1(a):  # section 5, function (5.1) with beta = 2
    return -a / (a**2 + 2.0), (a**2 - 2.0) / (a**2 + 2.0) ** 2


def phi2(a):  # (5.2) with beta = 0.004
    return (a + 0.004) ** 5 - 2 * (a + 0.004) ** 4, 5 * (a + 0.004) ** 4 - 8 * (a + 0.004) ** 3


def parabola(a):
    return (a - 3.0) ** 2, 2.0 * (a - 3.0)


def bumpy(a):
    return math.sin(3.0 * a) - 2.0 * a + 0.2 * a**2, 3.0 * math.cos(3.0 * a) - 2.0 + 0.4 * a


def search_of(function, step, **settings):
    start = Point(0.0, *function(0.0))
    if start.slope >= 0.0:
        raise AssertionError("the function does not fall at 0")
    return LineSearch(start, step, **settings)


def run(search, function):
    while (outcome := search.tell(*function(search.step))) == "searching":
        pass
    return outcome


@pytest.mark.parametrize("function", [phi1, phi2, parabola])
@pytest.mark.parametrize("step", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("curvature", [0.9, 0.1])
def test_the_step_has_enough_decrease_and_a_small_slope(function, step, curvature):
    search = search_of(function, step, decrease=1e-3, curvature=curvature)
    assert run(search, function) == "found"
    value, slope = function(search.step)
    assert value <= search.start.value + 1e-3 * search.step * search.start.slope
    assert abs(slope) <= curvature * abs(search.start.slope)
    assert search.evaluations <= 12


def test_a_function_with_many_minima_is_searched_to_one_that_is_low_enough():
    search = search_of(lambda a: (bumpy(a)[0], bumpy(a)[1]) if a else (0.0, -1.0), 1.0, curvature=0.1)
    assert run(search, bumpy) == "found"
    assert abs(bumpy(search.step)[1]) <= 0.1


def test_the_longest_step_is_taken_where_the_function_still_falls():
    search = search_of(lambda a: (-a, -1.0), 1.0, longest=7.0)
    assert run(search, lambda a: (-a, -1.0)) == "longest"
    assert search.step == 7.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_at_which_there_is_no_value_is_shortened(bad):
    def barrier(a):
        return (a - 3.0 - math.log(5.0 - a), 1.0 + 1.0 / (5.0 - a)) if a < 5.0 else (bad, bad)

    def falling(a):
        value, slope = barrier(a)
        return (value - 4.0 * a, slope - 4.0)

    search = search_of(falling, 100.0)
    assert run(search, falling) == "found"
    assert search.step < 5.0


def test_a_function_that_never_falls_leaves_the_search_stuck():
    search = LineSearch(Point(0.0, 0.0, -1.0), 1.0)  # its slope is wrong
    assert run(search, lambda a: (a, 1.0)) == "stuck"
    assert search.evaluations <= 20


def test_values_that_are_equal_but_for_rounding_are_told_by_their_slopes():
    def flat(a):  # 1 + 1e-20 (a - 1)**2 in exact arithmetic
        return 1.0 + (4e-16 if a == 1.0 else 0.0), 2e-20 * (a - 1.0)

    search = LineSearch(Point(0.0, *flat(0.0)), 1.0, rounding=4 * 2.2e-16)
    assert search.tell(*flat(1.0)) == "found"
    assert LineSearch(Point(0.0, *flat(0.0)), 1.0).tell(*flat(1.0)) == "searching"


def test_a_search_that_is_saved_goes_on_with_the_same_bits():
    whole = search_of(phi2, 1e3, curvature=0.1)
    saved = search_of(phi2, 1e3, curvature=0.1)
    while True:
        outcome = whole.tell(*phi2(whole.step))
        saved = LineSearch.restored(json.loads(json.dumps(asdict(saved))))
        assert saved.tell(*phi2(saved.step)) == outcome
        assert asdict(saved) == asdict(whole)
        if outcome != "searching":
            break


def test_random_cubics_are_searched_in_few_evaluations():
    rng, most = np.random.default_rng(0), 0
    for _ in range(200):
        a, b, c = rng.exponential(size=3)

        def quartic(x, a=a, b=b, c=c):
            return a * x**4 + b * x**2 - c * x, 4 * a * x**3 + 2 * b * x - c

        search = search_of(quartic, 10.0 ** rng.uniform(-3, 3), curvature=0.4)
        assert run(search, quartic) == "found"
        most = max(most, search.evaluations)
    assert most <= 12
