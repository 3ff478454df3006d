from __future__ import annotations

import math

import numpy as np
import pytest

from mpizero import optim
from mpizero.optim.elementwise import RowSum, adapt, learning_rate
from mpizero.types import ParameterSpec


class Declared:
    """Momentum, with its state named beforehand."""

    slots = ("m",)
    lr = 0.1

    def update(self, params, grads, state):
        state["m"] *= 0.9
        state["m"] += grads
        params -= self.lr * state["m"]


class Discovered:
    """Adagrad, whose state starts at something else than zero and is replaced, not changed."""

    def update(self, params, grads, state):
        state["sum"] = state.get("sum", np.full_like(params, 0.1)) + grads**2
        params -= 0.1 * grads / np.sqrt(state["sum"])


class Initialized(Discovered):
    def init_state(self, size, dtype):
        return {"sum": np.full(size, 0.1, dtype)}


class BiasCorrected:
    slots = ("m",)

    def update(self, params, grads, state):
        state["m"] += 0.1 * (grads - state["m"])
        params -= 0.1 * state["m"] / (1 - 0.9 ** state["step"])


class Stateless:
    def update(self, params, grads, state):
        params -= 0.5 * grads


def run(optimizer, cuts=(slice(None),), steps=4, dtype=np.float32):
    adapted = adapt(optimizer)
    rng = np.random.default_rng(0)
    w = rng.standard_normal(40).astype(dtype)
    state = {slot: np.zeros_like(w) for slot in adapted.slots}
    for step in range(1, steps + 1):
        g, hyper = rng.standard_normal(40).astype(dtype), adapted.hyper(step, 0, dtype)
        for cut in cuts:
            adapted.apply(w[cut], g[cut], {k: a[cut] for k, a in state.items()}, hyper)
    return w, state


@pytest.mark.parametrize("kind", [Declared, Discovered, Initialized, BiasCorrected, Stateless])
def test_an_elementwise_update_gives_the_same_on_any_ranges(kind):
    whole, state = run(kind())
    parts, state_of_parts = run(kind(), (slice(0, 7), slice(7, 8), slice(8, 40)))
    assert whole.tobytes() == parts.tobytes()
    assert {k: a.tobytes() for k, a in state.items()} == {k: a.tobytes() for k, a in state_of_parts.items()}


def test_state_is_found_by_declaration_by_init_state_or_by_looking():
    slots = [adapt(kind()).slots for kind in (Declared, Initialized, Discovered, Stateless)]
    assert slots == [("m",), ("sum",), ("sum",), ()]


def test_state_starts_with_the_users_own_values():
    assert run(Discovered())[0].tobytes() == run(Initialized())[0].tobytes()
    w, g = np.zeros(3), np.ones(3)
    adapted = adapt(Discovered())
    state = {"sum": np.zeros(3)}
    adapted.apply(w, g, state, adapted.hyper(1, 0, np.float64))
    np.testing.assert_allclose(state["sum"], 1.1)
    np.testing.assert_allclose(w, -0.1 / np.sqrt(1.1))


def test_the_users_object_is_tried_on_copies_only():
    class Counting(Stateless):
        calls = 0

        def update(self, params, grads, state):
            self.calls += 1
            super().update(params, grads, state)

    user = Counting()
    adapt(user)
    assert user.calls == 0


def test_a_sum_over_rows_is_followed_by_the_update():
    adapted = adapt(Stateless())
    rows, w = np.arange(12.0).reshape(3, 4), np.zeros(4)
    program, divisor = np.array([0, -3, -4], np.int32), np.array([3.0])
    adapted.apply_tree(RowSum(rows, 0, program, divisor), w, {}, adapted.hyper(1, 0, np.float64))
    np.testing.assert_array_equal(w, -0.5 * rows.mean(axis=0))


def test_the_interface_is_the_librarys():
    adapted = adapt(Declared())
    assert adapt(adapted) is adapted
    assert adapt(own := optim.AdamW()) is own
    assert (adapted.elementwise_kernel, adapted.needs_tensor_norms) == (False, False)
    assert adapted.group_of(ParameterSpec("w", (2,))) == 0
    assert learning_rate(adapted, 3) == 0.1
    assert math.isnan(learning_rate(adapt(Stateless()), 0))


class NotElementwise:
    def update(self, params, grads, state):
        params -= grads / np.linalg.norm(grads)


class CountsItsCalls:
    def __init__(self):
        self.calls = 0

    def update(self, params, grads, state):
        self.calls += 1
        params -= grads / self.calls


class ScalarState:
    def update(self, params, grads, state):
        state["t"] = state.get("t", 0) + 1
        params -= grads / state["t"]


class SetsTheStep:
    def update(self, params, grads, state):
        state["step"] += 1


class GrowsState(Stateless):
    slots = ()

    def update(self, params, grads, state):
        state["late"] = grads.copy()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (NotElementwise(), "NotElementwise.update is not elementwise"),
        (CountsItsCalls(), r"use state\['step'\], not a counter"),
        (ScalarState(), r"state\['t'\] is 1; expected an array of shape .* step count is in state\['step'\]"),
        (SetsTheStep(), "not to be set"),
        (GrowsState(), r"state\['late'\] appeared"),
        (object(), r"object is not a gradient-based optimizer: it has no method update\(params, grads, state\)"),
        (Declared, "got the class Declared: call it"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_reason(wrong, message):
    with pytest.raises(TypeError, match=message):
        adapt(wrong)
