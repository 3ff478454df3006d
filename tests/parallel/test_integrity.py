"""Memory that changes by itself is found at the next check, with tensor and rank; memory that does not never is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, IntegrityError
from mpizero.testing import run_in_threads
from tests.parallel.models import STRATEGIES, gpt, layouts, mlp, part, points, sharded, tokens
from tests.parallel.parallel_layouts import Case, Way, placed


def flip(values: Any, place: int, bit: int = 3) -> None:
    """Turn one bit of an array over, past whatever protects it from being written."""
    values.view(np.uint8)[place * values.itemsize + bit // 8] ^= 1 << bit % 8


class Flip:
    """A loss that, while it computes, turns one bit of ``values`` over: between one update and the next."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.values, self.place = loss, None, 0

    def forward(self, prediction: Any, target: Any) -> Any:
        if self.values is not None:
            flip(self.values, self.place)
            self.values = None
        return self.loss.forward(prediction, target)

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        return self.loss.backward(cache, scale)


def told(world: Any, act: Any) -> list[str]:
    """What every rank's IntegrityError says; all raise one, or the test fails. Collective."""
    message = ""
    try:
        act()
    except IntegrityError as error:
        message = str(error)
    return list(world.allgather_object(message))


def first_state(model: Any) -> Any:
    """The optimizer's first slot, and the first parameter of which this rank keeps some of it."""
    updater = model.engine.updater
    slot = sorted(updater.state)[0]
    piece = next((piece for piece in updater.trees.own if piece.size), None)
    return slot, updater.state[slot], piece


