"""Small models with everything that is hard to shard: tied, frozen, zero-size and prime-sized tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import mpizero as mz
from mpizero.testing import run_in_threads
from mpizero.types import Array

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MEMORIES: tuple[dict[str, Any], ...] = ({}, {"share_node_memory": False}, {"ranks_per_node": 2})


def gpt(**changes: Any) -> mz.nn.GPT:
    settings: dict[str, Any] = {"dim": 12, "layers": 2, "heads": 2, "sequence": 8, "vocabulary": 31, "dropout": 0.1}
    return mz.nn.GPT(**{**settings, **changes})


def tokens(samples: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 31, (samples, 8)), rng.integers(0, 31, (samples, 8))


#: The class of each strategy, which has more members than what mz.distribute makes.
KINDS: dict[str, type[mz.ShardedModelBase]] = {
    "ddp": mz.DDPModel, "zero1": mz.ZeRO1Model, "zero2": mz.ZeRO2Model, "zero3": mz.ZeRO3Model, "fsdp": mz.FSDPModel
}  # fmt: skip
PRIVATE: dict[str, Any] = {"share_node_memory": False}


def layouts(size: int) -> list[tuple[str, dict[str, Any]]]:
    """Pairs of strategy and memory: all occur in jobs of 1, 2, 3, 4 and 8 ranks together, each strategy in each job.

    On two ranks each strategy shares memory and does not; in larger jobs most have one kind of memory.
    """
    kinds = {1: ("0", "1", "2", "0"), 2: ("01",) * 4, 3: ("01", "2", "0", "02"), 4: ("1", "2", "2", "0")}
    chosen = zip(STRATEGIES, kinds.get(size, ("2", "0", "1", "2")), strict=True)
    return [(strategy, MEMORIES[int(kind)]) for strategy, digits in chosen for kind in digits]


def sharded(strategy: str, comm: Any, model: Any = None, optimizer: Any = None, **settings: Any) -> Any:
    """A placed model of its strategy's class, whose configuration is closed with it."""
    config = mz.ShardingConfig(comm="self" if comm is None else comm, **{"minimum_parameter_group_size": 1, **settings})
    chosen = optimizer if optimizer is not None else mz.AdamW(lr=1e-2)
    placed = KINDS[strategy](model if model is not None else mlp(), config, optimizer=chosen)

    def close() -> None:
        type(placed).close(placed)
        config.close()

    placed.close = close  # type: ignore[method-assign]
    return placed


def trained(
    comm: Any, strategy: str, model: Any, batch: tuple[Any, Any], optimizer: Any = None, steps: int = 3, **settings: Any
) -> tuple[str, list[float]]:
    """Train some steps on a global batch, two samples a grain; return the parameters' hash and the losses."""
    with sharded(strategy, comm, model, optimizer, **{"micro_batch": 2, **settings}) as placed:
        losses = [placed.train(*part(comm, *batch)) for _ in range(steps)]
        return str(placed.parameters_sha256()), losses


def same_on_layouts(ranks: int, run: Callable[..., Any], expected: Any) -> None:
    """Require that ``run(comm, strategy=..., **memory)`` finds the same on the threads of every layout."""
    for strategy, memory in layouts(ranks):
        found = run_in_threads(ranks, partial(run, strategy=strategy, **memory))
        assert found == [expected] * ranks, (strategy, memory)


class Signum:
    """A user's own optimizer: the sign of a running mean, with a state made by its first update."""

    def update(self, params: Array, grads: Array, state: Any) -> None:
        m = state.setdefault("m", np.zeros_like(params))
        m += (grads - m) * params.dtype.type(0.1)
        params -= params.dtype.type(0.01) * np.sign(m)


def mlp(**changes: Any) -> mz.nn.MLP:
    settings: dict[str, Any] = {"features": 6, "hidden": (7, 5), "outputs": 3, "dtype": "float32", "seed": 4}
    return mz.nn.MLP(**{**settings, **changes})


def state_of(model: Any) -> tuple[Any, ...]:
    """What a step that is not made leaves as it was: parameters, state and number of steps."""
    updater = model._engine.updater
    slots = {slot: values.tobytes() for slot, values in updater.state.items()}
    return model.parameters_sha256(), updater.step_count, slots


def step_whose_sum_overflows(comm: Any) -> tuple[Any, Array]:
    """Take a step whose grains' gradients are finite in float32 (3e38 * 0.6) and whose sum is not.

    Returns what the step told, and the parameters after it, which were zeros.
    """
    with sharded("zero1", comm, mlp(hidden=(), task="regression", outputs=1), micro_batch=1) as model:
        model.set_parameters(np.zeros(7, np.float32))
        model._engine.bind(model.optimizer.wrapped_optimizer, mz.DynamicLossScale(initial=1.0))
        model.train(*part(comm, np.ones((2, 6), np.float32), np.full((2, 1), 1.0e38, np.float32)))
        return model.last_step, model.get_parameters()


