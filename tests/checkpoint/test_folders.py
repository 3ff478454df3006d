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


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_newest_is_chosen_by_step_and_not_by_date(run, ranks):
    os.utime(run / "step_00000090", (4e9, 4e9))
    os.utime(run / "step_00000120", (0, 0))
    found = run_in_threads(ranks, lambda comm: checkpoint.newest(run, comm))
    assert [name(path) for path in found] == ["step_00000120"] * ranks


def test_damaged_ones_are_passed_over_with_a_line_each(run):
    (run / "step_00000120" / "manifest.json").write_bytes(b"{}")
    (run / "step_00000100" / "state.h5").write_bytes(b"")
    lines: list[str] = []
    assert name(checkpoint.newest(run, report=lines.append)) == "step_00000090"
    assert len(lines) == 2
    assert "step_00000120" in lines[0]
    assert "step_00000100" in lines[1]
    with pytest.warns(UserWarning, match="passed over"):
        checkpoint.newest(run)
    assert [name(path) for path in checkpoint.sound(run, report=lines.append)] == ["step_00000090"]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None
    assert checkpoint.prune(tmp_path / "missing", 2) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_pruning_keeps_the_newest_sound_ones_and_removes_leftovers(run, ranks):
    removed = run_in_threads(ranks, lambda comm: checkpoint.prune(run, 2, comm))
    assert [[name(path) for path in listed] for listed in removed] == [["step_00000090"]] * ranks
    assert sorted(os.listdir(run)) == ["notes.txt", "step_00000100", "step_00000120", "step_12"]


def test_damaged_ones_never_push_out_a_sound_one(run):
    (run / "step_00000120" / "manifest.json").write_bytes(b"{}")
    assert checkpoint.prune(run, 2) == []
    assert [name(path) for path in checkpoint.prune(run, 1)] == ["step_00000090"]
    assert name(checkpoint.newest(run, report=lambda line: None)) == "step_00000100"


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_that_exists_and_cannot_be_opened_is_never_taken_for_none(run, ranks):
    (run / "step_00000120" / "state.h5").unlink()

    def look(comm):
        with pytest.raises(CheckpointError, match=r"step_00000120.*state\.h5 is missing.*as .*step_00000100"):
            checkpoint.newest(run, comm)
        found = checkpoint.survey(run, comm)
        return [(one.step, one.sound, one.unreadable, one.damaged) for one in found]

    (run / "step_00000090" / "manifest.json").write_bytes(b"{}")
    wanted = [(120, False, True, False), (100, True, False, False), (90, False, False, True)]
    assert run_in_threads(ranks, look) == [wanted] * ranks


def kinds(run: Path) -> dict[str, type]:
    """What reading raises of a run whose newest checkpoints are spoilt in different ways."""
    found = {}
    for path in manager.step_folders(str(run)):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.open_checkpoint(path)
        found[name(path)] = type(caught.value)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_wrong_stands_in_the_type_on_every_rank(run, ranks):
    seal(run / "step_00000120", lambda body: body.update(version=2))
    (run / "step_00000100" / "state.h5").unlink()
    os.truncate(run / "step_00000090" / "state.h5", 100)
    wanted = {
        "step_00000120": checkpoint.CheckpointVersionError,
        "step_00000100": checkpoint.CheckpointMissingError,
        "step_00000090": checkpoint.CheckpointDamagedError,
    }
    assert run_in_threads(ranks, lambda comm: kinds(run)) == [wanted] * ranks


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


def test_one_that_cannot_be_opened_pushes_out_no_sound_one(run):
    (run / "step_00000120" / "state.h5").unlink()
    assert checkpoint.prune(run, 2) == []
    assert [name(path) for path in checkpoint.prune(run, 1)] == ["step_00000090"]
    assert {"step_00000100", "step_00000120"} <= set(os.listdir(run))


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


@pytest.mark.parametrize("keep", [0, -1])
def test_the_last_good_one_cannot_be_pruned(run, keep):
    with pytest.raises(ConfigError, match="keep must be >= 1"):
        checkpoint.prune(run, keep)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_nth_step_is_kept_for_ever(run, ranks):
    removed = run_in_threads(ranks, lambda comm: checkpoint.prune(run, 1, comm, keep_every=50))
    assert [[name(path) for path in listed] for listed in removed] == [["step_00000090"]] * ranks
    with pytest.raises(ConfigError, match="keep_every must be >= 0, got -1"):
        checkpoint.prune(run, 1, keep_every=-1)


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
    assert name(checkpoint.newest(run, report=lambda line: None)) == left
