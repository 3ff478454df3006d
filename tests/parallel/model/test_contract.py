"""The members that the contract promises, one by one, and its golden cases."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import CheckpointError, ConfigError, DataError, LayoutError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.models import (
    KINDS,
    MEMORIES,
    STRATEGIES,
    gpt,
    layouts,
    mlp,
    part,
    points,
    sharded,
    state_of,
    ten,
    tokens,
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_parameters_over_three_ranks_are_cut_4_3_3(strategy: str) -> None:
    def shards(comm: Any) -> Any:
        with sharded(strategy, comm, ten(), share_node_memory=strategy in ("ddp", "zero2")) as model:
            assert (model.parameter_count, model.world_size, model.rank) == (10, 3, comm.rank)
            return model.shard_start, model.shard_size, model.local_parameter_shard.tolist(), model.owned

    assert run_in_threads(3, shards) == [
        (0, 4, [0, 1, 2, 3], ((0, 4),)), (4, 3, [4, 5, 6], ((4, 7),)), (7, 3, [7, 8, 9], ((7, 10),))
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", KINDS)
def test_a_model_says_what_it_is(strategy: str) -> None:
    wrapped = mlp()
    with sharded(strategy, None, wrapped) as model:
        assert model.optimizer.options == mz.OptimizationOptions()
        assert model.wrapped_model is wrapped
        assert model.sharding_configuration is model.config
        assert model.default_loss_function is wrapped.loss
        assert model.metadata().strategy.lower().replace("-", "") == strategy


def test_hooks_run_in_order_and_see_the_full_vector() -> None:
    class Hooked(mz.ZeRO2Model):
        def _on_before_initialize_sharding(self) -> None:
            self.seen = ["before"]

        def _initialize_sharding(self) -> None:
            super()._initialize_sharding()
            self.seen.append("placed")

        def _update_local_shard_from_full(self, values: Any) -> None:
            self.seen.append(len(values))
            super()._update_local_shard_from_full(values)

    with Hooked(mlp(), mz.ShardingConfig()) as model:
        model.set_parameters(model.get_parameters())
        assert model.seen == ["before", "placed", model.parameter_count]


def test_a_closed_model_says_so_and_closing_twice_is_nothing() -> None:
    model = sharded("zero2", None)
    optimizer = model.optimizer
    model.train(*points(4))
    model.gather_full_parameters()
    for _ in range(2):
        model.close()
    for use in (
        lambda: model.train(*points(4)),
        lambda: model.predict(points(1)[0]),
        lambda: model.gather_full_parameters(),
        lambda: model.local_parameter_shard,
        lambda: model.serialize(),
        lambda: model.synchronize_gradients(),
        lambda: model.clone(),
        lambda: model.metadata(),
        lambda: model.optimizer.step(),
        lambda: optimizer.state_dict(),
    ):
        with pytest.raises(RuntimeError, match="this ZeRO2Model is closed.*before close"):
            use()


@pytest.mark.parametrize(
    ("change", "rate", "error", "told"),
    [
        (lambda g: g.values, 0.1, TypeError, "takes the Gradients that compute_gradients .* returned, got ndarray"),
        (lambda g: replace(g, values=g.values.tolist()), 0.1, TypeError, "values .* float32 array, got list"),
        (lambda g: replace(g, values=g.values * 1j), 0.1, TypeError, "values .* float32 array, got complex64 array"),
        (lambda g: replace(g, values=g.values[1:]), 0.1, LayoutError, r"needs \d+ values, .* got an array of shape"),
        (lambda g: replace(g, values=g.values[:, None]), 0.1, LayoutError, r"needs \d+ values, .* got .*, 1\)"),
        (lambda g: replace(g, synchronized=False), 0.1, LayoutError, "call synchronize_gradients first"),
        (lambda g: g, "0.1", ConfigError, "learning_rate='0.1': expected a finite number"),
        (lambda g: g, math.nan, ConfigError, "learning_rate=nan: expected a finite number"),
        (lambda g: g, 0.2, ConfigError, "the learning_rate of rank 1 is not that of rank 0: 0.2, not 0.1"),
    ],
)
def test_apply_gradients_says_what_it_takes_and_changes_nothing(change: Any, rate: Any, error: Any, told: str) -> None:
    """What one rank gives wrongly is told to all."""

    def run(comm: Any) -> None:
        with sharded("zero3" if len(told) % 2 else "ddp", comm) as model:
            good, before = model.compute_gradients(*part(comm, *points(9))), model.parameters_sha256()
            with pytest.raises((error, RemoteError), match=told):
                model.apply_gradients(*((change(good), rate) if comm.rank == 1 else (good, 0.1)))
            assert model.parameters_sha256() == before
            model.apply_gradients(good, -0.1)
            assert model.parameters_sha256() != before

    run_in_threads(2, run)


def test_local_gradients_are_weighted_sums_that_add_up_to_the_mean() -> None:
    def local(comm: Any) -> Any:
        with sharded("zero2", comm, auto_sync_gradients=False, micro_batch=1) as model:
            model._engine.bind(model.optimizer.wrapped_optimizer, mz.DynamicLossScale(initial=8.0))
            found = model.compute_gradients(*part(comm, *points(9), [5, 4]))
            with pytest.raises(LayoutError, match="call synchronize_gradients first"):
                model.apply_gradients(found, 0.1)
            return found.values, found.weight

    (a, weight), (b, _) = run_in_threads(2, local)
    with sharded("ddp", None) as single:
        mean = single.compute_gradients(*points(9)).values
    np.testing.assert_allclose((a + b) / weight, mean, rtol=1e-5, atol=1e-7)


def test_a_gradient_of_a_failed_call_is_not_taken_for_the_next_step() -> None:
    with sharded("ddp", None) as model:
        model.compute_gradients(*points(4))
        with pytest.raises(DataError, match="no samples"):
            model.compute_gradients(points(4)[0][:0], points(4)[1][:0])
        with pytest.raises(RuntimeError, match="no gradient waits for it"):
            model.optimizer.step()


def test_another_loss_can_be_asked_for_once() -> None:
    model = sharded("zero2", None, mlp(task="regression"))
    x = points(4)[0]
    with model:
        own = model.compute_gradients(x, np.zeros((4, 3), np.float32)).loss
        other = model.compute_gradients(x, points(4)[1], loss=mz.nn.CrossEntropy()).loss
        assert other != own == model.compute_gradients(x, np.zeros((4, 3), np.float32)).loss
    with sharded("zero2", None, ten()) as black, pytest.raises(NotImplementedError, match="computes its own loss"):
        black.compute_gradients(np.ones((1, 10)), np.ones(1), loss=mz.nn.CrossEntropy())


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero3", 3)])
def test_the_gathered_vector_is_kept_until_parameters_change(strategy: str, ranks: int) -> None:
    def run(comm: Any, memory: dict[str, Any]) -> None:
        batch = part(comm, *points(8))
        with sharded(strategy, comm, **memory) as model:
            full = model.gather_full_parameters()
            assert model.gather_full_parameters() is full
            if comm.rank == 0:
                model.invalidate_cache()  # on one rank only: the next gather must not wait for the others
            np.testing.assert_array_equal(model.gather_full_parameters(), full)
            with pytest.raises(ValueError, match="read-only"):
                full[0] = 1
            for change in (
                lambda: model.train(*batch),
                lambda: model.set_parameters(model.get_parameters() + 1),
                lambda: model.load_named({n: a - 1 for n, a in model.named_parameters().items()}),
                lambda: model.apply_gradients(model.compute_gradients(*batch), 0.1),
                lambda: (model.compute_gradients(*batch), model.optimizer.step()),
            ):
                before = model.gather_full_parameters()
                change()
                assert not np.array_equal(model.gather_full_parameters(), before)

    for memory in MEMORIES[1:]:
        run_in_threads(ranks, partial(run, memory=memory))


def test_a_wrong_length_is_told_with_both_lengths_on_all_ranks() -> None:
    def one_wrong(comm: Any) -> None:
        with sharded("zero1", comm, ten()) as model:
            for method in (model.set_parameters, model.with_parameters):
                with pytest.raises((ValueError, RemoteError), match="9 values.*10 parameters"):
                    method(np.zeros(9 if comm.rank == 1 else 10))
            np.testing.assert_array_equal(model.get_parameters(), np.arange(10.0))

    run_in_threads(3, one_wrong)


def test_named_parameters_go_out_and_in_by_npz(tmp_path: Path) -> None:
    with sharded("zero2", None) as model:
        np.savez(tmp_path / "weights.npz", **model.named_parameters())
        before = model.parameters_sha256()
        for load in (
            lambda: model.load_named(np.load(tmp_path / "weights.npz")),
            lambda: model.load_parameters(tmp_path / "weights.npz"),
        ):
            model.set_parameters(0 * model.get_parameters())
            load()
            assert model.parameters_sha256() == before
        named = model.named_parameters()
        name = next(iter(named))
        with pytest.raises(LayoutError, match=f"missing .*{name}.*unknown .*'more'"):
            model.load_named({"more": named.pop(name), **named})


def test_a_regression_has_no_right_answers() -> None:
    with sharded("zero1", None, mlp(task="regression", outputs=1)) as model:
        x, _ = points(5)
        for y in (np.zeros((5, 1), np.float32), np.zeros(5, np.float32)):
            assert model.evaluate(x, y)[2] is None


def test_who_still_predicts_sees_the_old_parameters() -> None:
    """Rank 1 predicts until rank 0, which is about to change the parameters, waits for a message."""
    waits = [threading.Event() for _ in range(3)]

    def slow(p: Any, x: Any) -> Any:
        assert x < 0 or waits[int(x)].wait(60)
        return p["w"].copy()

    def race(comm: Any) -> None:
        send, begun = comm.allgather, []

        def noted(own: Any, everyones: Any, tag: str = "") -> None:
            for event in begun:
                event.set()
            send(own, everyones, tag)

        comm.allgather = noted
        wrapped = mz.FunctionModel({"w": np.zeros(10)}, ten().loss_and_grad, predict=slow)
        with sharded("zero1", comm, wrapped, mz.SGD(lr=1.0)) as model:
            changes = (
                lambda gradient: model.set_parameters(np.ones(10)),
                lambda gradient: model.apply_gradients(gradient, 1.0),
                lambda gradient: model.optimizer.step(),
            )
            for number, change in enumerate(changes):
                gradient = model.compute_gradients(np.ones((1, 10)), np.ones(1))
                before = model.get_parameters()
                seen = model.predict(np.array(number if comm.rank == 1 else -1))
                begun.append(waits[number])
                change(gradient)
                np.testing.assert_array_equal(seen, before)

    run_in_threads(2, race)


def test_predict_and_evaluate_take_any_number_of_samples() -> None:
    x, y = points(7)
    with sharded("ddp", None, micro_batch=1) as single:
        expected, predicted = single.evaluate(x, y), single.predict(x)

    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        with sharded(strategy, comm, micro_batch=1, **memory) as model:
            own = slice(comm.rank)
            np.testing.assert_allclose(model.predict(x[own]), predicted[own], rtol=1e-5, atol=1e-6)
            assert model.evaluate(*part(comm, x, y, [0, 0, 7])) == expected

    for strategy, memory in layouts(3):
        run_in_threads(3, partial(run, strategy=strategy, memory=memory))


@pytest.mark.mpi
def test_an_error_in_one_ranks_model_is_raised_on_all_ranks_and_leaves_the_model_as_it_was(world: Any) -> None:
    def poison(x: Any, g: Any) -> Any:
        if (x > 100).any():
            raise OverflowError("sample above 100")
        return g

    x = np.arange(80.0).reshape(8, 10)
    bad = x.copy()
    bad[-1] = 1000.0
    with sharded("ddp", None, ten(), micro_batch=1) as twin:
        twin.train(x, x)
        expected = twin.parameters_sha256()
    for strategy in STRATEGIES[world.size % 2 :: 2]:
        memory = MEMORIES[(world.size + STRATEGIES.index(strategy)) % 3]
        with sharded(strategy, world, ten(poison), micro_batch=1, **memory) as model:
            for step in (model.train, model.compute_gradients, model.evaluate):
                with pytest.raises((OverflowError, RemoteError), match="sample above 100"):
                    step(*part(world, bad, bad))
            model.train(*part(world, x, x))
            assert model.parameters_sha256() == expected


def test_an_error_of_one_ranks_prediction_keeps_no_rank_waiting() -> None:
    def run(comm: Any, memory: dict[str, Any]) -> None:
        x, y = tokens(3)
        with sharded("zero3", comm, gpt(layers=1), micro_batch=1, **memory) as model:
            if comm.rank == 2:
                with pytest.raises(DataError, match="31"):
                    model.predict(x + 31)  # not in the vocabulary
            else:
                model.predict(x)
            assert np.isfinite(model.train(*part(comm, x, y)))

    for memory in MEMORIES:
        run_in_threads(3, partial(run, memory=memory))


def test_bad_batches_are_refused_on_all_ranks() -> None:
    def run(comm: Any) -> None:
        x, y = points(4)
        wide = x.astype(np.float64) if comm.rank == 2 else x
        with sharded("zero2", comm) as model:
            for bx, by, told in (
                (x[:0], y[:0], "no samples on any rank"),
                (x, y[: 3 if comm.rank == 0 else 4], "rank 0: .* equally many samples .*: x has 4, y has 3"),
                (wide, y[:3], "equally many samples"),
                (wide, y, "x is float32 .* and float64 .* on rank 2"),
            ):
                with pytest.raises(DataError, match=told):
                    model.train(bx, by)
            model.train(x, y)

    run_in_threads(3, run)


def test_what_the_wrapped_model_cannot_is_said() -> None:
    with sharded("ddp", None, ten()) as model:
        assert not model.supports_jit_compilation
        for ask in (model.feature_importance, model.jit_compile, model.export_computation_graph):
            with pytest.raises(NotImplementedError, match="FunctionModel has no"):
                ask()


@pytest.mark.mpi
def test_a_missing_or_damaged_file_is_one_error_on_all_ranks(world: Any, tmp_path_factory: Any) -> None:
    folder = Path(world.broadcast_object(str(tmp_path_factory.mktemp("saved")) if world.rank == 0 else None))
    strategy, memory = ("ddp", "zero3")[world.size % 2], {"share_node_memory": world.size % 4 < 2}
    batch = part(world, *points(8))
    model, fresh = (sharded(strategy, world, **memory) for _ in range(2))
    with model, fresh:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            model.load_model(folder / "nowhere")
        model.train(*batch)
        model.save_model(folder / "good")
        damage(folder / "good", world)
        for broken in (model, fresh, model):
            check_intact(broken, lambda m=broken: m.load_model(folder / "good"), "checksum mismatch")
            broken.train(*batch)


def damage(folder: Path, comm: Any) -> None:
    """Flip the last byte of the last array of optimizer state: everything before it is good."""
    if comm.rank == 0:
        file = folder / "state.h5"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    comm.barrier()


def check_intact(model: Any, call: Callable[[], Any], told: str) -> None:
    before = state_of(model)
    with pytest.raises(CheckpointError, match=told):
        call()
    assert state_of(model) == before


def test_damaged_bytes_on_one_rank_leave_all_models_intact() -> None:
    def one_damaged(comm: Any) -> None:
        with sharded("zero2", comm) as model:
            model.train(*part(comm, *points(8)))
            data = bytearray(model.serialize())
            if comm.rank == 1:
                data[len(data) // 2] ^= 255
            before = model.parameters_sha256()
            with pytest.raises((CheckpointError, RemoteError), match="checksum mismatch"):
                model.deserialize(bytes(data))
            assert model.parameters_sha256() == before
            stream = io.BytesIO()
            model.save_state(stream)
            everywhere = comm.broadcast_object(stream.getvalue())
            model.train(*part(comm, *points(8)))
            model.load_state(io.BytesIO(everywhere))
            assert model.parameters_sha256() == before

    run_in_threads(2, one_damaged)


def test_another_layout_is_an_error_only_where_it_is_asked_for(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        with sharded("zero2", comm) as model:
            model.save_model(tmp_path / "four")

    run_in_threads(4, save)
    with sharded("zero3", None) as model, sharded("fsdp", None) as again:
        with pytest.raises(CheckpointError, match="ZeRO-2 over 4 ranks.*ZeRO-3 over 1 rank"):
            model.load_model(tmp_path / "four", strict_layout=True)
        model.load_model(tmp_path / "four")
        model.save_model(tmp_path / "one")
        again.load_model(tmp_path / "one", strict_layout=True)  # FSDP is ZeRO-3 by another name


def test_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with sharded("zero1", None) as model:
        model.train(*points(4))
        model.save_model(tmp_path / "saved")
    for other, told in (
        (sharded("zero1", None, mlp(outputs=4)), "another model: .* has shape"),
        (sharded("zero1", None, optimizer=mz.Lion(lr=0.1)), "state of AdamW, the bound optimizer is Lion"),
        (sharded("zero1", None, mlp(dtype="float64")), "float32.*float64"),
    ):
        with other:
            other.train(*points(4, seed=1))
            check_intact(other, lambda m=other: m.load_model(tmp_path / "saved"), told)