def points(samples: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, 6)).astype(np.float32), rng.integers(0, 3, samples)


def ten(poison: Any = None) -> mz.FunctionModel:
    """Ten parameters in one tensor; the loss of a sample is w . x. ``poison(x)`` may raise or change the gradient."""

    def loss_and_grad(p: Mapping[str, Array], batch: tuple[Any, Any]) -> tuple[float, dict[str, Array], float]:
        x, _ = batch
        g = x.sum(0)
        return float((x @ p["w"]).sum()), {"w": g if poison is None else poison(x, g)}, float(len(x))

    return mz.FunctionModel({"w": np.arange(10.0)}, loss_and_grad, predict=lambda p, x: x @ p["w"])


#: Shapes and number of the parameters of :func:`echo`.
ECHO_SHAPES, ECHO_SIZE = {"a": (37, 5), "b": (211,)}, 37 * 5 + 211


def echo() -> mz.FunctionModel:
    """A model whose gradient is what the samples say, whatever the parameters are: sums are known.

    A sample weighs 1 and its target.
    """

    def loss_and_grad(p: Mapping[str, Array], batch: tuple[Any, Any]) -> tuple[float, dict[str, Array], float]:
        x, y = batch
        flat = x.sum(0)
        return float(flat.sum()), {"a": flat[:185].reshape(37, 5), "b": flat[185:]}, float((1 + y).sum())

    return mz.FunctionModel({name: np.zeros(shape, np.float32) for name, shape in ECHO_SHAPES.items()}, loss_and_grad)


def echoed(seed: int, samples: int) -> tuple[Array, Array]:
    """Gradients of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 2, ECHO_SIZE)
    return (rng.standard_normal((samples, ECHO_SIZE)) * sizes).astype(np.float32), np.zeros(samples)


def hard_function(dtype: str = "float64") -> mz.FunctionModel:
    """A black box with a frozen, an empty and prime-sized parameters: (w x + b * scale)^2, all samples apart."""
    rng = np.random.default_rng(3)
    parameters = {
        "w": rng.normal(size=(7, 11)).astype(dtype),
        "nothing": np.zeros((0, 5), dtype),
        "scale": rng.normal(size=13).astype(dtype),
        "b": rng.normal(size=13).astype(dtype),
        "one": np.ones((), dtype),
    }

    def loss_and_grad(p: Mapping[str, Array], batch: tuple[Any, Any]) -> tuple[float, dict[str, Array], float]:
        x, y = batch
        error = x @ p["w"] - y
        offset = p["b"] * p["scale"] * p["one"]
        loss = float((error**2).sum() / 2 + len(x) * (offset**2).sum() / 2)
        return (
            loss,
            {
                "w": x.T @ error,
                "nothing": np.zeros((0, 5), dtype),
                "scale": len(x) * offset * p["b"] * p["one"],
                "b": len(x) * offset * p["scale"] * p["one"],
                "one": np.asarray(len(x) * (offset * p["b"] * p["scale"]).sum(), dtype),
            },
            float(len(x)),
        )

    return mz.FunctionModel(parameters, loss_and_grad, predict=lambda p, x: x @ p["w"], frozen=["scale"])


def vectors(samples: int, dtype: str = "float64") -> tuple[Array, Array]:
    rng = np.random.default_rng(5)
    return rng.normal(size=(samples, 7)).astype(dtype), rng.normal(size=(samples, 11)).astype(dtype)


def part(comm: Any, x: Array, y: Array, sizes: list[int] | None = None) -> tuple[Array, Array]:
    """This rank's samples of a global batch: equal parts, or parts of given sizes."""
    if comm is None:
        return x, y
    equal = [len(x) * r // comm.size for r in range(comm.size + 1)]
    cuts = equal if sizes is None else [0, *np.cumsum(sizes).tolist()]
    mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
    return x[mine], y[mine]


def require_saved(path: Path, parameters: dict[str, Array], state: dict[str, Any]) -> None:
    """Require that a checkpoint's file holds the whole ``parameters`` and the optimizer's ``state_dict``, by name."""
    with h5py.File(path) as file:
        for name, values in parameters.items():
            np.testing.assert_array_equal(file["parameters"][name], values)
        for slot, arrays in state["state"].items():
            for name, values in arrays.items():
                np.testing.assert_array_equal(file["optimizer"][slot][name], values)
