"""Complex parameters: two real numbers to shards, sums and optimizers, complex arrays to users and in files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import CheckpointError, LayoutError
from mpizero.layout.flat import FlatLayout
from mpizero.nn.arrays import initial_values
from mpizero.nn.layer import Layer
from mpizero.testing import check_model, run_in_threads
from mpizero.types import Init, ParameterSpec, Part
from tests.parallel.models import MEMORIES, layouts, part, sharded, trained
from tests.parallel.parallel_layouts import Chain

#: An odd number of real numbers comes first, so that ranks share complex ones.
SHAPES = {"odd": (3,), "w": (7, 3), "empty": (0, 5), "one": ()}


def start(dtype: str) -> dict[str, Any]:
    rng, real = np.random.default_rng(3), np.empty(0, dtype).real.dtype
    values = {name: rng.normal(size=shape) + 1j * rng.normal(size=shape) for name, shape in SHAPES.items()}
    return {name: np.asarray(v.real, real) if name == "odd" else np.asarray(v, dtype) for name, v in values.items()}


def loss_and_gradients(p: Any, batch: Any) -> Any:
    """The sum of |(x w) one + odd - y|^2, by hand."""
    x, y = batch
    product = x @ p["w"]
    error = product * p["one"] + p["odd"] - y
    gradients = {
        "odd": 2 * error.real.sum(axis=0),
        "w": 2 * x.conj().T @ error * p["one"].conj(),
        "empty": np.zeros((0, 5), p["w"].dtype),
        "one": np.asarray(2 * (error * product.conj()).sum()),
    }
    return float((np.abs(error) ** 2).sum()), gradients, float(len(x))


def in_place(p: Any, batch: Any, gradients: Any) -> Any:
    loss, found, weight = loss_and_gradients(p, batch)
    for name, value in found.items():
        gradients[name][...] = value
    return loss, weight


def model_of(dtype: str = "complex128", *, writes: bool = True) -> mz.FunctionModel:
    function = in_place if writes else loss_and_gradients
    return mz.FunctionModel(start(dtype), function, predict=lambda p, x: x @ p["w"], in_place=writes)


def in_pairs(dtype: str = "complex128") -> mz.FunctionModel:
    """The same model whose parameters are real arrays, with the two parts on the last axis."""
    whole = start(dtype)

    def pairs(values: Any) -> Any:
        return np.ascontiguousarray(values)[..., None].view(values.real.dtype).reshape(*values.shape, 2)

    def loss_and_grad(p: Any, batch: Any) -> Any:
        numbers = {n: v if n == "odd" else v.view(whole[n].dtype).reshape(SHAPES[n]) for n, v in p.items()}
        loss, gradients, weight = loss_and_gradients(numbers, batch)
        return loss, {n: g if n == "odd" else pairs(g) for n, g in gradients.items()}, weight

    return mz.FunctionModel({n: v if n == "odd" else pairs(v) for n, v in whole.items()}, loss_and_grad)


def samples(dtype: str = "complex128") -> Any:
    rng = np.random.default_rng(5)
    return tuple((rng.normal(size=(17, n)) + 1j * rng.normal(size=(17, n))).astype(dtype) for n in (7, 3))


OPTIMIZERS: dict[str, Any] = {
    "AdamW": (mz.AdamW(lr=0.05), {}), "LAMB": (mz.LAMB(lr=0.05), {}),
    "clip": (mz.SGD(lr=0.05), {"clip": 0.3}), "sum": (mz.Lion(lr=0.05), {"accumulate": 2}),
}  # fmt: skip


@cache
def trained_in_pairs(name: str) -> Any:
    optimizer, settings = OPTIMIZERS[name]
    return trained(None, "ddp", in_pairs(), samples(), optimizer, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_every_layout_optimizers_and_norms_see_pairs_of_real_numbers(ranks: int) -> None:
    for number, (strategy, memory) in enumerate(layouts(ranks)):
        name = list(OPTIMIZERS)[(number + ranks) % 4]
        optimizer, settings = OPTIMIZERS[name]
        run = partial(trained, strategy=strategy, model=model_of(), batch=samples(), optimizer=optimizer, **settings)
        found = run_in_threads(ranks, partial(run, **memory))
        assert found == [trained_in_pairs(name)] * ranks, (strategy, memory, name)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_users_see_complex_arrays(dtype: str) -> None:
    model = sharded("zero2", None, model_of(dtype, writes=False))
    optimizer = model.optimizer
    x, y = samples(dtype)
    with model:
        given = start(dtype)
        assert model.parameter_count == 3 + 2 * 22
        for arrays in (model.named_parameters(), given):
            model.load_named(arrays)
            for name, array in model.named_parameters().items():
                assert (array.dtype, array.shape) == (given[name].dtype, SHAPES[name])
                np.testing.assert_array_equal(array, given[name])
        np.testing.assert_array_equal(model.predict(x), x @ given["w"])
        _, gradients, _ = loss_and_gradients(given, (x, y))
        for name, value in model.compute_gradients(x, y, gather=True).named().items():
            assert value.dtype == given[name].dtype
            np.testing.assert_allclose(value, gradients[name] / 17, rtol=1e-4)
        model.train(x, y)
        state = optimizer.state_dict()
        assert state["state"]["exp_avg"]["w"].dtype == dtype
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["state"]["exp_avg_sq"]["one"] == state["state"]["exp_avg_sq"]["one"]
        with pytest.raises(LayoutError, match="parameter 'odd' is of type complex128, not an array of real numbers"):
            model.load_named({**given, "odd": np.ones(3, complex)})


@pytest.mark.slow
def test_files_hold_complex_arrays_which_any_layout_loads(tmp_path: Path) -> None:
    x, y = samples()

    def run(comm: Any, strategy: str, at: int, until: int) -> str:
        with sharded(strategy, comm, model_of(), micro_batch=2, **MEMORIES[at % 2]) as model:
            if at:
                model.load_model(tmp_path / str(at))
            for _ in range(at, until):
                model.train(*part(comm, x, y))
            model.save_model(tmp_path / str(until))
            model.deserialize(model.serialize())
            return str(model.parameters_sha256())

    run_in_threads(4, lambda comm: run(comm, "zero3", 0, 2))
    run_in_threads(3, lambda comm: run(comm, "zero1", 2, 3))
    assert run(None, "ddp", 3, 5) == trained(None, "ddp", model_of(), (x, y), mz.AdamW(lr=1e-2), steps=5)[0]
    with h5py.File(tmp_path / "5" / "state.h5") as file:
        stored = file["parameters/w"]
        assert (stored.shape, stored.dtype) == ((7, 3), np.complex128)
        assert file["optimizer/exp_avg_sq/one"].dtype == np.complex128
        assert file["parameters/odd"].dtype == np.float64
    other = sharded("ddp", None, in_pairs())
    with other, pytest.raises(CheckpointError, match="belongs to another model: .* has shape"):
        other.load_model(tmp_path / "5")


@dataclass(frozen=True)
class Rotate(Layer):
    """A user's layer: real vectors times a complex matrix, then the squared magnitude."""

    features: int
    kind: str = "normal"

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        return (ParameterSpec("gain", (self.features, 5), Init(self.kind, 1.0), complex=True),)

    def forward(self, params: Any, x: Any, run: Any = None) -> Any:
        y = x @ params["gain"]
        return np.ascontiguousarray(np.abs(y) ** 2, x.dtype), (x, y)

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        d = 2 * dy * cache[1]
        return np.ascontiguousarray((d @ params["gain"].conj().T).real), d

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        grads["gain"][...] = cache[0].T @ pending


