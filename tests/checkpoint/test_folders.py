from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from mpizero import checkpoint
from mpizero.checkpoint import manager
from mpizero.errors import CheckpointError, ConfigError
from mpizero.testing import run_in_threads
from tests.checkpoint.sealed import seal


@pytest.fixture
def run(small, tmp_path) -> Path:
    """A checkpoint folder with steps 90, 100, 120, and things that are none."""
    for step in (90, 100, 120):
        small.save(checkpoint.step_folder(tmp_path, step))
    (tmp_path / "step_12").mkdir()
    (tmp_path / f".tmp-step_00000130.{socket.gethostname()}.1").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def name(path: str | None) -> str | None:
    return None if path is None else os.path.basename(path)


def test_step_folders_are_named_by_their_step(tmp_path):
    assert checkpoint.step_folder("run", 100) == "run/step_00000100"
    assert checkpoint.step_of(tmp_path / "step_00000100") == 100
    assert checkpoint.step_of(checkpoint.step_folder("x", 123_456_789_012)) == 123_456_789_012
    assert checkpoint.step_of("run/step_1") is None
    with pytest.raises(ConfigError, match="-1"):
        checkpoint.step_folder("run", -1)


def test_the_newest_is_chosen_by_step_and_not_by_date(run):
    os.utime(run / "step_00000090", (4e9, 4e9))
    os.utime(run / "step_00000120", (0, 0))
    found = run_in_threads(3, lambda comm: checkpoint.latest(run, comm))
    assert [name(path) for path in found] == ["step_00000120"] * 3


def test_damaged_ones_are_passed_over_with_a_line_each(run):
    (run / "step_00000120" / "manifest.json").write_bytes(b"{}")
    (run / "step_00000100" / "state.h5").write_bytes(b"")
    lines: list[str] = []
    assert name(checkpoint.latest(run, report=lines.append)) == "step_00000090"
    assert len(lines) == 2
    assert "step_00000120" in lines[0]
    assert "step_00000100" in lines[1]
    with pytest.warns(UserWarning, match="passed over"):
        checkpoint.latest(run)
    assert [name(path) for path in checkpoint.list_valid(run, report=lines.append)] == ["step_00000090"]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None
    assert checkpoint.prune(tmp_path / "missing", 2) == []


@pytest.mark.parametrize(("ranks", "keep", "every"), [(1, 2, 0), (3, 1, 50)])
def test_pruning_keeps_the_newest_sound_ones_and_every_nth_step_and_removes_leftovers(run, ranks, keep, every):
    removed = run_in_threads(ranks, lambda comm: checkpoint.prune(run, keep, comm, keep_every=every))
    assert [[name(path) for path in listed] for listed in removed] == [["step_00000090"]] * ranks
    assert sorted(os.listdir(run)) == ["notes.txt", "step_00000100", "step_00000120", "step_12"]


@pytest.mark.parametrize(
    "spoil",
    [lambda folder: (folder / "manifest.json").write_bytes(b"{}"), lambda folder: (folder / "state.h5").unlink()],
    ids=["damaged", "cannot be opened"],
)
def test_one_that_does_not_load_pushes_out_no_sound_one(run, spoil):
    spoil(run / "step_00000120")
    assert checkpoint.prune(run, 2) == []
    assert [name(path) for path in checkpoint.prune(run, 1)] == ["step_00000090"]
    assert {"step_00000100", "step_00000120"} <= set(os.listdir(run))


def test_one_that_exists_and_cannot_be_opened_is_never_taken_for_none(run):
    (run / "step_00000120" / "state.h5").unlink()

    def look(comm):
        with pytest.raises(CheckpointError, match=r"step_00000120.*state\.h5 is missing.*as .*step_00000100"):
            checkpoint.latest(run, comm)
        found = checkpoint.list_steps(run, comm)
        return [(one.step, one.valid, one.unreadable, one.damaged) for one in found]

    (run / "step_00000090" / "manifest.json").write_bytes(b"{}")
    wanted = [(120, False, True, False), (100, True, False, False), (90, False, False, True)]
    assert run_in_threads(3, look) == [wanted] * 3


def test_what_is_wrong_stands_in_the_type_of_the_error(run):
    seal(run / "step_00000120", lambda body: body.update(version=2))
    (run / "step_00000100" / "state.h5").unlink()
    os.truncate(run / "step_00000090" / "state.h5", 100)
    kinds = {
        "step_00000120": checkpoint.CheckpointVersionError,
        "step_00000100": checkpoint.CheckpointMissingError,
        "step_00000090": checkpoint.CheckpointDamagedError,
    }

    def look(comm):
        for step, kind in kinds.items():
            with pytest.raises(CheckpointError) as caught:
                checkpoint.open_checkpoint(run / step, comm)
            assert type(caught.value) is kind

    run_in_threads(3, look)


