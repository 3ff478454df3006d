"""Functions that write their gradients in place: the same bits, no copies, and every wrong write named at once."""

from __future__ import annotations

from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import LayoutError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, STRATEGIES, hard_function, part, same_on_layouts, sharded, trained, vectors
from tests.parallel.writes import (
    add,
    bind_a_wrong_name,
    forget,
    of_another_shape,
    overwrite,
    rebind,
    write_nan,
    write_some,
)


def in_place(write: Any = overwrite, *, spoils: bool = True) -> mz.FunctionModel:
    """The function of ``hard_function``, which writes its gradients; ``write`` writes 'b'.

    Not on a rank that does not spoil it; ranks are not compared in what begins with an underscore.
    """
    returning, _spoils = hard_function(), spoils

    def loss_and_grad(p: Any, batch: Any, gradients: Any) -> Any:
        loss, found, weight = returning.loss_and_grad(p, batch)
        for name, value in found.items():
            (write if _spoils and name == "b" else overwrite)(gradients, name, value)
        return loss, weight

    frozen = {"frozen": returning.frozen, "predict": returning.predict}
    return mz.FunctionModel(returning.parameters, loss_and_grad, in_place=True, **frozen)


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 3), (2, 1), (3, 3), (4, 1), (4, 3)])
def test_in_place_has_the_bits_of_returned_gradients(ranks: int, accumulate: int) -> None:
    """More waves than one, units of one tensor, nodes of two ranks: every way that a slot is used again."""
    expected = trained(None, "ddp", hard_function(), vectors(19), accumulate=accumulate)
    same_on_layouts(ranks, partial(trained, model=in_place(), batch=vectors(19), accumulate=accumulate), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_copied_and_no_gradient_is_held_twice(strategy: str) -> None:
    seen: list[Any] = []
    model = sharded(strategy, None, in_place(lambda g, name, value: seen.append(np.copyto(g["b"], value) or g["b"])))
    with model:
        model.train(*vectors(2))
        engine = model._engine
        where = engine.reducer.slots[0] if engine.reducer.in_rounds else engine.reducer.window
        assert np.shares_memory(seen[0], where)
        size = engine.layout.gradient_size * 8
        held = engine.memory.private_bytes["gradients"] + engine.memory.shared_bytes["gradients"]
        stack = engine.reducer.stack.nbytes if engine.reducer.in_rounds else 0
        assert held - stack <= 2 * (size + 4096), "two grains in rows, or one slot"


def test_evaluating_leaves_gradients_that_are_not_applied_yet() -> None:
    """Without ``loss=`` the function computes gradients in evaluate, too: into other memory."""
    x, y = vectors(6)
    with sharded("ddp", None, in_place(), auto_sync_gradients=False) as model:
        model.compute_gradients(x, y)
        expected = model.synchronize_gradients().values.copy()
        model.compute_gradients(x, y)
        model.evaluate(x[:2] + 7, y[:2])
        np.testing.assert_array_equal(model.synchronize_gradients().values, expected)


UNWRITTEN = r"loss_and_grad at test_in_place.py:\d+ has not written {}the gradient of 'b', or has added to what stood"
WRONG: dict[Any, str] = {
    forget: UNWRITTEN.format(""),
    add: UNWRITTEN.format(""),
    write_some: UNWRITTEN.format("11 of the 13 elements of "),
    rebind: r"gradients\['b'\] = ... binds a name to another array.*gradients\['b'\]\[...\] = value",
    bind_a_wrong_name: r"the model has no parameter 'B' \(did you mean 'b'\?\)",
    of_another_shape: "could not broadcast input array from shape",
}


@pytest.mark.parametrize("write", WRONG)
def test_a_wrong_write_on_one_rank_is_told_to_all_and_no_step_is_made(write: Any) -> None:
    x, y = vectors(4)

    def run(comm: Any) -> None:
        for strategy, memory in zip(STRATEGIES, [*MEMORIES, MEMORIES[0]], strict=True):
            with sharded(strategy, comm, in_place(write, spoils=comm.rank == 1), micro_batch=1, **memory) as model:
                before = model.parameters_sha256()
                for _ in range(2):
                    with pytest.raises((LayoutError, ValueError, RemoteError), match=WRONG[write]):
                        model.train(*part(comm, x, y))
                assert model.parameters_sha256() == before

    run_in_threads(2, run)


@pytest.mark.parametrize("write", [forget, add])
def test_a_gradient_that_a_later_step_leaves_out_or_adds_to_is_named(write: Any) -> None:
    for strategy in STRATEGIES:
        ways = chain([overwrite], repeat(write))
        with sharded(strategy, None, in_place(lambda *gradient, w=ways: next(w)(*gradient))) as model:
            model.train(*vectors(1))
            before = model.parameters_sha256()
            with pytest.raises(LayoutError, match=r"has not written .*the gradient of 'b'"):
                model.train(*vectors(1))
            assert model.parameters_sha256() == before


def test_the_arrays_of_an_earlier_call_cannot_be_written_to() -> None:
    kept: dict[str, Any] = {}

    def keep(gradients: Any, name: str, value: Any) -> None:
        kept.setdefault(name, gradients[name])[...] = value

    with sharded("ddp", None, in_place(keep)) as model:
        model.train(*vectors(1))
        with pytest.raises(ValueError, match="read-only") as caught:
            model.train(*vectors(1))
        assert "and so are the gradients of an earlier call" in caught.value.__notes__[0]


def test_a_nan_that_was_computed_is_a_bad_step_and_can_be_replayed(tmp_path: Path) -> None:
    with sharded("zero2", None, in_place(write_nan)) as model:
        model.train(*vectors(4))
        assert "the gradient of 'b' is not finite" in model.last_step.skipped
        path = mz.sharding.dump_bad_step(model, vectors(4), tmp_path)
        (first, *_) = mz.sharding.replay_bad_step(path, model)
        assert (first.first.what, first.first.name) == ("gradient", "b")


def test_a_function_in_place_that_returns_gradients_is_told() -> None:
    def returns(p: Any, b: Any, g: Any) -> Any:
        return 1.0, {"w": np.ones(3)}, 1.0

    model = sharded("ddp", None, mz.FunctionModel({"w": np.ones(3)}, returns, in_place=True))
    with model, pytest.raises(LayoutError, match=r"works in place, so it must return \(loss_sum, weight\).*returned"):
        model.train(*vectors(1))


class Own:
    """A model of the user's own class, whose function takes ``run`` and works in place."""

    in_place, dtype, seed = True, np.dtype("float64"), 3

    def __init__(self) -> None:
        self.parameters = {"w": np.ones(7)}

    def loss_and_grad(self, parameters: Any, batch: Any, gradients: Any, *, run: Any) -> Any:
        x, _ = batch
        assert run.training is not None
        assert run.seed == 3
        x.sum(axis=0, out=gradients["w"])
        return float((x @ parameters["w"]).sum()), float(run.count)


def test_a_class_of_ones_own_may_work_in_place() -> None:
    x, y = vectors(5)
    with sharded("zero1", None, Own(), mz.SGD(lr=1.0)) as model:
        model.train(x, y)
        np.testing.assert_allclose(model.get_parameters(), 1 - x.mean(axis=0), rtol=1e-14)