@pytest.mark.mpi
def test_a_bit_that_turns_over_between_two_updates_is_found_with_tensor_and_rank(world: Any) -> None:
    """In a parameter or in the optimizer's state: each layout has one of them, the other on another number of ranks."""
    x, y = points(2 * world.size)
    victim = world.size - 1
    for number, (strategy, memory) in enumerate(layouts(world.size)):
        what = ("parameter", "optimizer")[(number + number // 2 + world.size // 3) % 2]
        model, _ = sharded(strategy, world, mlp(), micro_batch=1, check_every=2, **memory)
        with model:
            spoiler = Flip(model.default_loss_function)
            model.engine.runner.evaluator.criterion = spoiler
            for _ in range(2):
                model.train(*part(world, x, y))
            slot, values, piece = first_state(model)
            tensor = world.allgather_object(None if piece is None else piece.entry.spec.name)[victim]
            if tensor is None:
                continue
            if world.rank == victim:
                spoiler.values = model.engine.store.values if what == "parameter" else values
                spoiler.place = piece.store if what == "parameter" else piece.state
            kind = "parameter" if what == "parameter" else f"optimizer/{slot}"
            for message in told(world, lambda: model.train(*part(world, x, y))):  # noqa: B023
                assert re.search(f"{kind} '{re.escape(tensor)}', elements .* changed on rank {victim} ", message)


def test_a_bit_in_one_of_three_copies_is_found_at_the_next_check_and_the_minority_named() -> None:
    x, y = points(6)

    def run(comm: Any, strategy: str, what: str) -> str:
        model, _ = sharded(strategy, comm, mlp(), micro_batch=1, share_node_memory=False)
        with model:
            model.train(*part(comm, x, y))
            if comm.rank == 1:
                slot = sorted(model.engine.updater.state)[0]
                flip(model.engine.store.values if what == "parameter" else model.engine.updater.state[slot], 20)
            with pytest.raises(IntegrityError) as found:
                model.check_integrity()
            return str(found.value)

    cases = [(strategy, "parameter") for strategy in STRATEGIES[:3]] + [("ddp", "optimizer/exp_avg")]
    for strategy, what in cases:
        messages = run_in_threads(3, lambda comm: run(comm, strategy, what))  # noqa: B023
        assert len(set(messages)) == 1
        assert re.search(rf"{what} '[\w.]+', elements .* on rank 1 .* differs from its 2 equal copies", messages[0])


def test_of_two_copies_that_differ_both_are_named() -> None:
    x, y = points(4)

    def run(comm: Any) -> str:
        model, _ = sharded("zero1", comm, mlp(), micro_batch=1, share_node_memory=False)
        with model:
            model.train(*part(comm, x, y))
            if comm.rank == 1:
                flip(model.engine.store.values, 20)
            with pytest.raises(IntegrityError) as found:
                model.check_integrity()
            return str(found.value)

    assert "differs between ranks 0 (" in run_in_threads(2, run)[0]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("zero", [1, 3])
def test_a_hybrid_of_two_by_two_finds_a_bit_in_whatever_a_rank_holds(world: Any, zero: int) -> None:
    if world.size != 4:
        pytest.skip("2 x 2 ranks")
    case = Case(lambda: gpt(dropout=0.0), batches=[tokens(8)] * 2)
    for ways in (Way(2, 1, zero=zero), Way(1, 2, zero=zero), Way(2, 2, zero=zero)):
        for memory in ({}, {"share_node_memory": False}):
            model, _ = placed(case, world, ways, check_every=1, **memory)
            with model:
                for batch in case.batches:
                    model.train(*part(model.batch_group, *batch))
                model.check_integrity()
                slot, values, piece = first_state(model)
                name = world.allgather_object(piece.entry.spec.guest or piece.entry.spec.name)[3]
                what = f"optimizer/{slot}" if memory else "parameter"
                if world.rank == 3:
                    flip(values if memory else model.engine.store.values, piece.state if memory else piece.store)
                for message in told(world, lambda: model.train(*part(model.batch_group, *case.batches[0]))):  # noqa: B023
                    assert re.search(f"{what} '{re.escape(name)}', elements .* changed on rank 3 ", message)


@pytest.mark.mpi(min_size=2)
def test_copies_of_a_tied_parameter_on_two_stages_and_whole_ones_of_tensor_ranks_are_compared(world: Any) -> None:
    if world.size != 2:
        pytest.skip("2 ranks")
    case = Case(lambda: gpt(dropout=0.0), batches=[tokens(8)])
    for way, name in ((Way(2, 1), "embedding"), (Way(1, 2), "norm")):
        model, _ = placed(case, world, way)
        with model:
            model.train(*part(model.batch_group, *case.batches[0]))
            model.check_integrity()
            held = {entry.spec.guest or entry.spec.name: entry for entry in model.engine.layout.parameters}
            entry = next(e for home, e in held.items() if name in home and e.spec.part is None)
            if world.rank == 1:
                flip(model.engine.store.values, entry.offset)
            for message in told(world, model.check_integrity):
                assert re.search(f"parameter '[^']*{name}[^']*', elements .* differs between ranks 0 ", message)


@pytest.mark.mpi
def test_nothing_is_found_where_nothing_happened_and_the_bits_are_the_same(world: Any) -> None:
    x, y = tokens(2 * world.size)
    hashes = []
    unchecked = ("ddp", {}, 0)
    turn = world.size // 3
    checked = [(*each, 1 + (n + n // 2 + turn) % 2) for n, each in enumerate(layouts(world.size))]
    for strategy, memory, every in (unchecked, *checked):
        model, optimizer = sharded(strategy, world, gpt(layers=1), micro_batch=1, check_every=every, **memory)
        with model:
            earlier = optimizer.state_dict()
            for step in range(4):
                model.train(*part(world, x, y))
                if step == 0:  # one change a step: new parameters would hide a changed state
                    model.set_parameters(2 * model.get_parameters())
                elif step == 1:
                    optimizer.load_state_dict(earlier)
                elif step == 2:
                    optimizer.reset()
            model.check_integrity()
            hashes.append(model.parameters_sha256())
    assert len(set(hashes)) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_steps_without_a_false_alarm(strategy: str) -> None:
    x, y = points(4)

    def run(comm: Any) -> None:
        model, _ = sharded(strategy, comm, mlp(hidden=(3,)), micro_batch=1, check_every=1, share_node_memory=False)
        with model:
            for _ in range(40):
                model.train(*part(comm, x, y))

    run_in_threads(2, run)


def test_a_number_of_steps_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="check_every=-1: expected a whole number >= 0"):
        mz.ShardingConfig(check_every=-1)
