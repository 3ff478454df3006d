"""Optimizers that update whole tensors: the same bits on every layout, saved, loaded, told where they cannot work."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ArgumentError, CheckpointError, ConfigError, LayoutError, RemoteError
from mpizero.layout.flat import FlatLayout, owners_by_cost
from mpizero.sharding.whole_tensors import TensorPlan
from mpizero.testing import run_in_threads
from mpizero.types import ParameterSpec
from tests.parallel.models import (
    MEMORIES,
    PRIVATE,
    STRATEGIES,
    gpt,
    layouts,
    mlp,
    part,
    points,
    sharded,
    state_of,
    tokens,
)
from tests.parallel.parallel_layouts import Case, Way, known, trained_alone
from tests.parallel.parallel_layouts import trained as spread


class RowMeans(mz.optim.TensorOptimizer):
    """Gradient descent along the mean over the steps of each row's sum: a user's own, with a state of its own shape."""

    tensor_slots = ("sums", "count")

    def state_shapes(self, shape):
        return {"sums": (shape[0], 1), "count": ()}

    def cost(self, shape):
        return shape[0] * shape[1]

    def update_tensor(self, w, g, state, step):
        state["sums"] += g.sum(1, keepdims=True)
        state["count"] += 1
        w -= step.lr * (state["sums"] / state["count"] + step.weight_decay * w)


OPTIMIZERS = {
    "soap": lambda: mz.SOAP(lr=1e-2, frequency=1, max_dimension=30),
    "muon": lambda: mz.Muon(lr=1e-2, exclude=["head.*"]),
    "own": lambda: RowMeans(lr=1e-2),
}


def trained(comm: Any, strategy: str, name: str, **settings: Any) -> Any:
    """Train three steps on 11 samples; return the hash, the losses and the optimizer's state."""
    x, y = tokens(11)
    with sharded(strategy, comm, gpt(tied=False), OPTIMIZERS[name](), micro_batch=1, **settings) as model:
        losses = [model.train(*part(comm, x, y)) for _ in range(3)]
        state = model.optimizer.state_dict()["state"]
        whole = {f"{slot} {name}": array.tobytes() for slot, of in state.items() for name, array in of.items()}
        return model.parameters_sha256(), losses, whole


@cache
def alone(name: str) -> Any:
    return trained(None, "ddp", name)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_threads_have_the_bits_of_one_process_with_every_strategy(ranks):
    for number, strategy in enumerate(STRATEGIES):
        name = list(OPTIMIZERS)[(number + ranks) % 3]
        found = run_in_threads(ranks, lambda comm, s=strategy, n=name: trained(comm, s, n, **MEMORIES[ranks - 2]))
        assert found[0] == alone(name), (strategy, name)


@pytest.mark.mpi
def test_every_strategy_has_the_bits_of_one_process(world):
    for number, (strategy, memory) in enumerate(layouts(world.size)[world.size % 2 :: 2]):
        name = ("muon", "own", "soap")[(number + world.size) % 3]
        assert trained(world, strategy, name, **memory) == known(world, alone, name), (strategy, memory, name)


class Matrices(RowMeans):
    def takes(self, spec):
        return len(spec.shape) == 2


CASE = Case(gpt, lambda: mz.Muon(lr=1e-2), tuple(tokens(8, seed) for seed in range(2)), config={"clip": 0.5})
IN_TILES = replace(CASE, config={"tiles": {"context": 2}})


@pytest.mark.parametrize(
    ("case", "ranks", "way"),
    [
        (CASE, 2, Way(2, zero=3)),  # the token table is tied: two stages hold it; AdamW updates it
        (CASE, 4, Way(2, zero=1, schedule="zero_bubble")),
        (replace(CASE, optimizer=lambda: Matrices(lr=1e-2)), 4, Way(2, zero=2)),
        (IN_TILES, 2, Way(context=2)),
    ],
    ids=["pipeline", "pipeline and data", "a tied tensor that an optimizer takes", "context"],
)
def test_ranks_of_a_layout_divide_the_tensors_with_the_same_bits(case, ranks, way):
    expected = spread(case, None) if way.context > 1 else trained_alone(case)
    assert run_in_threads(ranks, lambda comm: spread(case, comm, way, **PRIVATE)) == [expected] * ranks


