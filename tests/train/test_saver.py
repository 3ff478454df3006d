"""``[checkpoint]``: what is kept, where, and that saving beside training changes nothing but the time it takes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from math import prod
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero._util import faults
from mpizero.cli.train import train
from mpizero.comm import as_communicator
from mpizero.errors import ExitStatus, MpizeroError, RemoteError
from mpizero.testing import run_in_threads
from mpizero.train.recorder import RunRecorder
from mpizero.train.run_folder import RunFolder, RunFolderError, SavedCheckpoint
from tests.train.conftest import configured
from tests.train.test_trainer import made

BESIDE = "checkpoint.asynchronous=true"


def steps(commands):
    return sorted(os.listdir(commands.folder / "run" / "checkpoints"))


def arrays(commands, step):
    manifest = commands.folder / checkpoint.step_folder("run/checkpoints", step) / "manifest.json"
    return json.loads(manifest.read_text().splitlines()[0])["arrays"].values()


@pytest.mark.parametrize(("run", "named"), [("run", "run"), ("run/new", "run")])
def test_a_folder_of_somebody_else_is_told_with_its_owner_and_the_way_out(tmp_path, monkeypatch, run, named):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run").chmod(0o755)

    def refused(path, *rest, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(Path, "owner", lambda path: "anna")
    with pytest.raises(RunFolderError) as found:
        RunFolder(tmp_path / run).open()
    for part in (f"{tmp_path / named} belongs to anna with mode drwxr-xr-x", f"chmod -R g+w {tmp_path / named} (of a"):
        assert part in str(found.value)


def test_a_run_that_saves_beside_training_leaves_the_same_files(trained, on_threads):
    outcome = on_threads.train(3, BESIDE, "checkpoint.every=1", "checkpoint.keep=6")
    assert outcome.result["parameters_sha256"] == trained[1].result["parameters_sha256"]
    assert steps(on_threads) == [f"step_{step:08d}" for step in range(1, 7)]
    for step in (4, 6):
        state = checkpoint.step_folder("run/checkpoints", step) + "/state.h5"
        assert (on_threads.folder / state).read_bytes() == (trained[0].folder / state).read_bytes()
        assert checkpoint.verify((on_threads.folder / state).parent) > 0


def test_a_complete_run_that_was_killed_amid_its_last_clean_up_is_cleaned_up_by_the_next_start(on_threads):
    on_threads.train(1)
    left, kept = steps(on_threads), on_threads.folder / "run" / "checkpoints"
    for name in (".tmp-del-step_00000002.host.1", f".tmp-step_00000006.{socket.gethostname()}.1"):
        shutil.copytree(kept / left[0], kept / name)
    on_threads.train(2, flags=["--resume"])
    assert steps(on_threads) == left


def test_a_run_whose_folder_is_removed_or_replaced_says_so_and_saves_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run" / "checkpoints")
    folder.open()
    folder.check()
    folder.checkpoints.rename(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"has been removed .*No such file.*checkpoints"):
        folder.check()
    folder.checkpoints.mkdir()
    with pytest.raises(RunFolderError, match="is another folder than when the run began"):
        folder.check()
    folder.close()


def test_a_run_whose_folder_is_removed_ends_on_all_ranks(tmp_path):
    class Remove(mz.Callback):
        def on_step(self, trainer, report):
            if trainer.step == 2 and trainer.rank == 0:
                trainer.run.rename(tmp_path / "away")

    errors = []

    def work(comm):
        try:
            with made(tmp_path, comm, [Remove()], every=1) as trainer:
                trainer.fit()
        except MpizeroError as error:
            errors.append(error)

    run_in_threads(2, work)
    assert len(errors) == 2
    assert any("run folder" in str(error) for error in errors)
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_a_folder_that_goes_while_a_save_is_recorded_is_named_as_the_runs(tmp_path):
    folder = RunFolder(tmp_path / "run" / "checkpoints")
    folder.open()
    path = folder.checkpoints / "step_00000001"
    path.mkdir()
    recorder = RunRecorder(SimpleNamespace(loop=SimpleNamespace(steps=1)), folder, as_communicator("self"), {})
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(RunFolderError, match=r"run folder .*run: has been removed since the run began"):
        recorder.saved(SavedCheckpoint(1, str(path), 0.0, beside=False, best=False))
    folder.close()


def test_a_checkpoint_under_the_name_of_another_step_is_neither_taken_nor_passed_over(trained, on_threads):
    source = trained[0].folder / "run" / "checkpoints"
    for name, new in (("step_00000004", "step_00000004"), ("step_00000006", "step_00000005")):
        shutil.copytree(source / name, on_threads.folder / "run" / "checkpoints" / new)
    outcome = on_threads.train(1, flags=["--resume"], status=ExitStatus.DATA)
    assert "step_00000005: holds step 6: give it back the name of its own step" in outcome.err
    assert steps(on_threads) == ["step_00000004", "step_00000005"]


def test_a_save_beside_training_that_fails_ends_the_run_and_leaves_the_last_good_checkpoint(on_threads, monkeypatch):
    on_threads.train(1, "train.steps=2")
    monkeypatch.setattr(faults, "_FAULT", faults.Fault("save.write", 2, "raise"))
    with pytest.raises((faults.InjectedError, RemoteError), match=r"planted at save\.write, call 2"):
        run_in_threads(2, lambda comm: train(configured(on_threads.folder, BESIDE), comm, resume=True))
    # A rank that is ended before it has removed its unfinished save leaves that to the next start.
    assert [name for name in steps(on_threads) if not name.startswith(".tmp-")] == ["step_00000002"]
    assert not (on_threads.folder / "run" / "run_complete").exists()


def test_every_nth_step_is_kept_for_ever_beside_the_newest_and_arrays_are_aligned_as_asked(on_threads):
    keep = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=3")
    on_threads.train(1, "train.steps=7", *keep, "checkpoint.alignment=1024", BESIDE)
    assert steps(on_threads) == ["step_00000003", "step_00000006", "step_00000007"]
    found = [(4 * prod(entry["shape"]), entry["offset"]) for entry in arrays(on_threads, 7)]
    assert {offset % (1024 if nbytes >= 1024 else 64) for nbytes, offset in found} == {0}
    assert any(nbytes >= 1024 for nbytes, _ in found)


def test_a_back_end_that_is_not_installed_is_missed_before_training(mpizero, on_threads):
    if h5py.get_config().mpi:
        mpizero.train(2, "train.steps=2", 'checkpoint.backend="mpio"')
        return
    outcome = on_threads.train(2, 'checkpoint.backend="mpio"', status=ExitStatus.CONFIG)
    assert 'use backend="direct"' in outcome.err
    assert not list((mpizero.folder / "run" / "checkpoints").iterdir())
