"""Fields that are cut over ranks are written into one file, which does not depend on the cut, or not at all."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero.checkpoint import CheckpointIOError, atomic_folder
from mpizero.data import writing
from mpizero.errors import CheckpointError, ConfigError, DataError, RemoteError
from mpizero.testing import parallel_assert, run_in_threads

SPACE, SAMPLES = (13, 11), 5
WIDE = (9, 6, 7)
ATTRIBUTES = {"channels": ["u", "v", "w"], "step": 0.5}


def whole(space: tuple[int, ...] = SPACE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(SAMPLES, *space, 3)).astype("f4")
    return {
        "model/prediction": values,
        "phase": values[..., 0] + 1j * values[..., 1],  # no axis of channels
        "mask": (values > 0).astype("u1"),
        "time": np.arange(SAMPLES, dtype=">i4"),  # not cut
    }


def parts(mesh: mz.Mesh, fields: dict[str, np.ndarray], space: tuple[int, ...] = SPACE) -> dict[str, np.ndarray]:
    """The samples of this replica, and of fields the rank's part."""
    at, replicas = mesh.axes.coordinates(mesh.rank).data, mesh.axes.data
    mine = slice(SAMPLES * at // replicas, SAMPLES * (at + 1) // replicas)
    here = mesh.slab(space) if mesh.domain else ()
    return {name: value[(mine, *(here if value.ndim > 1 else ()))] for name, value in fields.items()}


def write(comm: Any, path: Path, cut: tuple[int, ...], space: tuple[int, ...] = SPACE, **settings: Any) -> None:
    with mz.Mesh(comm, domain=cut, **settings) as mesh:
        given = parts(mesh, whole(space), space)
        mz.data.write_fields(path, given, mesh, space if cut else (), attributes=ATTRIBUTES)


@pytest.mark.parametrize(
    ("ranks", "cut", "space", "settings"),
    [
        (2, (2, 1), SPACE, {"share_node_memory": False}),
        (3, (1, 3), SPACE, {}),
        (4, (2, 2), SPACE, {}),
        (4, (4, 1), (3, 11), {}),  # more parts than rows of a sample
        (8, (2, 2), SPACE, {}),  # two replicas, of two and three samples
        (8, (2, 2), SPACE, {"pipeline": 2}),
        (3, (), SPACE, {}),
        (2, (), SPACE, {"context": 2}),
        (8, (2, 2, 2), WIDE, {}),
        (3, (3,), (7,), {}),
    ],
    ids=str,
)
def test_a_file_has_whole_fields_and_the_bytes_of_one_rank(tmp_path, monkeypatch, ranks, cut, space, settings):
    monkeypatch.setattr(writing, "CHUNK", 3000)  # of 3-d fields a sample at a time, of others some
    run_in_threads(ranks, lambda comm: write(comm, tmp_path / "some" / "parts.h5", cut, space, **settings))
    write("self", tmp_path / "alone.h5", (), space)
    assert (tmp_path / "some/parts.h5").read_bytes() == (tmp_path / "alone.h5").read_bytes()
    assert os.listdir(tmp_path / "some") == ["parts.h5"]
    with h5py.File(tmp_path / "alone.h5") as file:
        for name, value in whole(space).items():
            np.testing.assert_array_equal(file[name], value)
        assert [*file.attrs["channels"]] == ATTRIBUTES["channels"]
        assert file.attrs["step"] == 0.5


@pytest.mark.mpi
def test_in_a_job_a_prediction_is_written_and_read_back(world, tmp_path):
    folder = Path(world.broadcast_object(str(tmp_path)))
    cut = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (2, 2)}[world.size]
    net = mz.nn.UNet(2, 1, width=4, levels=2, groups=2)
    x = np.random.default_rng(0).normal(size=(SAMPLES, *SPACE, 2)).astype("f4")
    with world.split(0) as comm, mz.Mesh(comm, domain=cut) as mesh, mz.distribute(net, None, mesh=mesh) as model:
        (given,) = parts(mesh, {"x": x}).values()
        predicted = model.predict(given)
        mz.data.write_fields(folder / "p.h5", {"p": predicted}, model, SPACE)
        with h5py.File(folder / "p.h5") as file:
            (again,) = parts(mesh, {"p": file["p"][...]}).values()
        parallel_assert(world, np.array_equal(again, predicted))
    write(world, folder / "all.h5", cut)
    if world.rank == 0:
        write("self", folder / "alone.h5", ())
        assert (folder / "all.h5").read_bytes() == (folder / "alone.h5").read_bytes()
    world.barrier()


def refused(path: Path, change: Any, kind: Any = DataError, ranks: int = 4, **settings: Any) -> str:
    """The message with which all ranks refuse what ``change(rank, parts, whole)`` makes of a rank's parts."""

    def work(comm: Any) -> str:
        with mz.Mesh(comm, domain=(2, 2)) as mesh:
            fields = whole()
            given = change(comm.rank, parts(mesh, fields), fields)
            with pytest.raises(kind) as caught:
                mz.data.write_fields(path, given, mesh, SPACE, **settings)
            return str(caught.value)

    (message,) = set(run_in_threads(ranks, work))
    return message


