"""What is saved by any layout is loaded by any other, and goes on with the same bits."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError, LayoutError, RemoteError
from mpizero.sharding import saved_attributes
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, gpt, part, points, sharded, tokens

SCALE = mz.DynamicLossScale(initial=2.0**8, interval=3)


def run(comm: Any, strategy: str, memory: dict[str, Any], data: bytes | None, steps: int) -> tuple[bytes, list[str]]:
    """Load, train with dropout, clipping and a loss scale; return the state and the hash after every step."""
    settings = {"clip": 0.5, "micro_batch": 1, **memory}
    model, optimizer = sharded(strategy, comm, gpt(layers=1), mz.AdamW(lr=1e-2), **settings)
    with model:
        model.engine.bind(optimizer.wrapped_optimizer, SCALE)
        if data is not None:
            model.deserialize(data)
        hashes = []
        for _ in range(steps):
            model.train(*part(comm, *tokens(4)))
            hashes.append(model.parameters_sha256())
        return model.serialize(), hashes


@cache
def uninterrupted() -> tuple[bytes, list[str]]:
    first, hashes = run(None, "ddp", {}, None, 2)
    _, more = run(None, "ddp", {}, first, 8)
    return first, more


def test_a_state_in_the_middle_of_a_run_is_all_that_the_run_needs() -> None:
    _, whole = run(None, "ddp", {}, None, 4)
    assert whole[2:] == uninterrupted()[1][:2]


def test_four_zero2_ranks_save_and_three_zero3_ranks_go_on_with_the_same_bits() -> None:
    saved = run_in_threads(4, lambda comm: run(comm, "zero2", PRIVATE, None, 2)[0])
    assert len(set(saved)) == 1, "the same bytes on every rank"
    gone_on = run_in_threads(3, lambda comm: run(comm, "zero3", PRIVATE, saved[0], 8)[1])
    assert gone_on == [uninterrupted()[1]] * 3


@pytest.mark.parametrize("number", range(6))
def test_any_layout_loads_any_other(number: int) -> None:
    layouts = [(strategy, memory) for strategy in STRATEGIES for memory in MEMORIES]
    for pair in range(2):
        strategy, memory = layouts[number * 2 + pair]
        other, other_memory = layouts[(number * 5 + pair * 7 + 3) % len(layouts)]
        ranks = 2 + (number + pair) % 3
        saved = run_in_threads(ranks, lambda comm, s=strategy, m=memory: run(comm, s, m, None, 2)[0])
        assert len(set(saved)) == 1
        loaded = run_in_threads(5 - ranks, lambda comm, s=other, m=other_memory, d=saved[0]: run(comm, s, m, d, 1)[1])
        assert {h[0] for h in loaded} == {uninterrupted()[1][0]}


@pytest.mark.mpi
def test_folders_and_files_hold_the_whole_model(world: Any, tmp_path_factory: Any) -> None:
    folder = Path(world.broadcast_object(str(tmp_path_factory.mktemp("saved")) if world.rank == 0 else None))
    x, y = part(world, *points(8))
    cases = list(zip(STRATEGIES, ({}, PRIVATE, PRIVATE, {}), strict=True))
    for strategy, memory in cases[world.size % 5 % 2 :: 2]:
        model, optimizer = sharded(strategy, world, **memory)
        with model:
            model.train(x, y)
            model.save_model(folder / "model")
            optimizer.save(folder / "optimizer")
            named, state, image = model.named_parameters(), optimizer.state_dict(), optimizer.serialize()
            with h5py.File(folder / "model" / "state.h5") as file:
                for name, values in named.items():
                    np.testing.assert_array_equal(file["parameters"][name], values)
                for slot, arrays in state["state"].items():
                    for name, values in arrays.items():
                        np.testing.assert_array_equal(file["optimizer"][slot][name], values)
            model.train(x, y)
            after = model.parameters_sha256()
            model.load_model(folder / "model")
            model.train(x, y)
            assert model.parameters_sha256() == after
            for load in (
                lambda o=optimizer: o.load(folder / "optimizer"),
                lambda o=optimizer, s=state: o.load_state_dict(s),
                lambda o=optimizer, i=image: o.deserialize(i),
            ):
                model.set_parameters(np.concatenate([v.reshape(-1) for v in named.values()]))
                optimizer.reset()
                assert optimizer.step_count == 0
                load()
                assert optimizer.step_count == 1
                model.train(x, y)
                assert model.parameters_sha256() == after
        world.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_beside_training_has_the_values_of_its_call(strategy: str, tmp_path: Path) -> None:
    def train(comm: Any) -> None:
        model, _ = sharded(strategy, comm, **PRIVATE)
        with model:
            model.reserve_snapshot()
            held = model.engine.memory.private_bytes["snapshot"]
            for step in range(3):
                model.save_model(tmp_path / f"waited{step}", attributes={"step": step})
                pending = model.begin_save(tmp_path / f"begun{step}", attributes={"step": step})
                model.train(*part(comm, *points(8)))
                if step == 0:
                    pending.commit()
                assert pending.ended is (step == 0), "the next save, and the end, wait for it"
            assert model.engine.memory.private_bytes["snapshot"] == held > 0
        assert pending.ended

    run_in_threads(3, train)
    for step in range(3):
        for file in ("state.h5", "manifest.json"):
            begun, waited = (tmp_path / f"{how}{step}" / file for how in ("begun", "waited"))
            assert begun.read_bytes() == waited.read_bytes()
    assert len(list(tmp_path.iterdir())) == 6


def test_an_error_in_training_discards_the_save_beside_it(tmp_path: Path) -> None:
    def fail() -> None:
        model, _ = sharded("zero1", None)
        with model:
            model.begin_save(tmp_path / "model")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_open_files_work_like_bytes() -> None:
    first, _ = sharded("zero1", None)
    second, _ = sharded("zero3", None)
    stream = io.BytesIO()
    with first, second:
        first.train(*points(4))
        first.save_state(stream)
        stream.seek(0)
        second.load_state(stream)
        assert first.parameters_sha256() == second.parameters_sha256()
        assert first.train(*points(4)) == second.train(*points(4))


def test_a_model_without_optimizer_takes_the_parameters_alone() -> None:
    model, optimizer = sharded("zero1", None)
    with model, mz.DDPModel(model.wrapped_model, mz.ShardingConfig()) as bare:
        model.train(*points(4))
        bare.deserialize(model.serialize())
        assert bare.parameters_sha256() == model.parameters_sha256()
        with pytest.raises(CheckpointError, match="the checkpoint has none"):
            optimizer.deserialize(bare.serialize())


def test_a_state_of_another_shape_is_refused_and_changes_nothing() -> None:
    model, optimizer = sharded("zero1", None)
    with model:
        model.train(*points(4))
        state = optimizer.state_dict()
        name = next(iter(state["state"]["exp_avg"]))
        state["state"]["exp_avg"][name] = np.zeros(3)
        before = optimizer.serialize()
        with pytest.raises(LayoutError, match=f"no array '{name}' of shape"):
            optimizer.load_state_dict(state)
        with pytest.raises(LayoutError, match="state has slots"):
            optimizer.load_state_dict({"step_count": 1, "state": {}})
        assert optimizer.serialize() == before


def test_replicas_that_differ_are_found_and_repaired() -> None:
    def repair(comm: Any) -> tuple[int, int, str]:
        model, optimizer = sharded("ddp", comm, **PRIVATE)
        with model:
            model.train(*part(comm, *points(8)))
            assert optimizer.synchronize_optimizer_state() == 0
            if comm.rank == 2:
                model.engine.updater.state["exp_avg"][3] += 1
                model.engine.updater.step_count = 9
            repaired = optimizer.synchronize_optimizer_state()
            return repaired, optimizer.step_count, optimizer.serialize().hex()

    found = run_in_threads(3, repair)
    assert len(set(found)) == 1
    assert found[0][:2] == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: [],
        lambda told: told | {"step_number": "7"},
        lambda told: told | {"step_number": -1},
        lambda told: told | {"layout": "ddp"},
        lambda told: told | {"optimizer": ["AdamW"]},
        lambda told: told | {"optimizer": {"name": "adamw"}},
        lambda told: told | {"optimizer": told["optimizer"] | {"step_count": 0.5}},
        lambda told: told | {"loss_scale": {"scale": -1.0, "good_steps": 0}},
        lambda told: told | {"loss_scale": {"scale": 1.0, "good_steps": 0, "policy": None}},
        lambda told: told | {"loss_scale": {"scale": True, "good_steps": 0}},
        lambda told: told | {"loss_scale": {"scale": 1.0}},
        lambda told: told | {"loss_scale": {"scale": 1.0, "good_steps": 10**300}},
        lambda told: told | {"step_number": True},
        lambda told: told | {"layout": {}},
        lambda told: told | {"layout": {"strategy": "DDP", "nodes": 1}},
        lambda told: told | {"layout": told["layout"] | {"ranks": 0}},
        lambda told: told | {"layout": told["layout"] | {"ranks": 1.0}},
        lambda told: told | {"layout": told["layout"] | {"strategy": 3}},
        lambda told: told | {"layout": told["layout"] | {"experts": 2}},
        lambda told: told | {"optimizer": told["optimizer"] | {"name": None}},
        lambda told: told | {"optimizer": told["optimizer"] | {"slots": "exp_avg"}},
        lambda told: told | {"optimizer": told["optimizer"] | {"more": 1}},
        lambda told: told | {"second_optimizer": told["optimizer"]},
        lambda told: told | {"grains": 16},
        lambda told: told | {"tied": ["head"]},
        lambda told: told | {"tiles": 4},
        lambda told: told | {"tiles": {"tensor": 0, "context": 1}},
        lambda told: told | {"tiles": {"tensor": 2}},
        lambda told: told | {"grains": {"order": "binary tree"}},
        lambda told: told | {"grains": told["grains"] | {"micro_batch": 0}},
        lambda told: told | {"grains": told["grains"] | {"accumulate": None}},
        lambda told: told | {"grains": told["grains"] | {"efficient": True}},
        lambda told: told | {"grains": told["grains"] | {"order": 2}},
    ],
)
def test_attributes_that_mpizero_cannot_have_written_are_refused_and_change_nothing(change) -> None:
    model, _ = sharded("ddp", None, gpt(layers=1), mz.AdamW(lr=1e-2))
    with model:
        before = model.parameters_sha256()
        told = change(model.checkpoint_attributes()["mpizero"])
        data = checkpoint.to_bytes(model.checkpoint_arrays(), {"mpizero": told})
        model.train(*part(None, *tokens(4)))
        after = model.parameters_sha256()
        with pytest.raises(CheckpointError, match="attribute 'mpizero'"):
            model.deserialize(data)
        assert before != after == model.parameters_sha256()


# ---------------------------------------------------------------------- a file that can be read once


class Failing:
    """A checkpoint whose reading number ``last`` fails on rank 1 with an input/output error."""

    def __init__(self, comm: Any, reader: Any, last: int) -> None:
        self.arrays, self.attributes = reader.arrays, reader.attributes
        self.comm, self.reader, self.last, self.readings = comm, reader, last, 0

    def read(self, requests: Any) -> None:
        self.readings += 1
        self.reader.read(requests)
        if self.readings == self.last:
            for request in requests:
                for _, values in request.pieces:
                    values[:] = 7  # what was read so far
            if self.comm.rank == 1:
                raise OSError(5, "Input/output error")


IN_USE = ("zero3", PRIVATE), ("ddp", {}), ("zero1", PRIVATE), ("hybrid", {})


def in_use(comm: Any, kind: str, memory: dict[str, Any]) -> Any:
    """A model that has made a step, its optimizer, and how it makes one more."""
    if kind == "hybrid":
        config = mz.ShardingConfig(comm=comm, minimum_parameter_group_size=1)
        model = mz.HybridShardedModel(gpt(layers=1), config, tensor_parallel_size=2)
        optimizer = mz.HybridShardedOptimizer(mz.AdamW(lr=1e-2), config)
        optimizer.set_model(model)
    else:
        model, optimizer = sharded(kind, comm, gpt(layers=1), mz.AdamW(lr=1e-2), **memory)

    def step() -> None:
        model.train(*part(model.batch_group, *tokens(4)))

    step()
    return model, optimizer, step


@pytest.mark.parametrize(("kind", "memory"), IN_USE)
def test_a_small_model_in_use_is_as_before_whichever_reading_fails(kind: str, memory: dict[str, Any]) -> None:
    """It is read once, aside, and verified there: no second reading can fail."""

    def run(comm: Any) -> None:
        model, _, step = in_use(comm, kind, memory)
        with model:
            good = model.serialize()
            step()
            before = model.serialize()
            with checkpoint.from_bytes(good) as reader:
                failing = Failing(comm, reader, 1)
                with pytest.raises((OSError, RemoteError), match="Input/output error"):
                    model.restore_arrays(failing)
                assert model.serialize() == before
                model.restore_arrays(failing)
                assert failing.readings == 2
            assert model.serialize() == good

    run_in_threads(2, run)


@pytest.mark.parametrize(("kind", "memory"), IN_USE)
def test_a_model_that_is_half_loaded_refuses_to_be_used_until_it_is_whole(
    kind: str, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is verified by a first reading; where the second one fails before anything was changed, nothing has."""
    monkeypatch.setattr(saved_attributes, "VERIFIED_AT_ONCE", 2000)

    def run(comm: Any) -> None:
        model, optimizer, step = in_use(comm, kind, memory)
        with model, checkpoint.from_bytes(model.serialize()) as reader:
            good, whole = model.serialize(), Failing(comm, reader, 0)
            step()
            before = model.serialize()
            model.restore_arrays(whole)
            groups = whole.readings // 2
            assert groups > 2
            for last in range(1, whole.readings + 1):
                model.deserialize(before)
                with pytest.raises((OSError, RemoteError), match="Input/output error"):
                    model.restore_arrays(Failing(comm, reader, last))
                if last <= groups + 1:
                    assert model.serialize() == before
                    continue
                for use in (
                    step,
                    model.serialize,
                    model.get_parameters,
                    model.parameters_sha256,
                    lambda: model.predict(tokens(1)[0]),
                    lambda: model.save_model("nowhere"),
                    model.clone,
                    lambda: optimizer.step_count,
                ):
                    with pytest.raises(CheckpointError, match="half loaded: .*Input/output error.*load_model"):
                        use()
            optimizer.deserialize(good)
            with pytest.raises(CheckpointError, match="half loaded: parameters/"):
                step()
            model.deserialize(good)
            assert model.serialize() == good
            step()
            assert model.serialize() == before

    run_in_threads(2, run)


