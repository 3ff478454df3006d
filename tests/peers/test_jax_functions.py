"""A loss of JAX as a model: its names, its errors, how often it is compiled, and its training against optax."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, LayoutError, UnsupportedError
from mpizero.testing import check_model

jax = pytest.importorskip("jax")

from mpizero.adapters.jax import JaxModel  # noqa: E402 - before JAX computes anything
from mpizero.adapters.jax import function as xla_threads  # noqa: E402
from tests.peers import placing  # noqa: E402

jnp = jax.numpy
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)), RNG.normal(size=(24, 2))
pytestmark = pytest.mark.usefixtures("wide")


def perceptron(dtype="float64"):
    rng = np.random.default_rng(1)
    layers = [
        {"kernel": rng.normal(0, 0.5, shape).astype(dtype), "bias": np.zeros(shape[1], dtype)}
        for shape in ((3, 5), (5, 2))
    ]
    return {"layers": layers, "scale": np.ones((), dtype)}


def outputs(parameters, x):
    first, second = parameters["layers"]
    return (jnp.tanh(x @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]) * parameters["scale"]


def squares(parameters, x, y):
    return jnp.sum((outputs(parameters, x) - y) ** 2)


def dropped(parameters, x, y, key):
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.7, x.shape)
    return squares(parameters, x, y)


def trained(model, ranks=1, strategy="zero1", **layout):
    """Return the hash of the parameters, and the model's parameters by name."""
    given = {"micro_batch": 4, "optimizer": mz.Adam(lr=0.01), "steps": 3} | layout
    return placing.trained(
        lambda: model, (X, Y), ranks, strategy,
        result=lambda placed, *_: (placed.parameters_sha256(), placed.named_parameters()), **given,
    )  # fmt: skip


def test_parameters_are_named_by_their_paths():
    assert list(JaxModel(perceptron(), squares).parameters) == [
        "layers.0.bias", "layers.0.kernel", "layers.1.bias", "layers.1.kernel", "scale",
    ]  # fmt: skip
    assert list(JaxModel(np.ones(3), lambda w, x, y: jnp.sum(x @ w)).parameters) == ["value"]


def test_the_model_is_right():
    model = JaxModel(perceptron(), squares, predict=outputs)
    assert check_model(model, X[:6], Y[:6]).right


def test_all_strategies_have_the_bits_of_one_process():
    model = JaxModel(perceptron(), dropped, seed=3, frozen=["scale"])
    expected = trained(model)[0]
    cases = [(2, "ddp"), (3, "zero2"), (2, "zero3")]
    assert [trained(model, ranks, strategy)[0] for ranks, strategy in cases] == [expected] * 3
    assert trained(model, 2, "zero3", share_node_memory=False)[0] == expected


def test_the_gradient_is_compiled_once_for_each_number_of_samples():
    model = JaxModel(perceptron(), squares)
    with mz.ZeRO1Model(model, mz.ShardingConfig(comm="self", micro_batch=5), optimizer=mz.SGD(lr=0.01)) as sharded:
        for _ in range(3):
            sharded.train(X, Y)  # grains of 5 samples, and one of 4
    assert model.compilations == 2


def test_weights_trees_and_predictions():
    def loss(parameters, x, y):
        error = jnp.sum((outputs(parameters, x["value"]) - y) ** 2, axis=1)
        return jnp.sum(jnp.where(x["mask"], error, 0)), jnp.sum(x["mask"])

    model = JaxModel(perceptron(), loss, predict=lambda p, x: {"found": outputs(p, x["value"])})
    x = {"value": X, "mask": np.arange(24) % 3 > 0}
    with mz.DDPModel(model, mz.ShardingConfig(comm="self", micro_batch=4)) as sharded:
        found = sharded.evaluate(x, Y)
        assert found.weight == 16
        prediction = sharded.predict(x)["found"]
        prediction[0] = 0  # an array of the caller's own
        expected = np.asarray(outputs(perceptron(), X))
        np.testing.assert_allclose(prediction[1:], expected[1:], rtol=1e-12)
        errors = ((expected - Y) ** 2).sum(1)[x["mask"]]
        np.testing.assert_allclose(found.loss_sum, errors.sum(), rtol=1e-12)


def test_float32_stays_float32():
    kinds = []

    def loss(parameters, x, y):
        kinds.append((x.dtype, y.dtype, squares(parameters, x, y).dtype))
        return squares(parameters, x, y)

    JaxModel(perceptron("float32"), loss).loss_and_grad(JaxModel(perceptron("float32"), loss).parameters, (X, Y))
    assert (
        kinds[-1] == (np.dtype("float32"),) * 3
    )  # of the trace that is compiled; the first grain is checked in double