def blocks(dtype: str) -> Chain:
    """A model of blocks with a complex layer in the middle."""
    layers = {"in": mz.nn.Linear(6, 4), "turn": mz.nn.Checkpointed(Rotate(4)), "out": mz.nn.Linear(5, 3)}
    return Chain(layers, mz.nn.CrossEntropy(), np.dtype(dtype))


def test_own_layers_may_have_complex_parameters() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 6)), rng.integers(0, 3, 8)
    for dtype in ("float32", "float64"):
        assert check_model(blocks(dtype), x[:5].astype(dtype), y[:5]).right

    def run(comm: Any, **axes: Any) -> str:
        config = mz.ShardingConfig(comm=comm, micro_batch=2)
        with config, mz.HybridShardedModel(blocks("float64"), config, **axes) as model:
            for _ in range(2):
                model.train(*part(model.batch_group, x, y))
            assert model.named_parameters()["turn.gain"].dtype == np.complex128
            return str(model.parameters_sha256())

    (expected,) = run_in_threads(1, run)
    for axes in ({"pipeline_parallel_size": 2, "zero_stage": 2}, {"pipeline_parallel_size": 1, "zero_stage": 3}):
        assert set(run_in_threads(4, lambda comm, a=axes: run(comm, **a))) == {expected}


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("w", np.ones((7, 3)), "expected complex64 or complex128; the parameter is complex, so its gradient is dL/dRe"),
        ("odd", np.ones(3, complex), "expected float32 or float64; the gradient of a real loss by a real parameter is"),
    ],
)
def test_a_gradient_of_the_wrong_kind_is_refused(name: str, wrong: Any, told: str) -> None:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        loss, gradients, weight = loss_and_gradients(p, batch)
        return loss, {**gradients, name: wrong}, weight

    model = sharded("zero1", None, mz.FunctionModel(start("complex128"), loss_and_grad))
    with model, pytest.raises(LayoutError, match=told):
        model.train(*samples())