def link(folder: Path) -> None:
    """Do as somebody who moves old checkpoints to an archive."""
    (folder.parent / "archive").mkdir()
    folder.rename(folder.parent / "archive" / folder.name)
    folder.symlink_to(Path("archive") / folder.name)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (link, "it is a link"),
        (lambda folder: (folder / "state.h5").unlink(), "may be whole: .*state.h5 is missing"),
        (lambda folder: seal(folder, lambda body: body.update(version=2)), "may be whole: .*format version 2"),
    ],
    ids=["a link", "a missing file", "a newer version"],
)
def test_pruning_never_removes_what_it_cannot_open_nor_a_link_and_says_so(run, spoil, why):
    spoil(run / "step_00000090")
    left: list[checkpoint.RemovalFailure] = []
    assert [name(path) for path in checkpoint.prune(run, 1, report=left.append)] == ["step_00000100"]
    (only,) = left
    assert re.fullmatch(rf"old checkpoint not removed: {run}/step_00000090: .*{why}.*", str(only))
    assert sorted(os.listdir(run / "step_00000090"))
    with pytest.warns(UserWarning, match="step_00000090"):
        checkpoint.prune(run, 1)


def stubborn_file(run: Path, patched: pytest.MonkeyPatch) -> None:
    """Do as NFS while another process has a file of an old checkpoint open: it stays under another name."""
    rmdir = os.rmdir

    def refuse(path, *rest, **named):
        if ".tmp-del-" in os.fspath(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        return rmdir(path, *rest, **named)

    patched.setattr(os, "rmdir", refuse)


def failing_call(call: str, code: int):
    """Let a system call fail, except in the memory file systems of ranks."""

    def spoil(run: Path, patched: pytest.MonkeyPatch) -> None:
        def refuse(*given, **named):
            raise OSError(code, os.strerror(code), os.fspath(given[0]) if isinstance(given[0], str) else None)

        patched.setattr(os, call, refuse)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (stubborn_file, "Directory not empty"),
        (failing_call("rename", errno.EACCES), "Permission denied"),
        (failing_call("fsync", errno.EIO), "Input/output error"),
        (failing_call("listdir", errno.ESTALE), "Stale file handle"),
    ],
    ids=["files that stay", "forbidden", "a failing disk", "a stale handle"],
)
def test_what_cannot_be_removed_is_told_and_left_for_another_time(run, monkeypatch, spoil, why):
    left: list[checkpoint.RemovalFailure] = []
    with monkeypatch.context() as patched:
        spoil(run, patched)
        checkpoint.prune(run, 2, report=left.append)
    assert [found.reason for found in left] == [why]
    assert left[0].path.startswith(str(run))
    assert checkpoint.prune(run, 2, report=left.append) in ([], [str(run / "step_00000090")])
    assert sorted(os.listdir(run)) == ["notes.txt", "step_00000100", "step_00000120", "step_12"]
    assert len(left) == 1


@pytest.mark.parametrize("moment", ["rename", "rmdir"])
def test_somebody_who_removes_the_same_one_at_that_moment_is_no_error(run, monkeypatch, moment):
    original = getattr(os, moment)

    def faster(path, *rest, **named):
        if "step_00000090" in os.fspath(path):
            with monkeypatch.context() as patched:
                patched.setattr(os, moment, original)
                for entry in run.glob("*step_00000090*"):
                    shutil.rmtree(entry)
        return original(path, *rest, **named)

    monkeypatch.setattr(os, moment, faster)
    checkpoint.prune(run, 2)  # a warning would be an error here
    assert not list(run.glob("*step_00000090*"))


@pytest.mark.parametrize(
    ("keep", "every", "told"), [(0, 0, "keep must be >= 1"), (1, -1, "keep_every must be >= 0, got -1")]
)
def test_pruning_that_would_keep_none_is_refused(run, keep, every, told):
    with pytest.raises(ConfigError, match=told):
        checkpoint.prune(run, keep, keep_every=every)


@pytest.mark.parametrize(("gone", "left"), [("the newest", "step_00000100"), ("all", None), ("the whole folder", None)])
def test_a_folder_that_is_deleted_amid_pruning_costs_no_older_one(run, monkeypatch, gone, left):
    original = manager.read_manifest

    def reading(path):
        found = original(path)
        for other in {"the newest": [path], "all": manager.step_folders(str(run)), "the whole folder": [run]}[gone]:
            shutil.rmtree(other)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(manager, "read_manifest", reading)
        assert checkpoint.prune(run, 1) == []
    assert name(checkpoint.latest(run, report=lambda line: None)) == left
