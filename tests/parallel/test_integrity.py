"""Memory that changes by itself is found at the next check, with tensor and rank; memory that does not never is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from mpizero.errors import IntegrityError
from mpizero.testing import run_in_threads
from tests.parallel.covering import LAYOUTS
from tests.parallel.models import PRIVATE, gpt, mlp, part, points, sharded, tokens
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


def told(comm: Any, act: Any) -> list[str]:
    """What every rank's IntegrityError says; all raise one, or the test fails. Collective."""
    with pytest.raises(IntegrityError) as found:
        act()
    return list(comm.allgather_object(str(found.value)))


def first_state(model: Any) -> Any:
    """The optimizer's first slot, and the first parameter of which this rank keeps some of it."""
    updater = model._engine.updater
    slot = sorted(updater.state)[0]
    piece = next((piece for piece in updater.trees.pieces if piece.size), None)
    return slot, updater.state[slot], piece


@pytest.mark.slow
@pytest.mark.parametrize("what", ["parameter", "optimizer"])
def test_a_bit_that_turns_over_between_two_updates_is_found_with_tensor_and_rank(what: str) -> None:
    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        x, y = points(2 * comm.size)
        victim = comm.size - 1
        with sharded(strategy, comm, mlp(), micro_batch=1, check_every=2, **memory) as model:
            spoiler = Flip(model.default_loss_function)
            model._engine.runner.evaluator.criterion = spoiler
            for _ in range(2):
                model.train(*part(comm, x, y))
            slot, values, piece = first_state(model)
            tensor = comm.allgather_object(None if piece is None else piece.entry.spec.name)[victim]
            if tensor is None:
                return
            if comm.rank == victim:
                spoiler.values = model._engine.store.values if what == "parameter" else values
                spoiler.place = piece.store if what == "parameter" else piece.state
            kind = "parameter" if what == "parameter" else f"optimizer/{slot}"
            for message in told(comm, lambda: model.train(*part(comm, x, y))):
                assert re.search(f"{kind} '{re.escape(tensor)}', elements .* changed on rank {victim} ", message)

    for size, strategy, memory in LAYOUTS[what == "parameter" :: 2]:
        run_in_threads(size, lambda comm, s=strategy, m=memory: run(comm, s, m))


@pytest.mark.parametrize(
    ("ranks", "strategy", "what"),
    [(3, "ddp", "parameter"), (3, "zero1", "parameter"), (3, "zero2", "parameter"), (3, "ddp", "optimizer/exp_avg"),
     (2, "zero1", "parameter")],
)  # fmt: skip
def test_a_bit_in_one_of_several_copies_is_found_at_the_next_check_and_the_minority_named(
    ranks: int, strategy: str, what: str
) -> None:
    x, y = points(6)

    def run(comm: Any) -> str:
        with sharded(strategy, comm, mlp(), micro_batch=1, **PRIVATE) as model:
            model.train(*part(comm, x, y))
            values = model._engine.store.values  # on all ranks: they are in flight
            if comm.rank == 1:
                slot = sorted(model._engine.updater.state)[0]
                flip(values if what == "parameter" else model._engine.updater.state[slot], 20)
            (message,) = set(told(comm, model.check_integrity))
            return message

    wanted = "on rank 1 .* differs from its 2 equal copies" if ranks == 3 else r"differs between ranks 0 \("
    assert re.search(rf"{what} '[\w.]+', elements .*{wanted}", run_in_threads(ranks, run)[0])


@pytest.mark.parametrize(
    ("way", "memory"),
    [(Way(2, 1, zero=1), {}), (Way(1, 2, zero=3), {}), (Way(2, 2, zero=1), PRIVATE), (Way(2, 2, zero=3), {}),
     (Way(1, 2, zero=1), PRIVATE), (Way(2, 1, zero=3), PRIVATE)],
    ids=str,
)  # fmt: skip
def test_a_hybrid_finds_a_bit_in_whatever_a_rank_holds(way: Way, memory: dict[str, Any]) -> None:
    batch = tokens(8)

    def run(comm: Any) -> None:
        with placed(Case(lambda: gpt(dropout=0.0)), comm, way, check_every=1, **memory) as model:
            for _ in range(2):
                model.train(*part(model.batch_group, *batch))
            model.check_integrity()
            slot, values, piece = first_state(model)
            name = comm.allgather_object(piece.entry.spec.guest or piece.entry.spec.name)[3]
            what = f"optimizer/{slot}" if memory else "parameter"
            if comm.rank == 3:
                flip(values if memory else model._engine.store.values, piece.state if memory else piece.store)
            for message in told(comm, lambda: model.train(*part(model.batch_group, *batch))):
                assert re.search(f"{what} '{re.escape(name)}', elements .* changed on rank 3 ", message)

    run_in_threads(4, run)


@pytest.mark.parametrize(("way", "name"), [(Way(2, 1), "embedding"), (Way(1, 2), "norm")])
def test_copies_of_a_tied_parameter_on_two_stages_and_whole_ones_of_tensor_ranks_are_compared(
    way: Way, name: str
) -> None:
    def run(comm: Any) -> None:
        with placed(Case(lambda: gpt(dropout=0.0)), comm, way) as model:
            model.train(*part(model.batch_group, *tokens(8)))
            model.check_integrity()
            held = {entry.spec.guest or entry.spec.name: entry for entry in model._engine.layout.parameters}
            entry = next(e for home, e in held.items() if name in home and e.spec.part is None)
            if comm.rank == 1:
                flip(model._engine.store.values, entry.offset)
            for message in told(comm, model.check_integrity):
                assert re.search(f"parameter '[^']*{name}[^']*', elements .* differs between ranks 0 ", message)

    run_in_threads(2, run)


@pytest.mark.slow
def test_nothing_is_found_where_nothing_happened_and_the_bits_are_the_same() -> None:
    def trained(comm: Any, strategy: str, memory: dict[str, Any], every: int) -> str:
        with sharded(strategy, comm, gpt(layers=1), micro_batch=1, check_every=every, **memory) as model:
            optimizer = model.optimizer
            earlier = optimizer.state_dict()
            for step in range(4):
                model.train(*part(comm, *tokens(8)))
                if step == 0:  # one change a step: new parameters would hide a changed state
                    model.set_parameters(2 * model.get_parameters())
                elif step == 1:
                    optimizer.load_state_dict(earlier)
                elif step == 2:
                    optimizer.reset()
            model.check_integrity()
            return str(model.parameters_sha256())

    expected = trained(None, "ddp", {}, 0)
    for number, (size, strategy, memory) in enumerate(LAYOUTS):
        every = 1 + number % 2
        found = run_in_threads(size, lambda comm, a=(strategy, memory, every): trained(comm, *a))
        assert set(found) == {expected}, (size, strategy, memory, every)