def test_a_tensor_group_is_refused_and_tiles_on_one_rank_are_not():
    def grouped(comm):
        with pytest.raises(ConfigError, match=r"tensor group splits '.*' of shape .*tensor_parallel_size=1.*exclude"):
            spread(CASE, comm, Way(tensor=2))

    run_in_threads(2, grouped)
    case = replace(CASE, config={"tiles": {"tensor": 2}})
    assert spread(case, None) == run_in_threads(2, lambda comm: spread(case, comm))[0]


def test_frozen_tensors_stay_and_a_skipped_step_changes_nothing():
    def run(comm):
        model = mz.nn.freeze(mlp(), ["hidden.1.*"])
        with sharded("zero2", comm, model, mz.SOAP(lr=1e-2), micro_batch=2) as model:
            start = model.named_parameters()["hidden.1.linear.weight"].copy()
            steps_of(model, comm, 3)
            before = state_of(model)
            x, y = points(9)
            x[4] = np.inf
            model.train(*part(comm, x, y))
            assert model.last_step.skipped
            assert state_of(model) == before
            np.testing.assert_array_equal(model.named_parameters()["hidden.1.linear.weight"], start)
            state = model.optimizer.state_dict()["state"]["left"]
            assert state.keys() == {"hidden.0.linear.weight", "output.linear.weight"}
            return before[0]

    assert run_in_threads(3, run)[0] == run(None)


def test_ranks_that_train_alone_own_all_tensors_of_their_copy():
    """With the same batch on both ranks the copies stay equal, and equal to one process."""
    x, y = points(8)

    def run(comm, optimizer):
        with sharded("ddp", comm, mlp(), optimizer, micro_batch=2) as model:
            for _ in range(4):
                model.train(x, y)
            return model.parameters_sha256()

    found = run_in_threads(2, lambda comm: run(comm, mz.LocalSGDOptimizer(mz.Muon(lr=1e-2), every=2)))
    assert found == [run(None, mz.Muon(lr=1e-2))] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metadata_tells_the_state_that_owners_keep(strategy):
    """The formula is the mean over ranks: the state of whole tensors is divided with every strategy."""

    def run(comm):
        with sharded(strategy, comm, mlp(), mz.SOAP(), **PRIVATE) as model:
            told = model.metadata()
            return told.bytes_on_rank["optimizer state"], told.formula_bytes["optimizer state"]

    held, formulas = zip(*run_in_threads(3, run), strict=True)
    assert sum(held) == pytest.approx(sum(formulas))


def steps_of(model: Any, comm: Any, count: int) -> str:
    x, y = points(9)
    for _ in range(count):
        model.train(*part(comm, x, y))
    return str(model.parameters_sha256())


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("soap", (3, "zero3", PRIVATE), (1, "ddp", {})),
        ("own", (1, "ddp", {}), (4, "ddp", {"ranks_per_node": 2})),
        ("muon", (2, "ddp", PRIVATE), (3, "zero2", {})),
    ],
)
def test_a_resume_on_other_ranks_and_strategies_has_the_bits_of_no_interruption(tmp_path, name, saved, loaded):
    optimizer = {**OPTIMIZERS, "muon": lambda: mz.Muon(lr=1e-2, exclude=["hidden.1.*"])}[name]

    def run(comm, place, before, after):
        strategy, memory = place[1:]
        with sharded(strategy, comm, mlp(), optimizer(), micro_batch=2, ema=0.9, check_every=1, **memory) as model:
            if not before:
                model.load_model(tmp_path / "saved")
            steps_of(model, comm, before)
            if before and not after:
                model.save_model(tmp_path / "saved")
            sha256 = steps_of(model, comm, after)
            return sha256, model.optimizer.state_dict()["state"]["ema"]["output.linear.weight"].tobytes()

    one = run(None, (1, "ddp", {}), 2, 2)
    run_in_threads(saved[0], lambda comm: run(comm, saved, 2, 0))
    assert run_in_threads(loaded[0], lambda comm: run(comm, loaded, 0, 2)) == [one] * loaded[0]


