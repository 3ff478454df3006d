"""A step that is not finite: named alike everywhere, kept in plain files, and evaluated again in one process."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError
from mpizero.sharding import read_bad_step
from mpizero.testing import run_in_threads
from tests.parallel.covering import on_layouts
from tests.parallel.models import gpt, mlp, part, points, sharded, step_whose_sum_overflows, tokens
from tests.parallel.parallel_layouts import Case, Way, placed, with_traps


def bad_points(samples: int, first: int) -> tuple[Any, Any]:
    x, y = points(samples)
    x[first:] = np.inf
    return x, y


@pytest.mark.slow
def test_the_loss_of_the_first_grain_is_named_on_every_layout(tmp_path: Path) -> None:
    """With clipping, several micro-batches a grain, or neither of them, in turn."""

    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        count, bad = 4 * comm.size, (2 * comm.size + 1) // 2 * 2
        x, y = bad_points(count, 2 * comm.size + 1)
        extra: dict[str, Any] = ({}, {"clip": 1.0}, {"accumulate": 2})[(len(memory) + comm.size) % 3]
        micro = 2 // extra.get("accumulate", 1)
        with sharded(strategy, comm, mlp(), micro_batch=micro, **extra, **memory) as model:
            model.train(*part(comm, *points(count)))
            before = model.parameters_sha256()
            model.train(*part(comm, x, y))
            found = model.last_step.non_finite
            assert (found[0].step, found[0].tensor, found[0].start, found[0].stop) == (2, "loss", bad, bad + 2)
            assert [f.start for f in found] == list(range(bad, count, 2))[:16]
            assert set(comm.allgather_object(found)) == {found}
            assert model.parameters_sha256() == before
            step = read_bad_step(
                mz.sharding.dump_bad_step(model, part(comm, x, y), tmp_path / f"{comm.size} {strategy} {memory}")
            )
            assert [list(grain.samples) for grain in step.grains] == [[f.start, f.start + 1] for f in found]
            np.testing.assert_array_equal(np.concatenate([grain.x for grain in step.grains]), x[bad : bad + 32])
            assert (step.step, step.run_step, step.micro_batch, step.global_batch) == (2, 1, micro, count)
            assert step.found[0]["rank"] == found[0].rank

    on_layouts(run)


@pytest.mark.parametrize("way", [Way(2, 1), Way(2, 1, zero=3, schedule="zero_bubble"), Way(1, 2)], ids=str)
def test_a_gradient_of_a_split_model_is_named_by_its_block_whoever_holds_it(way: Way, tmp_path: Path) -> None:
    """The block that the backward pass comes to first is named, on whatever stage; a tensor group names its loss."""
    x, y = tokens(8)

    def run(comm: Any) -> None:
        armed = {"what": "infinite", "first": 4} if way.tensor == 1 else {}
        case = Case(lambda: with_traps(gpt(dropout=0.0), {"blocks.0": armed, "blocks.1": armed} if armed else {}))
        with placed(case, comm, way) as model:
            if not armed:
                poison = model.get_parameters()
                entries = model._engine.global_view.layout.parameters
                poison[next(e for e in entries if "blocks.1" in e.spec.name).offset] = np.inf
                model.set_parameters(poison)
            mine = part(model.batch_group, x, y)
            model.train(*mine)
            first = model.last_step.non_finite[0]
            assert first.tensor.startswith("blocks.1." if armed else "loss")
            assert not armed or (first.start, first.stop) == (4, 6)
            step = read_bad_step(mz.sharding.dump_bad_step(model, mine, tmp_path))
            np.testing.assert_array_equal(step.grains[0].x, x[first.start : first.stop])

    run_in_threads(4, run)


def test_gradients_that_overflow_in_their_sum_are_named_with_their_owner() -> None:
    """Each grain's gradient is finite in float32, their sum is not: all samples together are to blame."""
    with np.errstate(over="ignore"):
        found = run_in_threads(2, step_whose_sum_overflows)
    assert all(step.skipped and not parameters.any() for step, parameters in found)
    first, second = (step.non_finite for step, _ in found)
    assert first == second
    assert first[0].tensor.startswith("output.")
    assert (first[0].start, first[0].stop) == (0, 2)


def dumped(folder: Path, model: Any, x: Any, y: Any) -> Any:
    model.train(x, y)
    return mz.sharding.dump_bad_step(model, (x, y), folder)


