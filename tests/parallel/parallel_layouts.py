"""Trainings that are spread over stages, tensor parts and replicas, and the same in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import mpizero as mz
from mpizero.layout import SCHEDULES
from mpizero.nn import Layer
from mpizero.types import EVALUATE, Array, Init, ParameterSpec
from tests.parallel.models import part

#: Virtual stages of each schedule.
VIRTUAL = {name: 2 if name == "interleaved" else 1 for name in SCHEDULES}
#: Chunks a stage.
CHUNKS = {name: 2 if name in ("interleaved", "zero_bubble_v") else 1 for name in SCHEDULES}
#: What :func:`known` has been told.
_KNOWN: dict[Any, Any] = {}


class Way(NamedTuple):
    """How a training is spread; all remaining ranks are replicas."""

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    zero: int = 1
    schedule: str = "1f1b"
    more: Mapping[str, Any] = {}

    def settings(self) -> dict[str, Any]:
        found = {"zero_stage": self.zero, "schedule": self.schedule, "virtual_stages": VIRTUAL[self.schedule]}
        return {**found, "context_parallel_size": self.context, **self.more}


#: Not spread at all.
ONE = Way()


@dataclass(frozen=True)
class Case:
    """A training: model, optimizer, batches, and the settings of the configuration."""

    model: Callable[[], Any]
    optimizer: Callable[[], Any] = lambda: mz.AdamW(lr=1e-2)
    batches: Sequence[tuple[Array, Array]] = ()
    loss_scale: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)


class Trained(NamedTuple):
    """What must not depend on the way: the hash of the parameters, and every loss and gradient norm."""

    sha256: str
    losses: list[float]
    norms: list[float | None]


def placed(case: Case, comm: Any, way: Way = ONE, **memory: Any) -> Any:
    """A model spread over ranks, whose configuration is closed with it."""
    config = mz.ShardingConfig(
        comm="self" if comm is None else comm,
        **{"micro_batch": 2, "minimum_parameter_group_size": 1, **case.config, **memory},
    )
    model = mz.HybridShardedModel(case.model(), config, way.pipeline, way.tensor, **way.settings())
    mz.HybridShardedOptimizer(case.optimizer(), config, loss_scale=case.loss_scale).set_model(model)

    def close() -> None:
        type(model).close(model)
        config.close()

    model.close = close  # type: ignore[method-assign]
    return model


def alone(case: Case) -> Any:
    """The same in one process, without any splitting: what all ways are compared with."""
    config = mz.ShardingConfig(comm="self", **{"micro_batch": 2, "minimum_parameter_group_size": 1, **case.config})
    model = mz.DDPModel(case.model(), config)
    mz.DDPOptimizer(case.optimizer(), config, loss_scale=case.loss_scale).set_model(model)
    return model


def steps(model: Any, case: Case, sizes: list[int] | None = None) -> Trained:
    losses, norms = [], []
    for x, y in case.batches:
        losses.append(model.train(*part(model.batch_group, x, y, sizes)))
        norms.append(model.last_step.gradient_norm)
    return Trained(model.parameters_sha256(), losses, norms)


def trained(case: Case, comm: Any, way: Way = ONE, sizes: list[int] | None = None, **memory: Any) -> Trained:
    with placed(case, comm, way, **memory) as model:
        return steps(model, case, sizes)


def trained_alone(case: Case) -> Trained:
    with alone(case) as model:
        return steps(model, case)


def trained_in_tiles(case: Case, tensor: int = 1, context: int = 1) -> Trained:
    """Train in one process that computes so many tiles: what groups of these sizes are compared with, bit by bit."""
    return trained(case, None, tiles={"tensor": tensor, "context": context})


def selected(spec: ParameterSpec, whole: Array) -> Array:
    """What a rank holds of a parameter, by NumPy's indexing, 1-D."""
    if spec.part is None:
        return whole.reshape(-1)
    kept = [i for span in spec.part.ranges for i in range(*span)]
    return whole.take(kept, axis=spec.part.axis).reshape(-1)


def same_within_rounding(found: Trained, expected: Trained, bound: float = 1e-12) -> bool:
    pairs = [*zip(found.losses, expected.losses, strict=True)]
    pairs += [pair for pair in zip(found.norms, expected.norms, strict=True) if None not in pair]
    assert [n is None for n in found.norms] == [n is None for n in expected.norms]
    return all(abs(a - b) <= bound * abs(b) for a, b in pairs)


def of_first(comm: Any, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks: one process trains once, and has the processors meanwhile. Collective."""
    made = make() if comm.rank == 0 else None
    arrived = comm.ibarrier()
    while not arrived.test():
        time.sleep(1e-3)
    return comm.broadcast_object(made)


def known(comm: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function gives rank 0, on all ranks; it is called once in a job. Collective."""
    key = (function, arguments)
    if key not in _KNOWN:
        _KNOWN[key] = of_first(comm, lambda: function(*arguments))
    return _KNOWN[key]


def pipelines(size: int, blocks: int) -> list[Way]:
    """Every pipeline x data with every schedule that has a block for each chunk; ZeRO stages in turn."""
    found = []
    for stages in (s for s in range(2, size + 1) if size % s == 0):
        for schedule in SCHEDULES:
            if stages * CHUNKS[schedule] <= blocks:
                found.append(Way(stages, zero=len(found) % 4, schedule=schedule))
    return found


def texts(count: int, samples: int, seed: int = 0, vocabulary: int = 29, length: int = 7) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(seed)
    shape = (samples, length)
    return [(rng.integers(0, vocabulary, shape), rng.integers(0, vocabulary, shape)) for _ in range(count)]


def points(count: int, samples: int, seed: int = 0, features: int = 6) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(samples, features)), rng.integers(0, 3, samples)) for _ in range(count)]


