"""Collective calls of users: ranks that call different ones, or set different values, are told so at once."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm import reduce
from mpizero.errors import CollectiveMismatch, ConfigError
from mpizero.sharding import params
from mpizero.sharding.optimizer import ShardedOptimizer
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, hard_function, mlp, part, points, sharded, ten

HERE = Path(__file__).name
EPOCH = mz.OptimizationOptions(epochs=1)
OF_MODELS = [
    "check_integrity", "clone", "close", "gather_full_parameters", "get_parameters", "named_parameters",
    "parameters_sha256", "serialize", "synchronize_gradients",
]  # fmt: skip
OF_OPTIMIZERS = ["reset", "should_early_stop", "state_dict", "step", "synchronize_optimizer_state"]
#: What a user may call, by the name that is told; each gets a model, x, y and a folder.
CALLS: dict[str, Callable[..., Any]] = {
    **{name: lambda m, x, y, f, name=name: getattr(m, name)() for name in OF_MODELS},
    **{name: lambda m, x, y, f, name=name: getattr(m.optimizer, name)() for name in OF_OPTIMIZERS},
    "train": lambda m, x, y, f: m.train(x, y),
    "compute_gradients": lambda m, x, y, f: m.compute_gradients(x, y),
    "evaluate": lambda m, x, y, f: m.evaluate(x, y),
    "apply_gradients": lambda m, x, y, f: m.apply_gradients(m.kept, 0.1),
    "optimize": lambda m, x, y, f: m.optimizer.optimize(points(8), EPOCH),
    "set_parameters": lambda m, x, y, f: m.set_parameters(np.zeros(m.parameter_count)),
    "save_model": lambda m, x, y, f: m.save_model(f / "saved"),
    "begin_save": lambda m, x, y, f: m.begin_save(f / "saved"),
    "load_model": lambda m, x, y, f: m.load_model(f / "missing"),
    "reserve": lambda m, x, y, f: m.reserve(8),
    "set_model": lambda m, x, y, f: m.optimizer.set_model(m),
    "make a model": lambda m, x, y, f: type(m)(m.wrapped_model, m.config),
    "ShardingConfig.close": lambda m, x, y, f: m.config.close(),
}


def public(kind: type) -> Iterator[tuple[str, str, set[str]]]:
    """Every public function of a class and its bases of this package: its name, docstring, and decorators."""
    seen = set()
    for base in kind.__mro__[:-1]:
        if not base.__module__.startswith("mpizero") or base in seen:
            continue
        seen.add(base)
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                marks = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
                yield f"{base.__name__}.{node.name}", ast.get_docstring(node) or "", marks


KINDS = (ShardedOptimizer, mz.HybridShardedModel, mz.LocalSGDOptimizer)
#: Methods whose decorator compares the calls.
DECORATED = {name.partition(".")[2] for kind in KINDS for name, _, marks in public(kind) if "collective" in marks}


def told_on(ranks: int, run: Callable[[Any], Any], error: type[Exception] = CollectiveMismatch) -> str:
    """What all ranks are told alike when each of them runs into ``error``."""

    def caught(comm: Any) -> str:
        with pytest.raises(error) as found:
            run(comm)
        return str(found.value)

    told = run_in_threads(ranks, caught)
    assert set(told) == {told[0]}
    return told[0]


def prepared(strategy: str, comm: Any, **settings: Any) -> Any:
    """A model that has made a step and holds a pending gradient."""
    model = sharded(strategy, comm, **settings)
    model.close = type(model).close.__get__(model)
    model.train(*part(comm, *points(8)))
    model.kept = model.compute_gradients(*part(comm, *points(8)))
    return model


def spread(comm: Any, ways: dict[str, Any]) -> Any:
    config = mz.ShardingConfig(comm=comm, micro_batch=2)
    model = mz.HybridShardedModel(mlp(hidden=(8, 8)), config, **ways, optimizer=mz.AdamW(lr=1e-2))
    model.batch = part(model.batch_group, *points(8))
    model.train(*model.batch)
    model.kept = model.compute_gradients(*model.batch)
    return model


def check_odd_one(make: Callable[[Any], Any], call: str, usual: str, folder: Path, ranks: int = 4) -> None:
    """One rank calls something else; all are told of both, with their lines, and nothing has moved."""
    kept: dict[int, tuple[Any, Any]] = {}

    def run(comm: Any) -> None:
        model = make(comm)
        x, y = getattr(model, "batch", part(comm, *points(8)))
        kept[comm.rank] = model, model.local_parameter_shard
        odd = comm.rank == comm.size - 1
        CALLS[call if odd else usual](model, x, y, folder)

    told = told_on(ranks, run)
    line = rf" at {HERE}:\d+ in <lambda>"
    usually = rf"ranks 0-{ranks - 2}: (\w+\.)?{usual}{line}"
    oddly = rf"rank {ranks - 1}: (\w+\.)?{re.escape(call)}( 'model 2')?{line}"
    assert re.search(f"{usually}; {oddly}", told), told
    for model, before in kept.values():
        assert model.local_parameter_shard.tobytes() == before.tobytes()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("call", ["check_integrity", *sorted(CALLS.keys() - DECORATED - {"train"})])
def test_who_calls_something_else_than_the_others_is_told_with_both_lines(call: str, tmp_path: Path) -> None:
    turn = list(CALLS).index(call) % 2  # some calls on every strategy: see below
    strategy, memory = (("zero2", {}), ("zero3", PRIVATE))[turn]
    check_odd_one(lambda comm: prepared(strategy, comm, **memory), call, "train", tmp_path, ranks=3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_that_holds_under_every_strategy_and_kind_of_memory(strategy: str, tmp_path: Path) -> None:
    pairs = (("compute_gradients", "train"), ("close", "evaluate"), ("train", "step"))
    for number, memory in list(enumerate(MEMORIES, STRATEGIES.index(strategy)))[STRATEGIES.index(strategy) % 2 :: 2]:
        call, usual = pairs[number % 3]
        check_odd_one(lambda comm, m=memory: prepared(strategy, comm, **m), call, usual, tmp_path, ranks=3)


#: Calls that close what they are of, need gradients by hand, or raise here.
LAST = {
    "close",
    "ShardingConfig.close",
    "make a model",
    "load_model",
    "synchronize_gradients",
    "apply_gradients",
    "step",
}


@pytest.mark.parametrize("call", [*sorted(CALLS.keys() - LAST), "predict", "ema"])
def test_each_call_may_be_the_first_after_a_step_whose_parameters_are_in_flight(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and sums travel in many messages, of which one is in flight at a time."""
    monkeypatch.setattr(params, "REGION", 1)
    monkeypatch.setattr(reduce, "EXCHANGE_ELEMENTS", 8)
    monkeypatch.setattr(reduce, "IN_FLIGHT", 1)
    calls = {**CALLS, "predict": lambda m, x, y, f: m.predict(x), "ema": lambda m, x, y, f: m.evaluate(x, y, ema=True)}

    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        with sharded(strategy, comm, mlp(hidden=(7, 5, 4)), micro_batch=1, ema=0.9, **memory) as model:
            x, y = part(comm, *points(3))  # fewer grains than ranks
            model.train(x, y)
            result = calls[call](model, x, y, tmp_path)
            if call == "clone":
                result.close()
            elif call == "begin_save":
                result.commit()
            model.train(x, y)
            assert len(set(comm.allgather_object(model.parameters_sha256()))) == 1

    turn = list(calls).index(call)  # some calls with each
    run_in_threads(4, lambda comm: run(comm, STRATEGIES[1 + turn % 2], MEMORIES[1 + turn // 2 % 2]))


@pytest.mark.parametrize(
    ("call", "ways"),
    [
        ("compute_gradients", {"pipeline_parallel_size": 2, "zero_stage": 1}),
        ("evaluate", {"pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3}),
        ("check_integrity", {"tensor_parallel_size": 2, "zero_stage": 2}),
        ("parameters_sha256", {"pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3}),
        ("close", {"tensor_parallel_size": 2, "zero_stage": 2}),
    ],
)
def test_that_holds_where_layers_are_spread_over_ranks(ways: Any, call: str, tmp_path: Path) -> None:
    check_odd_one(lambda comm: spread(comm, ways), call, "train", tmp_path)


@pytest.mark.slow
def test_that_holds_for_local_steps(tmp_path: Path) -> None:
    def run(comm: Any, call: str) -> None:
        optimizer = mz.LocalSGDOptimizer(mz.SGD(lr=0.1), every=2)
        model, (x, y) = mz.DDPModel(mlp(), mz.ShardingConfig(comm=comm), optimizer=optimizer), part(comm, *points(8))
        model.train(x, y)
        CALLS[call if comm.rank else "train"](model, x, y, tmp_path)
        model.train(x, y)

    for call in ("compute_gradients", "evaluate", "close"):
        told = told_on(3, partial(run, call=call))
        assert re.search(rf"rank 0: DDPModel.train at {HERE}.*; ranks 1-2: DDPModel.{call} at {HERE}", told), told


def test_two_models_of_one_configuration_are_not_mixed_up() -> None:
    def run(comm: Any) -> None:
        config = mz.ShardingConfig(comm=comm)
        models = [mz.ZeRO2Model(ten(), config) for _ in range(2)]
        models[comm.rank].train(np.ones((2, 10)), np.ones(2))

    told = told_on(2, run)
    assert re.search("rank 0: ZeRO2Model.train at .*; rank 1: ZeRO2Model.train 'model 2' at ", told), told


USES: dict[str, Callable[[Any, Any], Any]] = {
    "predict": lambda model, result: model.predict(points(2)[0]),
    "best_parameters": lambda model, result: result.best_parameters,
}


@pytest.mark.slow
def test_what_gathers_parameters_is_compared_where_they_are_sharded_and_free_elsewhere() -> None:
    def alone(comm: Any, strategy: str, names: tuple[str, ...]) -> None:
        with sharded(strategy, comm) as model:
            result = model.optimizer.optimize(points(8), EPOCH)
            for name in names if comm.rank == 0 else ():
                USES[name](model, result)
            model.train(*part(comm, *points(8)))

    for strategy in ("ddp", "zero1", "zero2"):
        run_in_threads(2, partial(alone, strategy=strategy, names=tuple(USES)))
    for name in USES:
        told = told_on(2, partial(alone, strategy="zero3", names=(name,)))
        assert re.search(rf"rank 0: ZeRO3Model.{name} at .*; rank 1: ZeRO3Model.train at ", told), told


def test_what_a_rank_does_amid_an_error_is_told_with_the_error() -> None:
    """A ``finally`` of one rank is not what went wrong."""

    def run(comm: Any) -> None:
        model = prepared("zero2", comm)
        try:
            if comm.rank == 1:
                raise ValueError("no such sample")
            model.train(*part(comm, *points(8)))
        finally:
            model.close()

    told = told_on(2, run)
    assert re.search(
        rf"rank 1: .*close at {HERE}:\d+ in run, after ValueError: no such sample at {HERE}:\d+ in run", told
    )


def test_steps_send_no_message_more_than_their_sample_counts_and_losses() -> None:
    def run(comm: Any) -> Any:
        with sharded("zero2", comm, share_node_memory=False) as model:
            model.train(*part(comm, *points(8)))
            before = Counter(comm.counters.messages_by_tag)
            model.train(*part(comm, *points(8)))
            return Counter(comm.counters.messages_by_tag) - before

    assert run_in_threads(2, run) == [{"operation": 1}] * 2


#: Calls that compare themselves, and why.
BY_HAND = {
    "Model.predict": "free where parameters are not sharded",
    "ParameterAccess.close": "does nothing the second time",
    "ShardedOptimizer.set_model": "under no name of a class, so that ranks with another one are told in words",
    "LocalSGDOptimizer.set_model": "as its parent's",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_method_is_compared_or_says_that_it_is_not_collective(kind: type) -> None:
    for name, told, marks in public(kind):
        free = "property" in marks or "Not\ncollective" in told or "Not collective" in told or told.startswith("Raise ")
        assert free or name in BY_HAND or marks & {"collective", "recorded"}, name


def differing(comm: Any, values: Any) -> Any:
    """The same values, but for one bit on the last rank."""
    changed = np.array(values)
    if comm.rank == comm.size - 1:
        flat = changed.reshape(-1)
        flat[-1] = np.nextafter(flat[-1], np.inf)
    return changed


def one_differs(saved: dict[str, Any], comm: Any) -> dict[str, Any]:
    state = {slot: {**arrays, "b": differing(comm, arrays["b"])} for slot, arrays in saved["state"].items()}
    return {**saved, "state": state}


SETTERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "set_parameters": (
        lambda m, c: m.set_parameters(differing(c, np.arange(float(m.parameter_count)))),
        "set_parameters: parameter 'one' of rank 2 is not that of rank 0: ",
    ),
    "with_parameters": (
        lambda m, c: m.with_parameters(differing(c, np.zeros(m.parameter_count))),
        "with_parameters: parameter 'one' of rank 2 is not that of rank 0: 5e-324, not 0.0",
    ),
    "load_named": (
        lambda m, c: m.load_named({n: differing(c, v) if n == "b" else v for n, v in m.named_parameters().items()}),
        r"load_named: parameter 'b' of rank 2 is not that of rank 0: float64 of shape \(13,\) with checksum",
    ),
    "another sign of zero": (
        lambda m, c: m.set_parameters(np.full(m.parameter_count, -0.0 if c.rank == 1 else 0.0)),
        "set_parameters: parameter 'w' of rank 1 is not that of rank 0",
    ),
    "another type": (
        lambda m, c: m.set_parameters(np.zeros(m.parameter_count, np.float32 if c.rank == 1 else np.float64)),
        "parameter 'w' of rank 1 is not that of rank 0: float32 of shape",
    ),
    "load_state_dict": (
        lambda m, c: m.optimizer.load_state_dict(one_differs(m.optimizer.state_dict(), c)),
        "load_state_dict: 'exp_avg' of parameter 'b' of rank 2 is not that of rank 0",
    ),
    "step count": (
        lambda m, c: m.optimizer.load_state_dict({**m.optimizer.state_dict(), "step_count": c.rank // 2}),
        "load_state_dict: the step count of rank 2 is not that of rank 0: 1, not 0",
    ),
    "optimize": (
        lambda m, c: m.optimizer.optimize((differing(c, np.ones((8, 7))), np.zeros((8, 11)))),
        r"optimize: the data \(x\) of rank 2 is not that of rank 0: float64 of shape \(8, 7\)",
    ),
    "optimize on each rank's own samples": (
        lambda m, c: m.optimizer.optimize((np.ones((8 + c.rank, 7)), np.zeros((8 + c.rank, 11)))),
        "optimize: the number of samples of rank 1 is not that of rank 0: 9, not 8",
    ),
}
VECTORS = (np.ones((2, 7)), np.zeros((2, 11)))


@pytest.mark.parametrize("name", SETTERS)
def test_values_that_differ_between_ranks_are_refused_and_nothing_changes(name: str) -> None:
    setter, expected = SETTERS[name]

    def run(comm: Any, strategy: str, **memory: Any) -> None:
        with sharded(strategy, comm, hard_function(), **memory) as model:
            before = model.parameters_sha256()
            try:
                setter(model, comm)
            finally:
                assert model.parameters_sha256() == before
                model.set_parameters(np.zeros(model.parameter_count))  # and it goes on

    strategy, memory = [("ddp", {}), ("zero3", {}), ("zero3", PRIVATE)][list(SETTERS).index(name) % 3]
    told = told_on(3, partial(run, strategy=strategy, **memory), ConfigError)
    assert re.search(expected, told), told


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_that_are_replicated_must_be_the_same(strategy: str) -> None:
    def run(comm: Any) -> None:
        with sharded(strategy, comm, hard_function()) as model:
            found = model.compute_gradients(*VECTORS)
            model.apply_gradients(mz.Gradients(differing(comm, found.values), found.weight, found.loss, True), 0.1)

    told = told_on(2, run, ConfigError)
    assert "apply_gradients: the gradient of 'one' of rank 1 is not that of rank 0" in told


@pytest.mark.parametrize("of_optimizer", [False, True])
def test_serialized_bytes_that_differ_are_refused_by_the_name_of_the_array(of_optimizer: bool) -> None:
    def run(comm: Any) -> None:
        with sharded("zero2", comm, ten(), share_node_memory=False) as model:
            restored = model.optimizer if of_optimizer else model
            data = restored.serialize()
            model.train(np.ones((2, 10)), np.ones(2))
            other = restored.serialize()
            before = model.parameters_sha256()
            try:
                restored.deserialize(other if comm.rank == 1 else data)
            finally:
                assert model.parameters_sha256() == before

    told = told_on(2, run, ConfigError)
    assert re.search(r"deserialize: array 'optimizer/exp_avg/w' of rank 1 is not that of rank 0", told), told
