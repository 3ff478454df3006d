from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from mpizero import checkpoint
from mpizero.checkpoint import folders
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads


@pytest.fixture
def run(small, tmp_path) -> Path:
    """A checkpoint folder with steps 90, 100, 120, and things that are none."""
    for step in (90, 100, 120):
        small.save(checkpoint.step_folder(tmp_path, step))
    (tmp_path / "step_12").mkdir()
    (tmp_path / ".tmp-step_00000130.host.1").mkdir()
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
    shutil.rmtree(run / "step_00000120")
    (run / "step_00000120").mkdir()
    assert checkpoint.prune(run, 2) == []
    assert [name(path) for path in checkpoint.prune(run, 1)] == ["step_00000090"]
    assert name(checkpoint.newest(run, report=lambda line: None)) == "step_00000100"


def test_a_disk_that_refuses_to_sync_leaves_no_half_removed_one(run, monkeypatch):
    def refuse(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.prune(run, 2)
    assert not [name for name in os.listdir(run) if name.startswith(".")]


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
    original = folders.read_manifest

    def reading(path):
        found = original(path)
        for other in {"the newest": [path], "all": folders.step_folders(str(run)), "the whole folder": [run]}[gone]:
            shutil.rmtree(other)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(folders, "read_manifest", reading)
        assert checkpoint.prune(run, 1) == []
    assert name(checkpoint.newest(run, report=lambda line: None)) == left