def test_parameters_alone_do_not_make_a_half_loaded_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_attributes, "VERIFIED_AT_ONCE", 2000)
    model, _, step = in_use(None, "zero1", {})
    with model, mz.DDPModel(model.wrapped_model, mz.ShardingConfig()) as bare:
        good = model.serialize()
        with checkpoint.from_bytes(good) as reader:
            whole = Failing(mz.InMemoryCommunicator.group(2)[1], reader, 0)
            model.restore_arrays(whole)
            with pytest.raises(OSError, match="Input/output error"):
                model.restore_arrays(Failing(whole.comm, reader, whole.readings))
        model.deserialize(bare.serialize())
        with pytest.raises(CheckpointError, match=r"half loaded: optimizer/\S+ and \d+ more"):
            step()
        model.deserialize(good)
        assert model.serialize() == good


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda attributes: attributes.clear(), "mpizero.optimizer, which says of what optimizer, is missing"),
        (lambda attributes: attributes["mpizero"].update(optimizer=None), "is missing"),
        (lambda attributes: attributes["mpizero"]["optimizer"]["slots"].pop(), "lacks 'exp_avg_sq', which"),
        (lambda attributes: attributes["mpizero"]["optimizer"]["slots"].append("third"), "has 'third', which"),
    ],
)
def test_optimizer_state_is_never_left_out_without_a_word(change, message) -> None:
    """A model with an optimizer takes all the state that is there, or says why not; one without asks for none."""
    model, _ = sharded("ddp", None, gpt(layers=1), mz.AdamW(lr=1e-2))
    with model:
        model.train(*part(None, *tokens(4)))
        arrays, attributes, trained = (
            model.checkpoint_arrays(),
            model.checkpoint_attributes(),
            model.parameters_sha256(),
        )
        change(attributes)
        data = checkpoint.to_bytes(arrays, attributes)
        model.train(*part(None, *tokens(4)))
        after = model.parameters_sha256()
        with pytest.raises(CheckpointError, match=message):
            model.deserialize(data)
        assert model.parameters_sha256() == after
    with mz.ShardingConfig() as config, mz.DDPModel(gpt(layers=1), config) as plain:
        plain.deserialize(data)
        assert plain.parameters_sha256() == trained


