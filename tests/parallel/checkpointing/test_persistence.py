"""What a save holds and a load takes: all of it, or nothing, with the name of what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError, LayoutError, RemoteError
from mpizero.sharding import saved_attributes
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, STRATEGIES, gpt, part, points, sharded, tokens
from tests.parallel.parallel_layouts import Case, Way, placed


def trained_gpt() -> Any:
    """A model in one process after a step."""
    model = sharded("ddp", None, gpt(layers=1))
    model.train(*tokens(4))
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_beside_training_has_the_values_of_its_call(strategy: str, tmp_path: Path) -> None:
    def train(comm: Any) -> None:
        with sharded(strategy, comm, **PRIVATE) as model:
            model._reserve_snapshot()
            held = model._engine.memory.private_bytes["snapshot"]
            for step in range(3):
                model.save_model(tmp_path / f"waited{step}", attributes={"step": step})
                pending = model.begin_save(tmp_path / f"begun{step}", attributes={"step": step})
                model.train(*part(comm, *points(8)))
                if step == 0:
                    pending.commit()
                assert pending.ended is (step == 0), "the next save, and the end, wait for it"
            assert model._engine.memory.private_bytes["snapshot"] == held > 0
        assert pending.ended

    run_in_threads(3, train)
    for step in range(3):
        for file in ("state.h5", "manifest.json"):
            begun, waited = (tmp_path / f"{how}{step}" / file for how in ("begun", "waited"))
            assert begun.read_bytes() == waited.read_bytes()
    assert len(list(tmp_path.iterdir())) == 6


def test_an_error_in_training_discards_the_save_beside_it(tmp_path: Path) -> None:
    def fail() -> None:
        with sharded("zero1", None) as model:
            model.begin_save(tmp_path / "model")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_optimizer_takes_the_parameters_alone() -> None:
    with sharded("zero1", None) as model, mz.DDPModel(model.wrapped_model, mz.ShardingConfig()) as bare:
        model.train(*points(4))
        bare.deserialize(model.serialize())
        assert bare.parameters_sha256() == model.parameters_sha256()
        with pytest.raises(CheckpointError, match="the checkpoint has none"):
            model.optimizer.deserialize(bare.serialize())


def test_a_state_dictionary_that_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    with trained_gpt() as model:
        optimizer = model.optimizer
        state, before = optimizer.state_dict(), optimizer.serialize()
        arrays, name = state["state"]["exp_avg"], next(iter(state["state"]["exp_avg"]))
        for wrong, told in (
            ({**state, "state": {**state["state"], "exp_avg": {**arrays, name: np.zeros(3)}}}, f"no array '{name}' of"),
            ({**state, "state": {}}, "state has slots"),
            *(({**state, "progress": progress}, "progress") for progress in ({"stage": "lost"}, {}, 0)),
            ({"step_count": 1}, r"no \['state'\]; pass what state_dict"),
            ({"state": state["state"]}, r"no \['step_count'\]; pass what state_dict"),
        ):
            with pytest.raises(LayoutError, match=told):
                optimizer.load_state_dict(wrong)
            assert optimizer.serialize() == before
        optimizer.load_state_dict(state)


def test_replicas_that_differ_are_found_and_repaired() -> None:
    def repair(comm: Any) -> tuple[int, int, str]:
        with sharded("ddp", comm, **PRIVATE) as model:
            optimizer = model.optimizer
            model.train(*part(comm, *points(8)))
            assert optimizer.synchronize_optimizer_state() == 0
            if comm.rank == 2:
                model._engine.updater.state["exp_avg"][3] += 1
                model._engine.updater.step_count = 9
            repaired = optimizer.synchronize_optimizer_state()
            return repaired, optimizer.step_count, optimizer.serialize().hex()

    found = run_in_threads(3, repair)
    assert len(set(found)) == 1
    assert found[0][:2] == (1, 1)


WRONG_SCALES = (
    {"scale": -1.0, "good_steps": 0},
    {"scale": 1.0, "good_steps": 0, "policy": None},
    {"scale": True, "good_steps": 0},
    {"scale": 1.0},
    {"scale": 1.0, "good_steps": 10**300},
)
#: Of an attribute, or of a key of one, what it cannot be.
WRONG_ATTRIBUTES = {
    "step_number": ("7", -1, True),
    "layout": ("ddp", {}, {"strategy": "DDP", "nodes": 1}),
    "layout.ranks": (0, 1.0),
    "layout.strategy": (3,),
    "layout.experts": (2,),
    "optimizer": (["AdamW"], {"name": "adamw"}),
    "optimizer.step_count": (0.5,),
    "optimizer.name": (None,),
    "optimizer.slots": ("exp_avg",),
    "optimizer.more": (1,),
    "second_optimizer": ({"name": "AdamW"},),
    "loss_scale": WRONG_SCALES,
    "tied": (["head"],),
    "tiles": (4, {"tensor": 0, "context": 1}, {"tensor": 2}),
    "grains": (16, {"order": "binary tree"}),
    "grains.micro_batch": (0,),
    "grains.accumulate": (None,),
    "grains.efficient": (True,),
    "grains.least": (0, None, True),
    "grains.order": (2,),
}


@pytest.mark.slow
def test_attributes_that_mpizero_cannot_have_written_are_refused_and_change_nothing() -> None:
    with trained_gpt() as model:
        arrays, told = model._checkpoint_arrays(), model._checkpoint_attributes()["mpizero"]
        given: list[Any] = [[]]
        for name, values in WRONG_ATTRIBUTES.items():
            first, _, key = name.partition(".")
            given += [{**told, first: {**told[first], key: value} if key else value} for value in values]
        images = [checkpoint.to_bytes(arrays, {"mpizero": wrong}) for wrong in given]
        model.train(*tokens(4))
        after = model.parameters_sha256()
        for wrong, image in zip(given, images, strict=True):
            with pytest.raises(CheckpointError, match="attribute 'mpizero'"):
                model.deserialize(image)
            assert model.parameters_sha256() == after, wrong


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
    """A model that has made a step, and how it makes one more."""
    network = gpt(layers=1)
    model = (
        placed(Case(lambda: network), comm, Way(tensor=2))
        if kind == "hybrid"
        else sharded(kind, comm, network, **memory)
    )

    def step() -> None:
        model.train(*part(model.batch_group, *tokens(4)))

    step()
    return model, step


@pytest.mark.parametrize(("kind", "memory"), IN_USE)
def test_a_small_model_in_use_is_as_before_whichever_reading_fails(kind: str, memory: dict[str, Any]) -> None:
    """It is read once, aside, and verified there: no second reading can fail."""

    def run(comm: Any) -> None:
        model, step = in_use(comm, kind, memory)
        with model:
            good = model.serialize()
            step()
            before = model.serialize()
            with checkpoint.from_bytes(good) as reader:
                failing = Failing(comm, reader, 1)
                with pytest.raises((OSError, RemoteError), match="Input/output error"):
                    model._restore_arrays(failing)
                assert model.serialize() == before
                model._restore_arrays(failing)
                assert failing.readings == 2
            assert model.serialize() == good

    run_in_threads(2, run)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "memory"), IN_USE)
def test_a_model_that_is_half_loaded_refuses_to_be_used_until_it_is_whole(
    kind: str, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is verified by a first reading; where the second one fails before anything was changed, nothing has."""
    monkeypatch.setattr(saved_attributes, "VERIFIED_AT_ONCE", 2000)

    def run(comm: Any) -> None:
        model, step = in_use(comm, kind, memory)
        with model, checkpoint.from_bytes(model.serialize()) as reader:
            good, whole = model.serialize(), Failing(comm, reader, 0)
            step()
            before = model.serialize()
            model._restore_arrays(whole)
            groups = whole.readings // 2
            assert groups > 2
            for last in (1, groups, groups + 1, groups + 2, whole.readings):
                model.deserialize(before)
                with pytest.raises((OSError, RemoteError), match="Input/output error"):
                    model._restore_arrays(Failing(comm, reader, last))
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
                    lambda: model.optimizer.step_count,
                ):
                    with pytest.raises(CheckpointError, match="partially loaded: .*Input/output error.*load_model"):
                        use()
            model.optimizer.deserialize(good)
            with pytest.raises(CheckpointError, match="partially loaded: parameters/"):
                step()
            model.deserialize(good)
            assert model.serialize() == good
            step()
            assert model.serialize() == before

    run_in_threads(2, run)


