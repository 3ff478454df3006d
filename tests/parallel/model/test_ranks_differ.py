"""Whatever one rank has that the others have not is told in one line, on all ranks, before they do anything."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero._util.text import notice_once
from mpizero.errors import ConfigError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.models import gpt, mlp

Place = Callable[[Any, bool], object]


class Blocks:
    """A model of blocks as users write them."""

    dtype = np.dtype(np.float32)
    seed = 0

    def __init__(self, rate: float, loss: Any = None) -> None:
        layers = {
            f"encoder.{i}": mz.nn.TransformerBlock(8, 2, dropout=rate if i == 2 else 0.1, site=3 * i) for i in range(3)
        }
        self.blocks, self.loss = layers, loss or mz.nn.MeanSquaredError()


class Own:
    """An optimizer as users write them."""

    slots = ("m",)
    scale = 1.0

    def __init__(self) -> None:
        self._seen = object()

    def update(self, params: Any, grads: Any, state: Any) -> None:
        state["m"] += grads
        params -= 0.1 * self.scale * state["m"]


class Faster(Own):
    scale = 2.0


class Wave(mz.nn.Layer):
    """A layer without parameters, which is no dataclass."""

    def __init__(self, frequency: float) -> None:
        self.frequency = frequency

    def forward(self, params: Any, x: Any, run: Any = None) -> Any:
        return np.sin(self.frequency * x), x

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy * self.frequency * np.cos(self.frequency * cache), None


def squares(scale: float = 1.0, table: Any = None) -> Any:
    def loss_and_grad(parameters: Any, batch: Any) -> Any:
        x, _ = batch
        return scale * float((x @ parameters["w"]).sum()), {"w": scale * x.sum(0)}, float(len(x) + 0 * (table is None))

    return loss_and_grad


def cubes(parameters: Any, batch: Any) -> Any:
    return 0.0, {"w": parameters["w"] ** 3}, 1.0


def black_box(function: Any = None, frozen: Any = (), names: str = "wv", w: float = 0.0) -> Any:
    start = {"w": np.full(3, w), "v": np.zeros(2)}
    return mz.FunctionModel({name: start[name] for name in names}, function or squares(), frozen=frozen)


def model(made: Callable[[bool], Any], strategy: type = mz.ZeRO1Model) -> Place:
    return lambda comm, odd: strategy(made(odd), mz.ShardingConfig(comm=comm))


def config(**settings: Any) -> Place:
    """Rank 0 to the last but one take the default, the last one ``settings``."""
    return lambda comm, odd: mz.ZeRO2Model(mlp(), mz.ShardingConfig(comm=comm, **(settings if odd else {})))


def mesh(settings: Any = None, **sizes: Any) -> Place:
    return lambda comm, odd: mz.distribute(
        mlp(), None, mesh=mz.Mesh(comm, **(sizes if odd else {})), config=settings if odd else None
    )


def kind(usual: Callable[[Any, Any], Any], other: Callable[[Any, Any], Any]) -> Place:
    return lambda comm, odd: (other if odd else usual)(gpt(), mz.ShardingConfig(comm=comm))


def optimizer(made: Callable[[bool], Any], wrapper: Any = mz.ZeRO2Optimizer, strategy: Any = mz.ZeRO2Model) -> Place:
    def bind(comm: Any, odd: bool) -> None:
        settings = mz.ShardingConfig(comm=comm)
        bound = wrapper(made(odd), settings)
        with strategy(mlp(), settings) as placed:
            bound.set_model(placed)

    return bind


def options(comm: Any, odd: bool) -> None:
    settings = mz.ShardingConfig(comm=comm)
    bound = mz.ZeRO2Optimizer(mz.SGD(), settings, options=mz.OptimizationOptions(epochs=3 if odd else 2))
    with mz.ZeRO2Model(mlp(), settings) as placed:
        bound.set_model(placed)
        bound.optimize((np.zeros((8, 6), np.float32), np.zeros(8, int)))


#: What one line says, with {0} for the ranks that agree and {1} for the one that does not.
CASES: dict[str, Place] = {
    "seed of the model 0 {0}, 7 {1}": model(lambda odd: gpt(seed=7 * odd)),
    "dropout of block 'encoder.2' 0.1 {0}, 0.2 {1}": model(lambda odd: Blocks(0.1 + 0.1 * odd)),
    "the class of the model ": model(lambda odd: mlp() if odd else gpt()),
    "the loss MeanSquaredError {0}, CrossEntropy {1}": model(
        lambda odd: Blocks(0.1, mz.nn.CrossEntropy() if odd else mz.nn.MeanSquaredError())
    ),
    "layers['1'].frequency of block 'a' 1.0 {0}, 2.0 {1}": model(
        lambda odd: waves(mz.nn.Linear(4, 4), Wave(1.0 + odd))
    ),
    "loss_and_grad of the model squares.<locals>.loss_and_grad at": model(
        lambda odd: black_box(cubes if odd else squares())
    ),
    "loss_and_grad.table of the model int8 array of shape (2,) [0, 1] {0}, int8 array of shape (2,) [1, 2] {1}": model(
        lambda odd: black_box(squares(table=np.arange(2, dtype=np.int8) + np.int8(odd)))
    ),
    "frozen of the model {{}} {0}, {{'v'}} {1}": model(lambda odd: black_box(frozen=("v",) if odd else ())),
    "w of the start values float64 array of shape (3,) ": model(lambda odd: black_box(w=0.5 + odd)),
    "the order of parameters ['w', 'v'] {0}, ['v', 'w'] {1}": model(  # as of a dict made from a set
        lambda odd: black_box(names="vw" if odd else "wv")
    ),
    "strategy zero3 {0}, hybrid {1}": kind(mz.ZeRO3Model, mz.HybridShardedModel),
    "strategy tensor {0}, pipeline {1}": kind(mz.TensorParallelModel, mz.PipelineParallelModel),
    "zero_stage of the parallel layout 1 {0}, 3 {1}": kind(
        mz.HybridShardedModel, functools.partial(mz.HybridShardedModel, zero_stage=3)
    ),
    "cuts of the parallel layout (1,) {0}, (2,) {1}": lambda comm, odd: mz.HybridShardedModel(
        gpt(), mz.ShardingConfig(comm=comm), 3, cuts=[1 + odd]
    ),
    "share_node_memory of ShardingConfig True {0}, False {1}": config(share_node_memory=False),
    "pipeline of Mesh 1 {0}, 3 {1}": mesh(pipeline=3),
    "timeout of Mesh 600.0 {0}, 5.0 {1}": mesh(timeout=5.0),
    "clip of Config None {0}, 2.0 {1}": mesh(mz.Config(clip=2.0)),
    "bad_steps.limit of ShardingConfig 5 {0}, 3 {1}": config(bad_steps=mz.BadSteps(limit=3)),
    "device of ShardingConfig 'cpu' {0}, 'cuda' {1}": config(device="cuda"),
    "learning rate 0.1 {0}, 0.2 {1}": optimizer(lambda odd: mz.AdamW(lr=0.1 + 0.1 * odd)),
    "groups[0].lr_scale of the optimizer 1.0 {0}, 0.5 {1}": optimizer(
        lambda odd: mz.SGD(groups=[mz.ParameterGroup("output.*", lr_scale=0.5 if odd else 1.0)])
    ),
    "lr.code.constants of the optimizer (None, 0.1, 1) {0}, (None, 0.2, 1) {1}": optimizer(
        lambda odd: mz.SGD(lr=(lambda step: 0.2 / (step + 1)) if odd else (lambda step: 0.1 / (step + 1)))
    ),
    "the optimizer Own {0}, Faster {1}": optimizer(lambda odd: Faster() if odd else Own()),
    "the loss scale None {0}, DynamicLossScale {1}": optimizer(
        lambda odd: mz.DynamicLossScale() if odd else None,
        lambda scale, c: mz.ZeRO2Optimizer(mz.SGD(), c, loss_scale=scale),
    ),
    "every 4 {0}, 8 {1}": optimizer(
        lambda odd: odd, lambda odd, c: mz.LocalSGDOptimizer(mz.SGD(), c, every=8 if odd else 4), mz.DDPModel
    ),
    "the class of the sharded optimizer DDPOptimizer {0}, LocalSGDOptimizer {1}": optimizer(
        lambda odd: odd, lambda odd, c: (mz.LocalSGDOptimizer if odd else mz.DDPOptimizer)(mz.SGD(), c), mz.DDPModel
    ),
    "epochs of the options of optimize 2 {0}, 3 {1}": options,
}  # fmt: skip


def waves(*layers: Any) -> Any:
    made = Blocks(0.1)
    made.blocks = {"a": mz.nn.Sequential(layers)}
    return made


def found_by(comm: Any, place: Place) -> str:
    """The error of a rank, of which the last one is odd."""
    try:
        place(comm, comm.rank == comm.size - 1)
    except ConfigError as error:
        return str(error)
    return "nothing"


def expected(text: str, size: int) -> str:
    usual = "on rank 0" if size == 2 else f"on ranks 0-{size - 2}"
    return f"ranks differ: {text.format(usual, f'on rank {size - 1}')}"


@pytest.mark.parametrize("text", CASES)
def test_what_differs_is_told_on_all_ranks_in_one_line(text: str) -> None:
    answers = run_in_threads(3, lambda comm: found_by(comm, CASES[text]))
    assert len(set(answers)) == 1
    assert answers[0].startswith(expected(text, 3))
    assert "\n" not in answers[0]


@pytest.mark.mpi(min_size=2)
def test_the_same_over_mpi_also_among_some_of_the_ranks(world: Any) -> None:
    text = "learning rate 0.1 {0}, 0.2 {1}"
    assert found_by(world, CASES[text]).startswith(expected(text, world.size))
    with world.split(0 if world.size < 4 or world.rank < 2 else 1) as group:
        assert found_by(group, CASES[text]).startswith(expected(text, group.size))


def test_the_first_two_messages_are_the_same_whatever_a_rank_is_about_to_do() -> None:
    """What it is about to do, and with what, in 32 bytes each: nothing that could mismatch comes before."""

    def first(comm: Any, place: Any) -> Any:
        calls: list[tuple[str, int]] = []

        def noted(send: Any, recv: Any, tag: str = "", own: Any = comm.allgather) -> None:
            calls.append((tag, send.nbytes))
            own(send, recv, tag)

        comm.allgather = noted
        with place(gpt(), mz.ShardingConfig(comm=comm, share_node_memory=False)):
            return calls[:2]

    expected = [("operation", 32), ("agree to start", 32)]
    for place in (mz.DDPModel, mz.ZeRO3Model, mz.HybridShardedModel, mz.TensorParallelModel):
        assert run_in_threads(2, lambda comm, place=place: first(comm, place)) == [expected] * 2


def test_what_may_differ_is_no_difference(capfd: Any) -> None:
    class Watched(Own):
        """What a rank may have of its own."""

        def __init__(self, comm: Any) -> None:
            super().__init__()
            self.comm, self.rank, self._cache = comm, comm.rank, {comm.rank: 1}
            self.log = sys.stderr if comm.rank == 0 else None
            self.rng = np.random.default_rng(comm.rank)

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    def train(comm: Any) -> str:
        told = mz.BadSteps(warn=comm.rank == 0, callback=print if comm.rank else None)
        settings = mz.ShardingConfig(comm=comm, bad_steps=told)
        for _ in range(2):
            with mz.ZeRO1Model(black_box(names="w"), settings, optimizer=Watched(comm)) as placed:
                placed.train(np.ones((1, 3)), np.ones(1))
        return placed.strategy

    notice_once.cache_clear()
    assert run_in_threads(3, train) == ["zero1"] * 3
    lines = [line for line in capfd.readouterr().err.splitlines() if "not compared" in line]
    assert lines == [
        "mpizero: not compared between ranks: log of the optimizer (EncodedFile), rng of the optimizer (Generator); "
        "an object may offer fingerprint()"
    ]


def test_a_copy_of_a_model_in_use_is_not_compared_anew() -> None:
    """Objects of a user may have counted, kept and learned what they like meanwhile."""

    class Counting(mz.FunctionModel):
        calls = 0

    def copied(comm: Any) -> list[int]:
        wrapped = Counting({"w": np.ones(3)}, squares())
        with mz.ZeRO1Model(wrapped, mz.ShardingConfig(comm=comm)) as placed:
            wrapped.calls = comm.rank
            with placed.clone() as clone, placed.deep_copy() as copy:
                return [made.wrapped_model.calls for made in (clone, copy)]

    assert run_in_threads(3, copied) == [[0, 0], [1, 1], [2, 2]]


def test_a_fingerprint_that_fails_on_one_rank_is_told_to_all() -> None:
    class Solver(Own):
        def fingerprint(self) -> Any:
            raise OSError("no mesh here")

    def bind(comm: Any) -> str:
        try:
            optimizer(lambda odd: Solver() if odd else Own())(comm, comm.rank == 1)
        except (OSError, RemoteError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    first, failed, last = run_in_threads(3, bind)
    assert failed == "OSError: no mesh here"
    assert first == last
    assert first.startswith("RemoteError: rank 1 raised; rank 1: OSError: no mesh here (test_ranks_differ.py:")