def test_a_replay_finds_the_first_value_that_is_not_finite(tmp_path: Path) -> None:
    x, y = tokens(4)
    with sharded("zero2", None, gpt(dtype="float32"), micro_batch=2) as model:
        values = model.get_parameters()
        entry = model._engine.global_view.layout.by_name["blocks.1.feed_forward.expand.weight"]
        values[entry.span.start : entry.span.stop] = 3e38
        model.set_parameters(values)
        path = dumped(tmp_path, model, x, y)
        replays = mz.sharding.replay_bad_step(path, model)
        assert [(r.start, r.stop) for r in replays] == [(0, 2), (2, 4)]
        for replay in replays:
            assert (replay.first.what, replay.first.name) == ("output", "blocks.1")
            names = [(f.what, f.name) for f in replay.figures]
            assert names.index(("output", "blocks.1")) < names.index(("loss", "loss"))
            assert names.index(("loss", "loss")) < names.index(("gradient of output", "head"))
            assert names.index(("gradient", entry.spec.name)) < names.index(("gradient of output", "blocks.0"))
        np.testing.assert_array_equal(model.get_parameters(), values)


def test_a_replay_sees_what_the_training_saw(tmp_path: Path) -> None:
    """Same samples, dropout and cut into micro-batches: the same loss, to the bit."""
    x, y = tokens(4)
    armed: dict[str, Any] = {}
    with sharded("ddp", None, with_traps(gpt(), {"blocks.1": armed}), micro_batch=2, accumulate=2) as model:
        model.train(x, y)
        armed.update(what="infinite", first=0)
        start = model.get_parameters()
        path = dumped(tmp_path, model, x, y)
        armed.clear()
        assert model.last_step.skipped
        np.testing.assert_array_equal(model.get_parameters(), start)
        replays = mz.sharding.replay_bad_step(path, model)
        assert all(replay.first is None for replay in replays)
        assert sum(replay.loss for replay in replays) / sum(r.weight for r in replays) == model.last_step.loss


def test_a_black_box_is_replayed_with_its_loss_and_gradients(tmp_path: Path) -> None:
    def loss_and_grad(p: Mapping[str, Any], batch: tuple[Any, Any]) -> tuple[float, dict[str, Any], float]:
        x, _ = batch
        return float(x.sum()), {"w": np.log(x.sum(0)), "frozen": np.full(3, np.nan)}, float(len(x))

    start = {"w": np.ones(3), "frozen": np.ones(3)}
    with sharded("zero1", None, mz.FunctionModel(start, loss_and_grad, frozen=["frozen"]), micro_batch=1) as model:
        x = np.ones((3, 3))
        x[2, 1] = 0.0
        path = dumped(tmp_path, model, x, x)
        (replay,) = mz.sharding.replay_bad_step(path, model)
        assert (replay.start, replay.stop, replay.first.what, replay.first.name) == (2, 3, "gradient", "w")
        assert (replay.first.not_finite, replay.first.size) == (1, 3)


def test_a_replay_wants_one_process(tmp_path: Path) -> None:
    def run(comm: Any) -> None:
        model = sharded("ddp", comm, micro_batch=1)
        with model, pytest.raises(ConfigError, match="one process, the model is on 2"):
            mz.sharding.replay_bad_step(tmp_path, model)

    run_in_threads(2, run)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    with sharded("ddp", None, micro_batch=2) as model:
        return Path(dumped(tmp_path, model, *bad_points(4, 2)))