def test_training_follows_optax():
    optax = pytest.importorskip("optax")
    start, theirs = perceptron(), optax.sgd(0.01, momentum=0.9)
    found = trained(JaxModel(start, squares), 2, "zero2", optimizer=mz.SGD(lr=0.01, momentum=0.9), steps=50)[1]

    @jax.jit
    def step(parameters, state):
        gradients = jax.grad(lambda p: squares(p, X, Y) / len(X))(parameters)
        updates, state = theirs.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = jax.tree.map(jnp.asarray, start)
    state = theirs.init(parameters)
    for _ in range(50):
        parameters, state = step(parameters, state)
    expected = dict(zip(found, jax.tree.leaves(parameters), strict=True))
    apart = sum(float(np.sum((found[n] - expected[n]) ** 2)) for n in found)
    assert (apart / sum(float(np.sum(v**2)) for v in expected.values())) ** 0.5 <= 1e-11


def branching(parameters, x, y):
    return squares(parameters, x, y) if jnp.sum(x) > 0 else 0.0


def drawing(parameters, x, y):
    return squares(parameters, x * np.random.rand(), y)  # noqa: NPY002


def masked_mean(parameters, x, y):
    weights = jnp.where(x[:, 0] > 0, 1.0, 0.1)
    return jnp.sum(weights * jnp.sum((outputs(parameters, x) - y) ** 2, 1)) / jnp.sum(weights)


def small_penalty(parameters, x, y):
    return squares(parameters, x, y) + 1e-5 * jnp.sum(parameters["layers"][0]["kernel"] ** 2)


WRONG_LOSSES = {
    "mean": (lambda p, x, y: jnp.mean((outputs(p, x) - y) ** 2), LayoutError, "a mean .*: return their sum"),
    "masked mean": (masked_mean, LayoutError, "a mean over the samples"),
    "small penalty": (small_penalty, LayoutError, "a term that does not depend on the samples"),
    "penalty": (lambda p, x, y: squares(p, x, y) + 1.0, LayoutError, "a term that does not depend on the samples"),
    "batch": (lambda p, x, y: squares(p, x - x.mean(0), y), LayoutError, "samples that see each other"),
    "weight": (lambda p, x, y: (squares(p, x, y), 1.0), LayoutError, "a weight that does not grow"),
    "vector": (lambda p, x, y: jnp.sum(outputs(p, x), 1), LayoutError, r"of shape \(\d,\) as the loss"),
    "nothing": (lambda p, x, y: None, LayoutError, "returned None as the loss"),
    "complex": (lambda p, x, y: squares(p, x, y) * 1j, LayoutError, r"a number of type complex\d+ as the loss"),
    "three": (lambda p, x, y: (squares(p, x, y), 1.0, 2.0), LayoutError, "returned 3 values"),
    "float()": (lambda p, x, y: float(squares(p, x, y)), UnsupportedError, "keep values as arrays"),
    "numpy": (lambda p, x, y: np.sum(np.tanh(x)), UnsupportedError, r"test_jax_functions.py:\d+ in .*jax.numpy"),
    "if": (branching, UnsupportedError, r"test_jax_functions.py:\d+ in branching.*jax.lax.cond"),
    "random": (drawing, UnsupportedError, r"test_jax_functions.py:\d+ in drawing: .*numpy.random"),
}


#: Of these the numbers decide, which depend on the rounding and on the size of a grain.
BY_NUMBERS = ("mean", "masked mean", "small penalty", "penalty", "batch", "weight")


@pytest.mark.parametrize(
    ("name", "dtype", "micro_batch"),
    [*((name, "float32", 1) for name in WRONG_LOSSES), *((name, "float64", 4) for name in BY_NUMBERS)],
)
def test_a_wrong_loss_is_told_with_its_line_and_the_way_out(name, dtype, micro_batch):
    loss, kind, told = WRONG_LOSSES[name]
    with pytest.raises(kind, match=told) as caught:
        trained(JaxModel(perceptron(dtype), loss), micro_batch=micro_batch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({}, "hold no arrays"),
        ({"w": 1.5}, r"'w' is 1.5 \(float\), not an array"),
        ({"w": np.arange(3)}, "'w' is of type int64"),
        ({"w": np.ones(3, "float16")}, "'w' is of type float16"),
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, r"\['a'\]\['b'\] and \['a.b'\] would both be named 'a.b'"),
        ({1: np.ones(1), "b": np.ones(1)}, "are no pytree"),
        ({"a": np.ones(1), "b": np.ones(1, "float32")}, "all parameters must be float32 or complex64, or all"),
    ],
)
def test_wrong_parameters_are_named(parameters, told):
    with pytest.raises(ConfigError, match=told):
        JaxModel(parameters, squares)