def test_a_part_that_is_not_written_is_found() -> None:
    def only_real(p: Any, batch: Any, gradients: Any) -> Any:
        result = in_place(p, batch, gradients)
        gradients["w"].imag[2] = np.nan
        gradients["w"].imag[2] -= gradients["w"].imag[2]
        return result

    def forgets(p: Any, batch: Any, gradients: Any) -> Any:
        loss, found, weight = loss_and_gradients(p, batch)
        for name, value in found.items():
            (gradients[name].real if name == "w" else gradients[name])[...] = value.real if name == "w" else value
        return loss, weight

    model = sharded("zero2", None, mz.FunctionModel(start("complex128"), forgets, in_place=True))
    with model, pytest.raises(LayoutError, match="has not written the gradient of 'w'"):
        model.train(*samples())
    with sharded("zero2", None, mz.FunctionModel(start("complex128"), only_real, in_place=True)) as model:
        model.train(*samples())
        assert "the gradient of 'w' is not finite" in model.last_step.skipped


def test_the_conjugate_of_a_gradient_is_called_by_its_name() -> None:
    def conjugate(p: Any, batch: Any) -> Any:
        loss, gradients, weight = loss_and_gradients(p, batch)
        return loss, {**gradients, "w": gradients["w"].conj()}, weight

    x, y = samples()
    assert check_model(model_of(), x[:6], y[:6]).right
    assert check_model(model_of("complex64"), x[:6].astype("complex64"), y[:6].astype("complex64")).right
    with pytest.raises(mz.errors.ModelCheckError, match="gradient of 'w': .* its conjugate, which JAX returns"):
        check_model(mz.FunctionModel(start("complex128"), conjugate), x[:6], y[:6])


def test_start_values_are_those_of_complex_numbers() -> None:
    for kind, check in (
        ("ones", lambda z: (z == 1).all()),
        ("zeros", lambda z: (z == 0).all()),
        ("normal", lambda z: 0.9 < np.sqrt((np.abs(z) ** 2).mean()) / 0.5 < 1.1 and abs(np.mean(z**2)) < 0.03),
        ("uniform", lambda z: 0.4 < np.abs(z.imag).max() <= 0.5 and 0.4 < np.abs(z.real).max() <= 0.5),
    ):
        spec = ParameterSpec("w", (40, 41), Init(kind, 0.5), complex=True)
        whole = np.empty(spec.size)
        initial_values(spec, 1, 0, spec.size, whole)
        assert check(spec.view(whole)), kind
        half = np.empty(101)
        initial_values(spec, 1, 333, 434, half)
        np.testing.assert_array_equal(half, whole[333:434])


def test_a_complex_parameter_is_neither_split_nor_tied_to_a_real_one() -> None:
    spec = ParameterSpec("w", (2, 3), complex=True, part=Part((4, 3), 0, ((0, 2),)))
    with pytest.raises(LayoutError, match="'a.w' is complex: a tensor group cannot split it"):
        FlatLayout.build({"a": [spec]})
    with pytest.raises(LayoutError, match="'b.w' is real, its target 'a.w' is complex"):
        FlatLayout.build({"a": [ParameterSpec("w", (2,), complex=True)], "b": [ParameterSpec("w", (2,), tied="a.w")]})
