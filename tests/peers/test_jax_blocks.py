"""Blocks written in JAX: their gradients, what they keep between the passes, and their bits on every layout."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, LayoutError, UnsupportedError
from mpizero.layout.flat import nested
from mpizero.types import Run

jax = pytest.importorskip("jax")

from mpizero.adapters.jax import JaxModel  # noqa: E402 - before JAX computes anything
from tests.peers import placing  # noqa: E402

jnp = jax.numpy
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(32, 3)), RNG.normal(size=(32, 1))
TRAINING = Run(training=True, seed=3, count=4)
pytestmark = pytest.mark.usefixtures("wide")


def dense(inputs, outputs):
    return lambda key: {"kernel": 0.3 * jax.random.normal(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def affine(parameters, x):
    return x @ parameters["kernel"] + parameters["bias"]


@jax.jit
def residual(parameters, x):
    return x + jnp.tanh(affine(parameters, x))


def dropped(parameters, x, key):
    y = residual(parameters, x)
    return y if key is None else y * jax.random.bernoulli(key, 0.8, y.shape)


def squares(z, y):
    return jnp.sum((z - y) ** 2)


@cache  # every test compiles it again otherwise
def network(hidden=residual):
    blocks = {"in": (dense(3, 8), affine), **{f"h.{i}": (dense(8, 8), hidden) for i in range(3)}}
    return JaxModel(None, squares, blocks={**blocks, "out": (dense(8, 1), affine)}, seed=3)


def leaves(layer, values):
    """A block's parameters as its layer takes them, each in memory of its own."""
    return nested(dict((spec.name, np.array(value)) for spec, value in zip(layer.specs(), values, strict=True)))


def trained(model, ranks=1, strategy="ddp", **layout):
    return placing.trained(lambda: model, (X, Y), ranks, strategy, micro_batch=4, **layout)


def test_all_layouts_have_the_bits_of_one_process():
    model = network(dropped)
    expected = trained(model)
    for ranks, strategy, layout in (
        (3, "zero2", {}),
        (2, "zero3", {"share_node_memory": False}),
        (4, "zero3", {"ranks_per_node": 1}),
        (4, "zero1", {"pipeline_parallel_size": 2, "schedule": "1f1b"}),
        (4, "zero3", {"pipeline_parallel_size": 2, "schedule": "gpipe"}),
        (4, "zero2", {"pipeline_parallel_size": 2, "schedule": "zero_bubble"}),
        (4, "zero1", {"pipeline_parallel_size": 2, "schedule": "interleaved", "virtual_stages": 2}),
        (4, "zero1", {"pipeline_parallel_size": 4, "schedule": "zero_bubble"}),
    ):
        assert trained(model, ranks, strategy, **layout) == expected, (ranks, strategy, layout)


def test_equal_blocks_are_compiled_once():
    fresh = JaxModel(None, squares, blocks={name: (dense(*s), f) for name, s, f in (
        ("a", (3, 8), affine), ("b", (8, 8), residual), ("c", (8, 8), residual), ("d", (8, 1), affine),
    )})  # fmt: skip
    trained(fresh, 2, "zero1")
    assert fresh.compilations == 3


def test_gradients_are_those_of_the_whole_model():
    model = network()
    named = dict(model.start_values)
    nested = {
        name: {spec.name: named[f"{name}.{spec.name}"] for spec in layer.specs()}
        for name, layer in model.blocks.items()
    }

    def whole(parameters):
        z = affine(parameters["in"], X)
        for i in range(3):
            z = residual(parameters[f"h.{i}"], z)
        return squares(affine(parameters["out"], z), Y)

    loss, weight, gradients = mz.nn.loss_and_gradients(model, named, (X, Y))
    expected = jax.grad(whole)(nested)
    np.testing.assert_allclose(loss, whole(nested), rtol=1e-14)
    assert weight == len(X)
    for name, gradient in gradients.items():
        block, _, leaf = name.rpartition(".")
        np.testing.assert_allclose(gradient, expected[block][leaf], rtol=1e-11, atol=1e-13)