def test_precision_that_jax_would_lose_is_told():
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(
        ConfigError, match="'layers.0.bias' is float64, but JAX would compute in 32 bits: call jax.config"
    ):
        JaxModel(perceptron(), squares)
    model = JaxModel({"table": np.ones((3, 2), "float32")}, lambda p, x, y: jnp.sum(p["table"][x % 3]))
    with pytest.raises(DataError, match="which JAX would cut to 32 bits"):
        model.loss_and_grad(model.parameters, (np.array([2**40]), Y[:1]))


def test_a_loss_that_cannot_be_called_and_one_that_needs_its_key_in_evaluate_are_told():
    with pytest.raises(ConfigError, match=r"called as loss\(parameters, x, y\)"):
        JaxModel(perceptron(), lambda parameters, x: 0.0)
    model = JaxModel(perceptron(), lambda p, x, y, key: squares(p, x * jax.random.bernoulli(key, 0.5, x.shape), y))
    with pytest.raises(TypeError) as caught:
        model.loss(model.parameters, (X, Y))
    assert "key is None in evaluate" in caught.value.__notes__[0]


def test_xla_computes_with_one_thread_and_is_refused_with_more():
    jnp.zeros(1).block_until_ready()
    assert xla_threads.running_threads() == 1
    with pytest.raises(ConfigError, match=r"started with 1 threads on this rank, the configuration has threads=0"):
        xla_threads.require_threads(0)


def test_complex_parameters_descend_by_the_conjugate_of_the_gradient_of_jax():
    rng = np.random.default_rng(2)
    waves, start = rng.normal(size=(24, 3)) + 1j * rng.normal(size=(24, 3)), np.array([1j, 2, 0.5 - 1j])
    target = waves @ np.array([1, 1j, 2 - 1j])

    def loss(parameters, x, y):
        return jnp.sum(jnp.abs(x @ parameters["w"] * parameters["gain"] - y) ** 2)

    function = JaxModel({"w": start, "gain": np.ones(())}, loss)
    blocks = JaxModel([{"w": start, "gain": np.ones(())}], lambda z, y: jnp.sum(jnp.abs(z - y) ** 2), blocks=[
        lambda p, x: x @ p["w"] * p["gain"]])  # fmt: skip
    assert check_model(function, waves[:4], target[:4]).right
    for model in (function, blocks):
        with mz.ZeRO1Model(model, mz.ShardingConfig(comm="self", micro_batch=4), optimizer=mz.SGD(0.05)) as sharded:
            for _ in range(100):
                sharded.train(waves, target)
            found = list(sharded.named_parameters().values())
            np.testing.assert_allclose(found[0] * found[1], [1, 1j, 2 - 1j], atol=1e-6)


def masked(parameters, x, y):
    """A mean over what is known, times the number of samples: right only where all know equally much."""
    known = jnp.where(jnp.isnan(y), 0.0, 1.0)
    error = (outputs(parameters, x) - jnp.nan_to_num(y)) ** 2 * known
    return jnp.sum(error) / jnp.sum(known) * len(x)


@pytest.mark.parametrize("first", [1.0, np.nan])
def test_a_first_grain_that_adds_up_by_chance_or_is_no_number_does_not_hide_the_next(first):
    x, y = np.random.default_rng(0).normal(size=(4, 3)), np.ones((4, 2))
    y[0], y[3, 1] = first, np.nan
    told = pytest.raises(LayoutError, match=r"masked at test_jax_functions.py:\d+\): the loss of")
    with placing.placed(JaxModel(perceptron(), masked), "self") as placed, told:
        placed.train(x, y)


def test_rounding_to_16_bits_is_no_difference():
    def coarse(parameters, x, y):
        narrow = jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.bfloat16), parameters)
        return jnp.sum((outputs(narrow, x.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2)

    trained(JaxModel(perceptron("float32"), coarse), micro_batch=4)
    mean = JaxModel(perceptron("float32"), lambda p, x, y: coarse(p, x, y) / len(x))
    with pytest.raises(LayoutError, match="a mean over the samples"):
        trained(mean, micro_batch=4)


def test_an_optimizer_of_optax_says_what_to_take():
    optax = pytest.importorskip("optax")
    with pytest.raises(TypeError, match=r"cannot be sharded: take mz.SGD, mz.Adam"):
        mz.distribute(JaxModel(perceptron(), squares), optax.adam(1e-2), mesh=mz.Mesh("self"))