def test_parameters_alone_do_not_make_a_half_loaded_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_attributes, "VERIFIED_AT_ONCE", 2000)
    model, step = in_use(None, "zero1", {})
    with model, mz.DDPModel(model.wrapped_model, mz.ShardingConfig()) as bare:
        good = model.serialize()
        with checkpoint.from_bytes(good) as reader:
            whole = Failing(mz.InMemoryCommunicator.group(2)[1], reader, 0)
            model._restore_arrays(whole)
            with pytest.raises(OSError, match="Input/output error"):
                model._restore_arrays(Failing(whole.comm, reader, whole.readings))
        model.deserialize(bare.serialize())
        with pytest.raises(CheckpointError, match=r"partially loaded: optimizer/\S+ and \d+ more"):
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
def test_optimizer_state_is_never_left_out_without_a_word(change: Any, message: str) -> None:
    """A model with an optimizer takes all the state that is there, or says why not; one without asks for none."""
    with trained_gpt() as model, mz.DDPModel(gpt(layers=1), mz.ShardingConfig()) as plain:
        attributes, trained = model._checkpoint_attributes(), model.parameters_sha256()
        change(attributes)
        data = checkpoint.to_bytes(model._checkpoint_arrays(), attributes)
        model.train(*tokens(4))
        after = model.parameters_sha256()
        with pytest.raises(CheckpointError, match=message):
            model.deserialize(data)
        assert model.parameters_sha256() == after
        plain.deserialize(data)
        assert plain.parameters_sha256() == trained


def test_a_manifest_without_the_ranks_of_its_layout_is_an_error_also_where_the_layout_counts(tmp_path: Path) -> None:
    with sharded("ddp", None) as model:
        told = model._checkpoint_attributes()["mpizero"]
        del told["layout"]["ranks"]
        checkpoint.write(tmp_path / "c", model._checkpoint_arrays(), {"mpizero": told})
        for strict in (False, True):
            with pytest.raises(CheckpointError, match="attribute 'mpizero': layout is .* ranks and nodes"):
                model.load_model(tmp_path / "c", strict_layout=strict)