def gpt(**changes: Any) -> mz.nn.GPT:
    settings: dict[str, Any] = {"dim": 12, "layers": 4, "heads": 2, "sequence": 7, "vocabulary": 29, "dropout": 0.1}
    return mz.nn.GPT(**{**settings, **changes})


def mlp(**changes: Any) -> mz.nn.MLP:
    settings: dict[str, Any] = {"features": 6, "hidden": (7, 5, 8, 6, 5, 7, 4), "outputs": 3, "seed": 4}
    return mz.nn.MLP(**{**settings, **changes})


@dataclass(frozen=True)
class Blocks:
    """A model made of the blocks of another one, some of them exchanged."""

    model: Any
    changes: Mapping[str, Callable[[Any], Any]]

    @property
    def blocks(self) -> dict[str, Any]:
        return {name: self.changes.get(name, _same)(block) for name, block in self.model.blocks.items()}

    @property
    def loss(self) -> Any:
        return self.model.loss

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    @property
    def seed(self) -> int:
        return int(self.model.seed)


def _same(block: Any) -> Any:
    return block


@dataclass(frozen=True)
class Wrapped(Layer):
    """A layer that does what another one does, and says nothing of splitting."""

    layer: Any

    def specs(self) -> Any:
        return self.layer.specs()

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> tuple[Array, Any]:
        return self.layer.forward(params, x, run)

    def backward_input(self, params: Any, cache: Any, dy: Array) -> tuple[Any, Any]:
        return self.layer.backward_input(params, cache, dy)

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        self.layer.backward_weights(params, cache, pending, grads)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.layer.output_shape(shape))


@dataclass(frozen=True)
class Trap(Wrapped):
    """A layer that goes wrong while it is armed: ``armed["what"]`` is "forward", "input", "weights" or "infinite".

    ``armed["first"]`` is the global index of the first sample of the micro-batch that goes wrong.
    """

    armed: dict[str, Any] = field(compare=False, hash=False)

    def _spring(self, what: str, first: int) -> None:
        if self.armed.get("what") == what and first == self.armed["first"]:
            raise ArithmeticError(f"trap in {what} at sample {first}")

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> tuple[Array, Any]:
        self._spring("forward", run.first_sample)
        y, cache = self.layer.forward(params, x, run)
        return y, (cache, run.first_sample)

    def backward_input(self, params: Any, cache: Any, dy: Array) -> tuple[Any, Any]:
        self._spring("input", cache[1])
        return self.layer.backward_input(params, cache[0], dy)

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        self._spring("weights", cache[1])
        self.layer.backward_weights(params, cache[0], pending, grads)
        if self.armed.get("what") == "infinite" and cache[1] == self.armed["first"]:
            first = grads
            while isinstance(first, Mapping):
                first = next(iter(first.values()))
            first.reshape(-1)[-1] = np.inf


def with_traps(model: Any, armed: Mapping[str, dict[str, Any]]) -> Blocks:
    """Exchange the blocks of ``armed`` for traps."""
    return Blocks(model, {name: lambda block, a=switch: Trap(block, a) for name, switch in armed.items()})


@dataclass(frozen=True)
class Product(Layer):
    """Multiply by square matrices, each of the layer's own or tied to one of another block: ``tied`` says by name."""

    width: int
    names: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict, hash=False)

    def own_specs(self) -> Any:
        shape, init = (self.width, self.width), Init("normal", self.width**-0.5)
        return tuple(ParameterSpec(name, shape, init, tied=self.tied.get(name)) for name in self.names)

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> tuple[Array, Any]:
        kept = [x.astype(next(iter(params.values())).dtype)]
        for name in self.names:
            kept.append(np.tanh(kept[-1] @ params[name]))
        return kept[-1], kept

    def backward_input(self, params: Any, cache: Any, dy: Array) -> tuple[Any, Any]:
        pending = []
        for name, y in zip(reversed(self.names), reversed(cache), strict=False):
            pending.append(dy * (1 - y * y))
            dy = pending[-1] @ params[name].T
        return dy, pending

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        for name, x, d in zip(reversed(self.names), reversed(cache[:-1]), pending, strict=True):
            np.matmul(x.T, d, out=grads[name])


@dataclass(frozen=True)
class Chain:
    """A regression model of given blocks."""

    blocks: Mapping[str, Any]
    loss: Any = field(default_factory=mz.nn.MeanSquaredError)
    dtype: Any = np.dtype("float32")
    seed: int = 5


def knotted() -> Chain:
    """Matrices that blocks share in every way: with the next, with a later one, twice in one block, all with one."""
    a, b, c = "first.a", "first.b", "second.c"
    return Chain(
        {
            "first": Product(5, ("a", "b")),
            "second": Product(5, ("c", "a"), {"a": a}),
            "third": Product(5, ("b", "d"), {"b": b}),
            "fourth": Product(5, ("c", "b", "c2"), {"c": c, "b": b, "c2": c}),
            "fifth": Product(5, ("e", "a"), {"a": a}),
            "sixth": Product(5, ("a", "c"), {"a": a, "c": c}),
        }
    )


def vectors(count: int, samples: int, width: int = 5) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(2)
    shape = (samples, width)
    return [(rng.normal(size=shape).astype(np.float32), rng.uniform(-0.5, 0.5, shape)) for _ in range(count)]