def test_checkpoints_hold_the_arrays_of_each_tensor_by_name(tmp_path):
    with sharded("ddp", None, mlp(), RowMeans(lr=1e-2), micro_batch=2) as model:
        steps_of(model, None, 2)
        names = [e.spec.name for e in model._engine.global_view.layout.parameters]
        model.save_model(tmp_path / "saved")
        state = model.optimizer.state_dict()["state"]
    with h5py.File(tmp_path / "saved" / "state.h5") as file:
        held = {
            slot: {name for name, item in of.items() if isinstance(item, h5py.Dataset)}
            for slot, of in file["optimizer"].items()
        }
        weights = {name for name in names if name.endswith("weight")}
        biases = set(names) - weights
        assert held == {"exp_avg": biases, "exp_avg_sq": biases, "sums": weights, "count": weights}
        for name in weights:
            assert file[f"optimizer/count/{name}"][()] == 2
            np.testing.assert_array_equal(file[f"optimizer/sums/{name}"], state["sums"][name])
            assert file[f"optimizer/sums/{name}"].shape == (file[f"parameters/{name}"].shape[0], 1)


def test_the_state_of_another_choice_of_tensors_is_refused_and_changes_nothing(tmp_path):
    with sharded("ddp", None, mlp(), mz.Muon(lr=1e-2), micro_batch=2) as model:
        steps_of(model, None, 1)
        model.save_model(tmp_path / "saved")
    with sharded("zero1", None, mlp(), mz.Muon(lr=1e-2, exclude=["output.*"]), micro_batch=2) as model:
        before = model.parameters_sha256()
        with pytest.raises(CheckpointError, match=r"lacks optimizer/exp_avg/output.linear.weight.*exclude"):
            model.load_model(tmp_path / "saved")
        assert model.parameters_sha256() == before


def test_a_state_dictionary_goes_to_any_layout():
    def run(comm, strategy, state=None):
        with sharded(strategy, comm, mlp(), RowMeans(lr=1e-2), micro_batch=2) as model:
            if state is not None:
                model.optimizer.load_state_dict(state)
            else:
                steps_of(model, comm, 2)
            return model.optimizer.state_dict()

    saved = run_in_threads(3, lambda comm: run(comm, "zero2"))[0]
    for found in (run(None, "ddp", saved), run_in_threads(2, lambda comm: run(comm, "zero3", saved))[1]):
        assert found["step_count"] == 2
        np.testing.assert_equal(found["state"], saved["state"])
    saved["state"]["sums"]["output.linear.weight"] = np.zeros((3, 5))
    with pytest.raises(LayoutError, match=r"'sums' has no array 'output.linear.weight' of shape \(5, 1\)"):
        run(None, "ddp", saved)


def test_copies_go_on_alike_and_a_reset_begins_anew():
    def run(comm):
        with sharded("zero2", comm, mlp(), mz.Muon(lr=1e-2), micro_batch=2) as model:
            start = model.get_parameters()
            first = steps_of(model, comm, 2)
            with model.deep_copy() as twin:
                assert steps_of(twin, comm, 1) == steps_of(model, comm, 1)
            model.set_parameters(start)
            model.optimizer.reset()
            assert model.optimizer.synchronize_optimizer_state() == 0
            return steps_of(model, comm, 2) == first

    assert all(run_in_threads(3, run))


def test_an_error_of_one_owner_is_every_ranks_and_no_parameter_changes():
    class Failing(RowMeans):
        def update_tensor(self, w, g, state, step):
            w[:] = 0
            if w.shape == (7, 5):
                raise ArithmeticError("no convergence")

    def run(comm):
        with sharded("zero2", comm, mlp(), Failing(), micro_batch=2) as model:
            before = model.parameters_sha256()
            with pytest.raises((ArithmeticError, RemoteError), match="no convergence") as caught:
                steps_of(model, comm, 1)
            assert model.parameters_sha256() == before
            return getattr(caught.value, "__notes__", [])

    notes = [note for notes in run_in_threads(3, run) for note in notes]
    assert notes == ["In the update of parameter 'hidden.1.linear.weight' of shape (7, 5), step 1"]


def test_an_error_in_one_pipeline_stage_is_every_stages():
    class Failing(RowMeans):
        def takes(self, spec):
            return spec.name == "output.linear.weight"  # the first stage has no whole tensor

        def update_tensor(self, w, g, state, step):
            raise ArithmeticError("no convergence")

    def run(comm):
        case = Case(mlp, Failing, (points(8),))
        with pytest.raises((ArithmeticError, RemoteError), match="no convergence"):
            spread(case, comm, Way(2, zero=1))

    run_in_threads(4, run)