def scaled(parameters, x):
    """Needs a number that is computed from parameters alone in its backward pass."""
    return jnp.tanh(x @ jnp.exp(parameters["kernel"]).T)


@pytest.mark.parametrize("apply", [affine, residual, scaled])
def test_nothing_of_the_parameters_is_kept_between_the_passes(apply):
    kernel, bias = RNG.normal(size=(6, 6)), RNG.normal(size=6)
    values = [kernel] if apply is scaled else [bias, kernel]
    names = {"kernel": kernel} if apply is scaled else {"bias": bias, "kernel": kernel}
    model = JaxModel(None, squares, blocks={"a": ({}, lambda p, x: 2 * x), "b": (names, apply)})
    layer, x, dy = model.blocks["b"], RNG.normal(size=(4, 6)), RNG.normal(size=(4, 6))
    first, again, last = (leaves(layer, values) for _ in range(3))

    def released(tree):
        for array in tree.values():
            array[...] = np.nan

    y, cache = layer.forward(first, x, TRAINING)
    y = np.array(y)
    released(first)
    dx, pending = layer.backward_input(again, cache, dy)
    dx = np.array(dx)
    released(again)
    grads = leaves(layer, [np.full_like(value, np.nan) for value in values])
    layer.backward_weights(last, cache, pending, grads)

    expected, backward = jax.vjp(apply, names, x)
    dparameters, dinput = backward(jnp.asarray(dy))
    np.testing.assert_allclose(y, expected, rtol=1e-13)
    np.testing.assert_allclose(dx, dinput, rtol=1e-12, atol=1e-13)
    for name, found in grads.items():
        np.testing.assert_allclose(found, dparameters[name], rtol=1e-12, atol=1e-13)


def test_the_halves_of_a_backward_pass_share_no_product():
    layer = network().blocks["h.1"]
    params, x, dy = leaves(layer, [np.zeros(8), np.eye(8)]), RNG.normal(size=(4, 8)), np.ones((4, 8))
    _, kept = layer.forward(params, x, TRAINING)
    _, pending = layer.backward_input(params, kept, dy)
    given = [params["bias"], params["kernel"], x]
    program = next(iter(layer.compiled._programs.values()))
    traced = [jax.make_jaxpr(program.forward)(given[:2], [x], None)]
    for half, values in ((program.inputs, [*given, *kept.values, dy]), (program.weights, [*given, *pending])):
        traced.append(jax.make_jaxpr(half.function)([values[number] for number in half.takes]))
    assert [str(each).count("dot_general") for each in traced] == [1, 1, 1]


def test_blocks_take_and_return_trees_with_integers():
    def embedded(parameters, x):
        return {"value": parameters[x["ids"]], "length": x["length"]}

    def mean(parameters, x):
        places = jnp.arange(x["value"].shape[1])[None] < x["length"][:, None]
        return jnp.sum(x["value"] * places[..., None], 1) / x["length"][:, None] + parameters["shift"]

    table, shift = RNG.normal(size=(7, 2)), RNG.normal(size=2)
    model = JaxModel([table, {"shift": shift}], squares, blocks=[embedded, mean], frozen=["1.shift"])
    x = {"ids": RNG.integers(0, 7, (4, 5)), "length": np.array([1, 3, 5, 2])}
    target, caches, z = RNG.normal(size=(4, 2)), [], x
    params = [{"value": table}, {"shift": shift}]
    for (name, layer), p in zip(model.blocks.items(), params, strict=True):
        z, cache = layer.forward(p, z, TRAINING)
        caches.append((name, layer, cache))
    d = model.loss.backward(model.loss.forward(z, target)[2])
    grads = {"0": {"value": np.empty_like(table)}, "1": {"shift": np.zeros(2)}}
    for (name, layer, cache), p in zip(reversed(caches), reversed(params), strict=True):
        d = layer.backward(p, cache, d, grads[name])
    expected = jax.grad(lambda t: squares(mean({"shift": shift}, embedded(t, x)), target))(table)
    np.testing.assert_allclose(grads["0"]["value"], expected, rtol=1e-12)
    assert d is None
    assert not grads["1"]["shift"].any()  # frozen


