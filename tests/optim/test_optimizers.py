from __future__ import annotations

import math

import numpy as np
import pytest

import mpizero as mz
from mpizero import optim
from mpizero.errors import ConfigError
from mpizero.optim.elementwise import RowSum, learning_rate
from mpizero.types import ParameterSpec

DTYPES = (np.float32, np.float64)
OPTIMIZERS = (
    optim.SGD(lr=0.1, weight_decay=0.02),
    optim.SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.02),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    optim.Adam(lr=0.01, weight_decay=0.02),
    optim.AdamW(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    optim.RMSprop(lr=0.01, weight_decay=0.02),
    optim.Lion(lr=0.01, weight_decay=0.1),
)
LAMB = optim.LAMB(lr=0.01, weight_decay=0.1)


# Oracles: one number at a time, in Python floats, from PyTorch's documentation and the papers.


def sgd(o, history, w, decay):
    buffer = None
    for g in history:
        g = g + decay * w
        if o.momentum:
            buffer = g if buffer is None else o.momentum * buffer + (1 - o.dampening) * g
            g = g + o.momentum * buffer if o.nesterov else buffer
        w -= o.lr * g
    return w


def adam(o, history, w, decay):
    m = v = 0.0
    decoupled = isinstance(o, optim.AdamW)
    for t, g in enumerate(history, start=1):
        if decoupled:
            w -= o.lr * decay * w
        else:
            g = g + decay * w
        m = o.betas[0] * m + (1 - o.betas[0]) * g
        v = o.betas[1] * v + (1 - o.betas[1]) * g * g
        m_hat, v_hat = m / (1 - o.betas[0] ** t), v / (1 - o.betas[1] ** t)
        w -= o.lr * m_hat / (math.sqrt(v_hat) + o.eps)
    return w


def rmsprop(o, history, w, decay):
    v = 0.0
    for g in history:
        g = g + decay * w
        v = o.alpha * v + (1 - o.alpha) * g * g
        w -= o.lr * g / (math.sqrt(v) + o.eps)
    return w


def lion(o, history, w, decay):
    m = 0.0
    for g in history:
        c = o.betas[0] * m + (1 - o.betas[0]) * g
        w -= o.lr * (math.copysign(1.0, c) + decay * w)
        m = o.betas[1] * m + (1 - o.betas[1]) * g
    return w


ORACLES = {optim.SGD: sgd, optim.Adam: adam, optim.AdamW: adam, optim.RMSprop: rmsprop, optim.Lion: lion}