@pytest.mark.parametrize("progress", [{"stage": "lost"}, {}, 0])
def test_progress_that_an_optimizer_does_not_have_is_refused(progress: object) -> None:
    with mz.distribute(mz.nn.MLP(3, [4], 2), mz.Adam(lr=0.1), comm="self") as model:
        state = model.optimizer.state_dict()
        with pytest.raises(LayoutError, match="progress"):
            model.optimizer.load_state_dict({**state, "progress": progress})
        model.optimizer.load_state_dict(state)


@pytest.mark.parametrize("missing", ["step_count", "state"])
def test_a_state_without_one_of_its_parts_is_refused_by_name(missing: str) -> None:
    with mz.distribute(mz.nn.MLP(3, [4], 2), mz.Adam(lr=0.1), comm="self") as model:
        state = model.optimizer.state_dict()
        with pytest.raises(LayoutError, match=rf"no \['{missing}'\]; pass what state_dict"):
            model.optimizer.load_state_dict({key: value for key, value in state.items() if key != missing})


def test_state_of_other_slots_is_refused() -> None:
    """Momentum that a run has gathered is not dropped by an optimizer of the same name without one."""
    model, _ = sharded("ddp", None, gpt(layers=1), mz.SGD(lr=1e-2, momentum=0.9))
    other, _ = sharded("ddp", None, gpt(layers=1), mz.SGD(lr=1e-2))
    with model, other:
        model.train(*part(None, *tokens(4)))
        with pytest.raises(CheckpointError, match="which the bound optimizer lacks"):
            other.deserialize(model.serialize())


def test_a_manifest_without_the_ranks_of_its_layout_is_an_error_also_where_the_layout_counts(tmp_path) -> None:
    model, _ = sharded("ddp", None, gpt(layers=1))
    with model:
        told = model.checkpoint_attributes()["mpizero"]
        del told["layout"]["ranks"]
        checkpoint.write(tmp_path / "c", model.checkpoint_arrays(), {"mpizero": told})
        for strict in (False, True):
            with pytest.raises(CheckpointError, match="attribute 'mpizero': layout is .* ranks and nodes"):
                model.load_model(tmp_path / "c", strict_layout=strict)