def test_a_good_step_leaves_nothing_and_a_batch_of_objects_is_refused(tmp_path: Path) -> None:
    with sharded("ddp", None, micro_batch=2) as model:
        model.train(*points(4))
        assert mz.sharding.dump_bad_step(model, points(4), tmp_path) is None
        model.train(*bad_points(4, 2))
        with pytest.raises(DataError, match="x is an array of objects: only arrays of numbers"):
            mz.sharding.dump_bad_step(model, (np.array([None] * 4), points(4)[1]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_files_are_plain(dump: Path) -> None:
    told = json.loads((dump / "step.json").read_text())
    assert (told["format"], told["version"], told["grains"]) == ("mpizero bad step", 1, ["grain_00001.npz"])
    with np.load(dump / "grain_00001.npz", allow_pickle=False) as grain:
        assert sorted(grain) == ["samples", "x", "y"]
        assert list(grain["samples"]) == [2, 3]
    assert [path.name for path in dump.parent.iterdir()] == ["step_00000001"]


def test_damaged_files_are_named(dump: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no bad step: step.json: No such file"):
        read_bad_step(tmp_path / "nowhere")
    path = dump / "grain_00001.npz"
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", whole.replace(b"x.npy", b"z.npy")):
        path.write_bytes(damage)
        with pytest.raises(DataError, match="grain_00001.npz: not the samples of a grain"):
            read_bad_step(dump)


def described(dump: Path, **changes: Any) -> bytes:
    return json.dumps(json.loads((dump / "step.json").read_text()) | changes).encode()


STEPS: dict[str, Any] = {
    "deep": lambda d: b'{"about":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep about": lambda d: described(d, about={"config": json.loads("[" * 60 + "]" * 60)}),
    "not a number": lambda d: described(d).replace(b'"seed": ', b'"seed": NaN, "more": '),
    "one key twice": lambda d: described(d).replace(b'"seed": ', b'"seed": 1, "seed": '),
    "version 1.0": lambda d: described(d, version=1.0),
    "version true": lambda d: described(d, version=True),
    "a key more": lambda d: described(d, code="import os"),
    "a step of text": lambda d: described(d, step="1"),
    "a negative step": lambda d: described(d, run_step=-1),
    "a huge seed": lambda d: described(d, seed=2**200),
    "a loss scale that no float holds": lambda d: described(d).replace(
        b'"loss_scale": ', b'"loss_scale": 1' + b"0" * 400 + b', "more": '
    ),
    "no micro-batch": lambda d: described(d, micro_batch=0),
    "half a micro-batch": lambda d: described(d, micro_batch=1.5),
    "what was found, as text": lambda d: described(d, found="ab"),
    "nothing about what was found": lambda d: described(d, found=[{}]),
    "libraries of numbers": lambda d: described(d, libraries={"numpy": 2}),
    "upwards": lambda d: described(d, grains=["../grain_00001.npz"]),
    "absolute": lambda d: described(d, grains=["/etc/passwd"]),
    "a grain a thousand times": lambda d: described(d, grains=["grain_00001.npz"] * 1000),
    "another thing": lambda d: b"[]",
    "a missing key": lambda d: described(d).replace(b'"seed"', b'"need"'),
    "tens of megabytes": lambda d: described(d, about={"x": "y" * (17 << 20)}),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_made_up_description_of_a_step_is_refused(dump: Path, case: str) -> None:
    (dump / "step.json").write_bytes(STEPS[case](dump))
    with pytest.raises(DataError, match="step.json") as caught:
        read_bad_step(dump)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


def npy(descr: Any, shape: Any, data: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).ljust(117).encode() + b"\n"
    return b"\x93NUMPY" + bytes(version) + len(header).to_bytes(2, "little") + header + data


def grain(path: Path, **members: Any) -> None:
    """Write a grain, some members of which are other bytes, or missing."""
    sound = {
        "x": npy("<f4", (2, 6), bytes(48)),
        "y": npy("<i8", (2,), bytes(16)),
        "samples": npy("<i8", (2,), bytes(16)),
    }
    with zipfile.ZipFile(path, "w", members.pop("method", zipfile.ZIP_STORED)) as archive:
        for name, data in (sound | members).items():
            if data is not None:
                archive.writestr(f"{name}.npy", data)


GRAINS: dict[str, Any] = {
    "a petabyte": {"x": npy("<f4", (2, 2**47), b"")},
    "a product of sizes past 64 bits": {"x": npy("<f4", (2**40, 2**40), b"")},
    "a negative size": {"x": npy("<f4", (-2, 6), b"")},
    "objects": {"x": npy("|O", (2,), b"cos\nsystem\n(S'true'\ntR.")},
    "text": {"x": npy("<U3", (2,), bytes(24))},
    "records": {"x": npy([("a", "<f4")], (2,), bytes(8))},
    "dates": {"x": npy("<M8[s]", (2,), bytes(16))},
    "huge elements": {"x": npy("|V1000000000", (2,), bytes(16))},
    "an expression": {"x": npy("<f4", "__import__('os')", b"")},
    "another version": {"x": npy("<f4", (2, 6), bytes(48), (3, 0))},
    "no array": {"x": b"import os"},
    "less data": {"x": npy("<f4", (2, 6), bytes(40))},
    "more data": {"x": npy("<f4", (2, 6), bytes(56))},
    "a bomb": {"x": npy("<f4", (2, 2**24), bytes(2**27)), "method": zipfile.ZIP_DEFLATED},
    "no samples": {"samples": None},
    "other numbers of samples": {"y": npy("<i8", (1,), bytes(8))},
    "fractions of samples": {"samples": npy("<f8", (2,), bytes(16))},
    "complex samples": {"samples": npy("<c8", (2,), bytes(16))},
    "negative samples": {"samples": npy("<i8", (2,), b"\xff" * 16)},
    "scalars": {name: npy("<f4", (), bytes(4)) for name in ("x", "y", "samples")},
}


@pytest.mark.parametrize("case", GRAINS)
def test_made_up_samples_are_refused_before_memory_is_taken(dump: Path, case: str) -> None:
    grain(dump / "grain_00001.npz")
    assert len(read_bad_step(dump).grains[0].x) == 2
    grain(dump / "grain_00001.npz", **GRAINS[case])
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="grain_00001.npz") as caught:
            read_bad_step(dump)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable()


def test_something_else_in_place_of_a_file_of_a_step_is_refused_at_once(dump: Path) -> None:
    elsewhere = dump.parent / "elsewhere"
    for name, put in (("step.json", os.mkfifo), ("grain_00001.npz", lambda path: path.symlink_to(elsewhere))):
        (dump / name).rename(elsewhere)
        put(dump / name)
        with pytest.raises(DataError, match=name):
            read_bad_step(dump)
        elsewhere.replace(dump / name)


def changed_at_random(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.randrange(1, 4)):
        start = draw.randrange(len(data))
        other = draw.choice(
            [b"", b"0", b"-", b'"', b"[", b"}", b"e9", b"\xff", b"\x00" * 4, b"\xff" * 8, draw.randbytes(3)]
        )
        data = data[:start] + other + data[start + draw.randrange(2 * len(other) + 2) :]
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step.json", "grain_00001.npz"])
def test_a_step_changed_at_random_is_read_or_refused(dump: Path, name: str) -> None:
    draw, whole = random.Random(7), (dump / name).read_bytes()
    refusals = []
    for _ in range(400):
        (dump / name).write_bytes(changed_at_random(whole, draw))
        try:
            read_bad_step(dump)
        except DataError as error:
            refusals.append(str(error))
    assert len(refusals) > 200
    assert all(told.isprintable() and len(told) < 1000 for told in refusals)


@pytest.mark.parametrize("at", ["forward", "backward_input", "backward_weights"])
def test_the_error_of_a_layer_comes_out_of_a_replay_as_itself(tmp_path: Path, at: str, monkeypatch: Any) -> None:
    x, y = bad_points(4, 2)
    with sharded("zero2", None, micro_batch=2) as model:
        path = dumped(tmp_path, model, x, y)

        def broken(*arguments: Any) -> Any:
            raise ZeroDivisionError(f"{at} of a layer")

        monkeypatch.setattr(mz.nn.Linear, at, broken)
        with pytest.raises(ZeroDivisionError, match=f"{at} of a layer"):
            mz.sharding.replay_bad_step(path, model)


def test_samples_that_the_model_does_not_take_are_named_by_the_layer(dump: Path) -> None:
    grain(dump / "grain_00001.npz", x=npy("<f4", (2, 5), bytes(40)))
    model = sharded("ddp", None, micro_batch=2)
    with model, pytest.raises(DataError, match=r"takes 6 features.* shape \(2, 5\)"):
        mz.sharding.replay_bad_step(dump, model)


def test_complex_samples_of_a_black_box_are_looked_at_as_two_numbers_each(tmp_path: Path) -> None:
    def loss_and_grad(p: Mapping[str, Any], batch: tuple[Any, Any]) -> tuple[float, dict[str, Any], float]:
        return float(np.abs(batch[0]).sum()), {"w": np.full(3, np.nan)}, float(len(batch[0]))

    with sharded("zero1", None, mz.FunctionModel({"w": np.ones(3)}, loss_and_grad), micro_batch=1) as model:
        x = np.array([[1 + 2j, complex(np.inf, 0)]])
        (replay,) = mz.sharding.replay_bad_step(dumped(tmp_path, model, x, x.real), model)
    given = next(figures for figures in replay.figures if figures.what == "input")
    assert (given.minimum, given.maximum, given.not_finite, given.size) == (0.0, 2.0, 1, 4)