def lamb(o, history, w, decay):
    """LAMB on one tensor (You et al. 2020, algorithm 2)."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(history, start=1):
        m = o.betas[0] * m + (1 - o.betas[0]) * g
        v = o.betas[1] * v + (1 - o.betas[1]) * g * g
        u = (m / (1 - o.betas[0] ** t)) / (np.sqrt(v / (1 - o.betas[1] ** t)) + o.eps) + decay * w
        w = w - o.lr * np.linalg.norm(w) / np.linalg.norm(u) * u
    return w


def data(size, dtype, steps=6):
    rng = np.random.default_rng(1)
    return rng.standard_normal(size).astype(dtype), rng.standard_normal((steps, size)).astype(dtype)


def state_of(optimizer, w):
    return {slot: np.zeros_like(w) for slot in optimizer.slots}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("decays", [False, True])
def test_parameters_agree_with_the_oracle_to_rounding(optimizer, decays, dtype):
    start, history = data(23, dtype)
    w, state = start.copy(), state_of(optimizer, start)
    for step, g in enumerate(history, start=1):
        optimizer.apply(w, g, state, optimizer.hyper(step, int(decays), dtype))
    decay = optimizer.weight_decay if decays else 0.0
    oracle = ORACLES[type(optimizer)]
    expected = [oracle(optimizer, history[:, i].astype(float), float(start[i]), decay) for i in range(23)]
    np.testing.assert_allclose(w, expected, rtol=50 * np.finfo(dtype).eps, atol=20 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lamb_agrees_with_the_oracle_given_norms_of_the_whole_tensor(dtype):
    optimizer = LAMB
    start, history = data(23, dtype)
    w, state = start.copy(), state_of(optimizer, start)
    for step, g in enumerate(history, start=1):
        hyper, u = optimizer.hyper(step, 1, dtype), g.copy()
        optimizer.direction(w, u, state, hyper)
        optimizer.apply_direction(w, u, hyper, optimizer.trust_ratio(np.linalg.norm(w), np.linalg.norm(u)))
    expected = lamb(optimizer, history.astype(float), start.astype(float), optimizer.weight_decay)
    np.testing.assert_allclose(w, expected, rtol=100 * np.finfo(dtype).eps, atol=20 * np.finfo(dtype).eps)
    assert optimizer.trust_ratio(0.0, 1.0) == optimizer.trust_ratio(1.0, 0.0) == 1.0
    with pytest.raises(TypeError, match="per-tensor norms"):
        optimizer.apply(w, u, state, hyper)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("threads", [1, 3])
def test_one_pass_over_gradients_of_several_rows_has_the_bits_of_two(optimizer, threads):
    dtype = np.float32
    w, rows = data(300_001 if threads > 1 else 5000, dtype, steps=3)
    other = w.copy()
    fast, slow = state_of(optimizer, w), state_of(optimizer, w)
    summed = RowSum(rows, 0, np.array([0, -3, -4], np.int32), np.array([6], dtype))
    for step in (1, 2):
        hyper = optimizer.hyper(step, 1, dtype)
        optimizer.apply_tree(summed, w, fast, hyper, threads)
        optimizer.apply(other, ((rows[0] + rows[1]) + rows[2]) / summed.divisor, slow, hyper)
    assert w.tobytes() == other.tobytes()
    assert {k: a.tobytes() for k, a in fast.items()} == {k: a.tobytes() for k, a in slow.items()}


def test_the_gradient_is_left_as_it_is():
    w, (g, *_) = data(50, np.float32)
    g.flags.writeable = False
    for optimizer in OPTIMIZERS:
        optimizer.apply(w, g, state_of(optimizer, w), optimizer.hyper(1, 1, np.float32))


def test_corrections_of_the_first_steps_are_formed_in_float64():
    hyper = optim.AdamW(lr=1e-3, weight_decay=0.0).hyper(1, 1, np.float32)
    assert hyper.dtype == np.float32
    assert hyper[4] == np.float32(0.001)  # 1 - beta2; in float32 it would be 0.00099998713
    assert hyper[5] == np.float32(1e-3 / (1 - 0.9))


def test_decay_spares_biases_and_groups_override_by_name():
    optimizer = optim.AdamW(
        lr=0.1,
        weight_decay=0.5,
        groups=[optim.ParameterGroup("head.*", lr_scale=0.1), optim.ParameterGroup("*.bias", weight_decay=0.25)],
    )

    def settings(name, decay):
        hyper = optimizer.hyper(1, optimizer.group_of(ParameterSpec(name, (3,), decay=decay)), np.float64)
        shrink, rate = hyper[0], hyper[5]
        return round(float(rate * (1 - 0.9)), 12), round(float((1 - shrink) / (rate * (1 - 0.9))), 12)

    assert settings("blocks.0.weight", True) == (0.1, 0.5)
    assert settings("blocks.0.norm.scale", False) == (0.1, 0.0)
    assert settings("blocks.0.bias", False) == (0.1, 0.25)
    assert settings("head.weight", True) == (0.01, 0.5)
    assert settings("head.bias", False) == (0.01, 0.0)


def test_a_schedule_sets_the_rate_of_every_step():
    optimizer = optim.SGD(lr=optim.linear(1.0, steps=4))
    assert [float(optimizer.hyper(step, 0, np.float64)[0]) for step in (1, 2, 5, 9)] == [1.0, 0.75, 0.0, 0.0]
    assert learning_rate(optimizer, 1) == 0.75
    assert learning_rate(optim.SGD(lr=0.3), 7) == 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.AdamW(lr=math.nan), "AdamW: lr=nan: expected a finite number >= 0"),
        (lambda: optim.Lion(lr="fast"), "Lion: lr='fast'"),
        (lambda: optim.SGD(lr=True), "SGD: lr=True"),
        (lambda: optim.Adam(betas=(0.9, 1.0)), r"Adam: betas=\(0.9, 1.0\): .* >= 0 and < 1"),
        (lambda: optim.Lion(betas=0.9), "Lion: betas=0.9: expected a list of 2 values"),
        (lambda: optim.LAMB(betas=(0.9,)), "a list of 2 values, got 1"),
        (lambda: optim.Adam(eps=0.0), "Adam: eps=0.0: .* > 0"),
        (lambda: optim.RMSprop(alpha=1.0), "RMSprop: alpha=1.0"),
        (lambda: optim.SGD(momentum=1.5), "SGD: momentum=1.5"),
        (lambda: optim.SGD(nesterov=True), "nesterov=True: needs momentum > 0"),
        (lambda: optim.SGD(momentum=0.9, nesterov=1), "nesterov=1: .* True or False"),
        (lambda: optim.SGD(weight_decay=-1.0), "SGD: weight_decay=-1.0"),
        (lambda: optim.SGD(groups=["*.bias"]), "expected ParameterGroup"),
        (lambda: optim.ParameterGroup("*", lr_scale=-1.0), "lr_scale=-1.0"),
        (lambda: optim.ParameterGroup([], lr_scale=1.0), "shell pattern"),
        (
            lambda: optim.SGD(groups=[optim.ParameterGroup(["a", "c.*"])]).check_names("ab"),
            r"ParameterGroup\('c.\*'\) mat",
        ),
        (
            lambda: optim.SGD(groups=[optim.ParameterGroup("*"), optim.ParameterGroup("b")]).check_names("ab"),
            r"ParameterGroup\('b'\) has no effect: .*give it first",
        ),
        (lambda: optim.SGD(iter([1.0])), r"SGD is given no parameters.*mz.SGD\(lr=1e-3\)"),
        (lambda: optim.SGD(lr=lambda step: math.nan).hyper(3, 0, np.float32), r"lr\(2\)=nan"),
        (lambda: optim.Muon(momentum=1.0), r"Muon: momentum=1.0: expected"),
        (lambda: optim.Muon(iterations=0), r"Muon: iterations=0: expected a whole number >= 1"),
        (lambda: optim.Muon(scale="adamw"), 'Muon: scale=\'adamw\': expected one of "original", "match_rms_adamw"'),
        (lambda: optim.Muon(output_axis=2), r"Muon: output_axis=2: expected a whole number from 0 to 1"),
        (lambda: optim.Muon(exclude=[3]), r"Muon: exclude=\[3\]: each value must be a string"),
        (lambda: optim.Muon(adamw_lr_scale=-1), r"Muon: adamw_lr_scale=-1: expected"),
        (lambda: optim.SOAP(frequency=0), r"SOAP: frequency=0: expected a whole number >= 1"),
        (lambda: optim.SOAP(max_dimension=0), r"SOAP: max_dimension=0: expected a whole number >= 1"),
        (lambda: optim.constant(math.nan), "constant: lr=nan"),
        (lambda: optim.constant(0.1, warmup=-1), "warmup=-1: .* >= 0"),
        (lambda: optim.linear(0.1, steps=0), "linear: steps=0: .* >= 1"),
        (lambda: optim.linear(0.1, steps=2.5), "steps=2.5"),
        (lambda: optim.cosine(0.1, steps=5, warmup=6), "warmup=6: .* at most steps=5"),
        (lambda: optim.cosine(0.1, steps=5, end=-0.1), "end=-0.1"),
        (lambda: optim.DynamicLossScale(initial=0.5), "initial"),
        (lambda: optim.DynamicLossScale(initial=2.0**30), "initial"),
        (lambda: optim.DynamicLossScale(growth=1.0), "growth"),
        (lambda: optim.DynamicLossScale(backoff=1.0), "backoff"),
        (lambda: optim.DynamicLossScale(interval=0), "interval"),
        (lambda: optim.DynamicLossScale(smallest=0.0), "smallest"),
        (lambda: mz.Tikhonov(-1.0), "Tikhonov: weight"),
        (lambda: mz.TotalVariation(1.0, smoothing=0.0), "TotalVariation: smoothing"),
        (lambda: mz.LBFGS(regularization={"w": 0.5}), r"regularization\['w'\]=0.5: expected terms by the names"),
        (lambda: mz.NonlinearCG(regularization=mz.Tikhonov(1.0)), "NonlinearCG: regularization="),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_what_is_allowed(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_learning_rate_may_be_given_without_its_name():
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Lion, optim.LAMB):
        assert kind(3e-3) == kind(lr=3e-3)