def test_wrong_optimizers_are_told():
    class Returning(RowMeans):
        def update_tensor(self, w, g, state, step):
            return w - g

    class Undeclared(RowMeans):
        def state_shapes(self, shape):
            return {"sum": shape}

    class Clash(RowMeans):
        tensor_slots = ("exp_avg",)

    class Complex(RowMeans):
        def takes(self, spec):
            return True

    class Fraction(RowMeans):
        def cost(self, shape):
            return 0.5

    z = mz.FunctionModel({"z": np.ones(2, complex)}, lambda p, batch: (0.0, {"z": p["z"]}, 1.0))
    for make, model, kind, told in (
        (Fraction, mlp(), ConfigError, r"Fraction.cost\(\(6, 7\)\)=0.5: expected a whole number >= 0"),
        (Returning, mlp(), ArgumentError, r"Returning.update_tensor returned ndarray.*change w"),
        (Undeclared, mlp(), ConfigError, r"Undeclared: state_shapes\(\(6, 7\)\) has 'sum'.*tensor_slots"),
        (Clash, mlp(), ConfigError, r"Clash: tensor_slots has 'exp_avg'"),
        (Complex, z, ConfigError, r"Complex.takes chooses 'z', which is complex"),
    ):
        with pytest.raises(kind, match=told):
            steps_of(sharded("ddp", None, model, make(), micro_batch=2), None, 1)


def test_a_model_without_matrices_is_trained_by_adamw():
    def loss_and_grad(p, batch):
        return float(p["b"].sum()), {"b": np.ones(3)}, 1.0

    found = []
    for optimizer in (mz.Muon(lr=0.1), mz.AdamW(lr=0.1)):
        with sharded("zero1", None, mz.FunctionModel({"b": np.ones(3)}, loss_and_grad), optimizer) as model:
            model.train(np.ones((2, 1)), np.ones(2))
            found.append(model.parameters_sha256())
    assert found[0] == found[1]


def test_things_are_divided_by_cost_the_most_expensive_first():
    assert owners_by_cost([1, 5, 3, 3, 5], 2) == (0, 0, 0, 1, 1)
    assert owners_by_cost([2, 2, 2], 5) == (0, 1, 2)
    assert owners_by_cost([], 3) == ()
    costs = np.random.default_rng(0).integers(1, 1000, 200).tolist()
    loads = np.bincount(owners_by_cost(costs, 7), costs, 7)
    assert max(loads) - min(loads) <= max(costs)


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0,), (1,), (2,)), ((0, 1, 2),)], ids=str)
def test_owners_get_each_element_once_and_holders_get_it_back(nodes, replicated):
    specs = [ParameterSpec("a", (5, 4)), ParameterSpec("b", (3,), decay=False), ParameterSpec("c", (7, 3))]
    layout, ranks = FlatLayout.build({"": specs}), range(sum(map(len, nodes)))
    plan = TensorPlan.of(RowMeans(), layout, nodes, replicated=replicated)
    assert [entry.spec.name for entry in plan.tensors] == ["a", "c"]
    shards = [layout.shards(rank, len(ranks))[0] for rank in ranks]
    for number, entry in enumerate(plan.tensors):
        owner, wanted = plan.owners[number], list(range(*entry.span))
        gathered = [m for m in plan.gathers[owner] if m.tensor == number and m.target == owner]
        assert sorted(i for move in gathered for i in range(*move.span)) == wanted
        for move in gathered:
            assert move in plan.gathers[move.source]
            if replicated:  # within a node
                assert any({move.source, owner} <= set(node) for node in nodes)
        for rank in ranks:
            peers = [r for r in ranks if _place(r, nodes) == _place(rank, nodes)] if replicated else [rank]
            held = sorted(i for r in peers for i in range(*shards[r]) if i in wanted)
            back = [m for m in plan.returns[rank] if m.tensor == number and m.target == rank]
            assert sorted(i for move in back for i in range(*move.span)) == held
            assert all(move in plan.returns[owner] for move in back)


def _place(rank: int, nodes: Any) -> int:
    return next(ranks.index(rank) for ranks in nodes if rank in ranks)