WRONG = {
    "a part of another size": (
        lambda rank, part, whole: part | {"mask": part["mask"][:, 1:]} if rank == 2 else part,
        "[rank 2] 'mask' has (5, 6) positions; this rank's part of (13, 11) has (6, 6): give the part, [:, *mesh.slab(",
    ),
    "whole fields": (lambda rank, part, whole: whole, "(13, 11) positions; this rank's part of (13, 11) has (7, 6)"),
    "other names": (
        lambda rank, part, whole: {"time": part["time"]} if rank == 1 else {"mask": part["mask"]},
        "'mask' is missing on rank 1, 5 samples of (13, 11, 3), |u1 on others: give the same arrays on all",
    ),
    "another type": (
        lambda rank, part, whole: {"mask": part["mask"].astype("f8")} if rank == 3 else {"mask": part["mask"]},
        "'mask' is 5 samples of (13, 11, 3), <f8 on rank 3, 5 samples of (13, 11, 3), |u1 on others",
    ),
    "fewer samples": (
        lambda rank, part, whole: {"mask": part["mask"][:4] if rank == 1 else part["mask"]},
        "'mask' is 4 samples of (13, 11, 3), |u1 on rank 1, 5 samples of (13, 11, 3), |u1 on others",
    ),
    "fewer channels": (
        lambda rank, part, whole: {"mask": part["mask"][..., :2] if rank == 1 else part["mask"]},
        "'mask' is 5 samples of (13, 11, 2), |u1 on rank 1",
    ),
    "booleans": (lambda rank, part, whole: {"mask": part["mask"] > 0}, "array 'mask': element type '|b1' is not one"),
    "a masked array": (lambda rank, part, whole: {"m": np.ma.masked_array(part["mask"])}, "'m' is a masked array"),
    "no dictionary": (lambda rank, part, whole: part["time"], "expected a dictionary of arrays by name"),
    "a path": (lambda rank, part, whole: {"../mask": part["mask"]}, "array name '../mask' is not allowed"),
    "a group": (lambda rank, part, whole: {"a": part["time"], "a/b": part["time"]}, "array 'a' cannot also be"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_part_is_refused_on_all_ranks_and_nothing_is_written(tmp_path, wrong):
    change, said = WRONG[wrong]
    message = refused(tmp_path / "file.h5", change, (DataError, CheckpointError))
    assert message.startswith(f"{tmp_path}/file.h5 was not written: ")
    assert said in message
    assert not os.listdir(tmp_path)


def test_a_file_is_replaced_only_if_that_is_asked_for(tmp_path):
    path, same = tmp_path / "file.h5", lambda rank, part, whole: part
    path.write_text("mine")
    (tmp_path / "link.h5").symlink_to(path)
    assert "exists already: choose another name, or give overwrite=True" in refused(path, same, ConfigError)
    assert path.read_text() == "mine"
    assert "is a folder: give the path of a file" in refused(tmp_path, same, ConfigError, overwrite=True)
    with mz.Mesh("self") as mesh:
        with pytest.raises(ConfigError, match=r"shape=\(13, 11\): the domain has 0 axes"):
            mz.data.write_fields(path, whole(), mesh, SPACE)
        mz.data.write_fields(tmp_path / "link.h5", {"a": np.zeros((0, 3))}, mesh, overwrite=True)
    assert (tmp_path / "link.h5").is_symlink()
    with h5py.File(path) as file:
        assert file["a"].shape == (0, 3)


def test_a_rank_that_cannot_write_fails_on_all_and_leaves_what_was_there(tmp_path, monkeypatch):
    path, marked = tmp_path / "file.h5", np.full((2, 2), 7.0)
    path.write_text("mine")

    def full(file: int, data: memoryview, offset: int, name: str) -> None:
        if bytes(data) == marked.tobytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        write_at(file, data, offset, name)

    write_at = atomic_folder.write_at
    monkeypatch.setattr(atomic_folder, "write_at", full)

    def work(comm: Any) -> Any:
        with (
            mz.Mesh(comm) as mesh,
            pytest.raises(CheckpointIOError, match="was not written: .*No space left") as caught,
        ):
            mz.data.write_fields(path, {"a": marked * (comm.rank == 2)}, mesh, overwrite=True)
        return caught.value.errno, str(caught.value)

    ((code, message),) = set(run_in_threads(3, work))
    assert code == errno.ENOSPC
    assert re.search(r"\[rank 2\] .*state.h5: array 'a': No space left", message)
    assert os.listdir(tmp_path) == ["file.h5"]
    assert path.read_text() == "mine"


def test_what_a_killed_job_left_is_removed_and_one_that_writes_is_not_disturbed(tmp_path):
    folder = atomic_folder.create_locked_folder(str(tmp_path / "file.h5"), False)
    with pytest.raises(CheckpointError, match="another run .* is writing it at this moment"):
        write("self", tmp_path / "file.h5", ())
    os.close(folder.lock)
    write("self", tmp_path / "file.h5", ())
    assert os.listdir(tmp_path) == ["file.h5"]


def test_an_attribute_that_cannot_be_stored_ends_all_ranks(tmp_path):
    def work(comm: Any) -> str:
        with mz.Mesh(comm) as mesh, pytest.raises((TypeError, RemoteError)) as caught:
            mz.data.write_fields(tmp_path / "file.h5", {"a": np.ones(3)}, mesh, attributes={"net": object()})
        return type(caught.value).__name__

    assert run_in_threads(2, work) == ["TypeError", "RemoteError"]
    assert not os.listdir(tmp_path)