def test_a_gradient_that_is_none_counts_as_zero():
    model = JaxModel(None, squares, blocks=[({}, lambda p, x: x), (np.eye(3), lambda p, x: (x @ p, x))])
    layer, params = model.blocks["1"], {"value": np.eye(3)}
    _, cache = layer.forward(params, X[:4], TRAINING)
    dx, _ = layer.backward_input(params, cache, (np.ones((4, 3)), None))
    np.testing.assert_array_equal(dx, np.ones((4, 3)))


def test_start_values_are_those_of_init_and_do_not_depend_on_the_rank():
    model = network()
    again = JaxModel(None, squares, blocks={name: (dense(8, 8), residual) for name in ("in", "b")}, seed=3)
    assert list(again.start_values) == ["in.bias", "in.kernel", "b.bias", "b.kernel"]
    assert not np.array_equal(again.start_values["in.kernel"], again.start_values["b.kernel"])
    np.testing.assert_array_equal(model.start_values["h.0.kernel"], again.start_values["b.kernel"])  # the second block


def test_a_loss_layer_of_mpizero_ends_blocks_of_jax():
    model = JaxModel([RNG.normal(size=(3, 4))], mz.nn.CrossEntropy(), blocks=[lambda p, x: x @ p])
    with mz.DDPModel(model, mz.ShardingConfig(comm="self", micro_batch=4)) as sharded:
        y = np.arange(8) % 4
        expected = -jax.nn.log_softmax(X[:8] @ model.start_values["0.value"])[jnp.arange(8), y].sum()
        np.testing.assert_allclose(sharded.evaluate(X[:8], y).loss_sum, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((None, 3), "blocks are pairs"),
        ((None, [affine]), "block '0' is <function affine"),
        (({"a": {}}, {"b": affine}), r"the blocks are \['b'\], parameters are given for \['a'\]"),
        ((None, [({}, affine)]), "there are none"),
        ((None, [({"w": 1}, affine)]), "block '0': 'w' is 1"),
        ((None, [(dense(3, 3), lambda x: x)]), "apply of block '0' is called as"),
        ((None, {"a": ({"b.c": X}, affine), "a.b": ({"c": X}, affine)}), "blocks 'a' and 'a.b' both have 'a.b.c'"),
    ],
)
def test_wrong_blocks_are_named(arguments, told):
    parameters, blocks = arguments
    with pytest.raises(ConfigError, match=told):
        JaxModel(parameters, squares, blocks=blocks)


def test_wrong_functions_are_told_with_their_block():
    def mean(z, y):
        return jnp.mean((z - y) ** 2)

    with pytest.raises(LayoutError, match="a mean over the samples"):
        trained(JaxModel(None, mean, blocks=[(dense(3, 1), affine)]))
    numpy = JaxModel(None, squares, blocks=[(dense(3, 1), lambda p, x: np.asarray(x) @ p["kernel"])])
    with pytest.raises(UnsupportedError, match=r"block '0'.*test_jax_blocks.py:\d+ in <lambda>.*jax.numpy"):
        trained(numpy)
    centred = JaxModel(None, squares, blocks=[(dense(3, 1), lambda p, x: affine(p, x - x.mean(0)))])
    with pytest.raises(LayoutError, match="rows of its output depend on other samples"):
        trained(centred)
    drawing = JaxModel(None, squares, blocks=[(dense(3, 1), lambda p, x: affine(p, x) * np.random.rand())])  # noqa: NPY002
    with pytest.raises(UnsupportedError, match=r"block '0'.*test_jax_blocks.py:\d+ in <lambda>: .* traced again"):
        trained(drawing)
    for loss, told in ((mean, "a mean over the samples"), (lambda z, y: squares(z - z.mean(0), y), "see each other")):
        with (
            pytest.raises(LayoutError, match=told),
            placing.placed(JaxModel(None, loss, blocks=[(dense(3, 1), affine)]), "self", micro_batch=1) as single,
        ):
            single.train(X, Y)
