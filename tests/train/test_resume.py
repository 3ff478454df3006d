"""``--resume`` loses nothing: what exists and cannot be read is never taken for none, and what is damaged is moved."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from mpizero import checkpoint
from mpizero.cli.train import train
from mpizero.errors import CheckpointError, ConfigError, ExitStatus
from mpizero.testing import run_in_threads
from mpizero.train import run_folder
from tests.checkpoint.sealed import seal
from tests.train.conftest import configured, write_inputs

NAMES = ["step_00000002", "step_00000004", "step_00000006"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of six steps with checkpoints of steps 2, 4 and 6; its hash is in ``run_complete``."""
    folder = tmp_path_factory.mktemp("finished")
    write_inputs(folder)
    run_in_threads(1, lambda comm: train(configured(folder, "checkpoint.keep=3"), comm))
    return folder


@pytest.fixture
def home(finished, tmp_path) -> Path:
    """A copy of that folder, to be spoilt."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def resumed(home: Path, *settings: str, ranks: int = 2, **how):
    config = configured(home, "checkpoint.keep=3", *settings)
    return run_in_threads(ranks, lambda comm: train(config, comm, **({"resume": True} | how)))[0]


def steps(home: Path, where: str = "run/checkpoints") -> list[str]:
    return sorted(name for name in os.listdir(home / where) if name.startswith("step_"))


def contents(folder: Path) -> dict[str, str]:
    """What a user would miss: every file and link below a folder, with a hash of what it holds; not the lock."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"to {os.readlink(path)}"
        elif path.is_file() and path.name != ".lock":
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def flip(path: Path, position: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def refuse(monkeypatch, call: str, code: int, place: str) -> None:
    """Let a system call of the library's fail for a path that ends so; the tests' own paths are no strings."""
    original = getattr(os, call)

    def failing(path, *rest, **named):
        if isinstance(path, str) and path.endswith(place):
            raise OSError(code, os.strerror(code), path)
        return original(path, *rest, **named)

    monkeypatch.setattr(os, call, failing)


def newer_version(body) -> None:
    body["version"] = 2


def archive(folder: Path) -> None:
    """Replace a checkpoint by a link to where it can be found when that is mounted."""
    shutil.rmtree(folder)
    folder.symlink_to(folder.parents[2] / "archive" / "not mounted")


def link_to(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


#: What keeps a checkpoint from being opened, though nothing tells that it is damaged.
UNREADABLE = {
    "state.h5 is forbidden": lambda f, m: refuse(m, "open", errno.EACCES, f"{f.name}/state.h5"),
    "manifest.json cannot be read": lambda f, m: refuse(m, "open", errno.EIO, f"{f.name}/manifest.json"),
    "the folder has a stale handle": lambda f, m: refuse(m, "stat", errno.ESTALE, f.name),
    "state.h5 is missing": lambda f, m: (f / "state.h5").unlink(),
    "manifest.json is missing": lambda f, m: (f / "manifest.json").unlink(),
    "the folder is empty": lambda f, m: [path.unlink() for path in f.iterdir()],
    "a newer version": lambda f, m: seal(f, newer_version),
    "a link to nothing": lambda f, m: archive(f),
    "a link for state.h5": lambda f, m: link_to(f / "state.h5"),
    "another step's name": lambda f, m: seal(f, lambda body: body["attributes"]["training"].update(step=3)),
}
#: What a checksum finds.
DAMAGED = {
    "a flipped bit in an array": lambda f: flip(f / "state.h5"),
    "a flipped bit in the manifest": lambda f: flip(f / "manifest.json"),
    "a truncated file": lambda f: os.truncate(f / "state.h5", 1000),
    "an empty manifest": lambda f: os.truncate(f / "manifest.json", 0),
}


def spoil(folder: Path, case: str, patch: pytest.MonkeyPatch) -> None:
    if case in DAMAGED:
        DAMAGED[case](folder)
    else:
        UNREADABLE[case](folder, patch)


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_newest_checkpoint_that_cannot_be_opened_ends_the_resume_and_nothing_is_touched(home, monkeypatch, case):
    folder = home / "run" / "checkpoints" / NAMES[-1]
    with monkeypatch.context() as patched:
        UNREADABLE[case](folder, patched)
        before = contents(home)
        with pytest.raises(CheckpointError, match=rf"{NAMES[-1]}.*--resume-from 4.*without --resume") as caught:
            resumed(home)
    assert caught.value.status is ExitStatus.DATA
    assert not isinstance(caught.value, OSError)
    assert contents(home) == before


@pytest.mark.parametrize("case", ["a newer version", "a flipped bit in the manifest"])
def test_where_none_can_be_read_each_is_named_and_nothing_starts_over_by_itself(home, monkeypatch, case):
    for name in NAMES:
        spoil(home / "run" / "checkpoints" / name, case, monkeypatch)
    before = contents(home)
    with pytest.raises(CheckpointError, match="without --resume") as caught:
        resumed(home)
    assert all(name in str(caught.value) for name in NAMES)
    assert caught.value.status is ExitStatus.DATA
    assert contents(home) == before


def test_one_rank_that_cannot_read_ends_the_resume_of_all(home, monkeypatch):
    original, before = os.preadv, contents(home)

    def failing(file, *rest):
        if threading.current_thread().name == "rank 1" and NAMES[-1] in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(file, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match=rf"{NAMES[-1]}.*Input/output error.*--resume-from"):
        resumed(home)
    assert contents(home) == before


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_newest_checkpoint_moves_aside_and_the_one_before_goes_on(home, finished, case):
    checkpoints = home / "run" / "checkpoints"
    DAMAGED[case](checkpoints / NAMES[-1])
    damaged = contents(checkpoints / NAMES[-1])
    result = resumed(home)
    assert result == json.loads((finished / "run" / "run_complete").read_text()) | {
        key: result[key] for key in ("ranks", "tokens_per_second", "layout")
    }
    assert contents(home / "run/earlier/0001/checkpoints" / NAMES[-1]) == damaged
    assert steps(home) == NAMES
    assert checkpoint.verify(checkpoints / NAMES[-1])


def test_a_damaged_one_is_not_moved_while_another_cannot_be_opened(home):
    flip(home / "run" / "checkpoints" / NAMES[2] / "state.h5")
    (home / "run" / "checkpoints" / NAMES[1] / "state.h5").unlink()
    before = contents(home)
    with pytest.raises(CheckpointError, match=rf"{NAMES[2]}.*damaged.*{NAMES[1]}.*missing.*--resume-from 2"):
        resumed(home)
    assert contents(home) == before


def test_an_older_checkpoint_that_cannot_be_opened_is_no_hindrance_and_stays_for_ever(home):
    (home / "run" / "checkpoints" / NAMES[0] / "state.h5").unlink()
    resumed(home, "train.steps=10", "checkpoint.keep=1")
    assert steps(home) == [NAMES[0], "step_00000010"]


@pytest.mark.parametrize("beside", ["false", "true"])
def test_old_checkpoints_that_cannot_be_removed_are_told_of_once_and_training_goes_on(
    home, monkeypatch, capsys, beside
):
    """As on NFS, while another process has a file of each open: it stays in the folder under another name."""
    rmdir = os.rmdir

    def refuse(path, *rest, **named):
        if ".tmp-del-" in os.fspath(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        return rmdir(path, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        resumed(home, "train.steps=12", "checkpoint.keep=1", f"checkpoint.asynchronous={beside}")
    assert steps(home) == ["step_00000012"]
    told = [line for line in capsys.readouterr().err.splitlines() if "not removed" in line]
    assert len(told) == 1
    assert "Directory not empty; training goes on" in told[0]
    assert f"{home}/run/checkpoints/step_" in told[0]
    resumed(home, "train.steps=14", "checkpoint.keep=1")
    assert os.listdir(home / "run" / "checkpoints") == ["step_00000014"]


def test_an_archived_checkpoint_that_is_a_link_now_does_not_end_the_run_and_stays_in_the_archive(home, capsys):
    checkpoints, archive = home / "run" / "checkpoints", home / "archive"
    archive.mkdir()
    for name in NAMES:
        (checkpoints / name).rename(archive / name)
        (checkpoints / name).symlink_to(Path("../../archive") / name)
    before = contents(archive)
    resumed(home, "train.steps=10", "checkpoint.keep=1")
    assert steps(home) == [*NAMES, "step_00000010"]
    assert contents(archive) == before
    assert capsys.readouterr().err.count("it is a link; remove it by hand; training goes on") == 1
    resumed(home, "train.steps=10", resume_from=4)
    moved = home / "run/earlier/0001/checkpoints" / NAMES[-1]
    assert moved.is_symlink()
    assert checkpoint.verify(moved)
    assert contents(archive) == before


def test_starting_over_by_name_moves_what_cannot_be_opened(home):
    for name in NAMES:
        (home / "run" / "checkpoints" / name / "state.h5").unlink()
    before = contents(home / "run" / "checkpoints")
    resumed(home, "train.steps=2", resume=False)
    assert contents(home / "run/earlier/0001/checkpoints") == before


@pytest.mark.parametrize("spoilt", [False, True])
def test_resume_from_goes_on_exactly_there_and_moves_the_newer_ones(home, spoilt):
    checkpoints = home / "run" / "checkpoints"
    if spoilt:
        (checkpoints / NAMES[1] / "state.h5").unlink()
    before = {f"{name}/{file}": held for name in NAMES[1:] for file, held in contents(checkpoints / name).items()}
    wanted = json.loads((home / "run" / "run_complete").read_text())["parameters_sha256"]
    assert resumed(home, resume=spoilt, resume_from=2)["parameters_sha256"] == wanted
    assert contents(home / "run/earlier/0001/checkpoints") == before
    assert steps(home) == NAMES
    superseded = (home / "run" / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == [3, 4, 5, 6]


def test_resume_from_a_step_that_is_not_there_names_those_that_are(home):
    before = contents(home)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3.*2, 4, 6"):
        resumed(home, resume_from=3)
    assert contents(home) == before


@pytest.mark.parametrize("case", ["manifest.json cannot be read", "another step's name", "a flipped bit in an array"])
def test_resume_from_a_step_that_cannot_be_read_is_an_error_that_touches_nothing(home, monkeypatch, case):
    folder = home / "run" / "checkpoints" / NAMES[1]
    with monkeypatch.context() as patched:
        spoil(folder, case, patched)
        before = contents(home)
        with pytest.raises(CheckpointError, match=rf"--resume-from 4.*{NAMES[1]}"):
            resumed(home, resume_from=4)
    assert contents(home) == before


def test_a_run_that_would_be_refused_moves_nothing(home):
    before = contents(home)
    with pytest.raises(ConfigError, match="train.steps"):
        resumed(home, "train.steps=3", resume_from=4)
    flip(home / "run" / "checkpoints" / NAMES[2] / "state.h5")
    before = contents(home)
    with pytest.raises(ConfigError, match="train.seed"):
        resumed(home, "train.seed=4")
    assert contents(home) == before


@pytest.mark.parametrize("how", [{}, {"resume_from": 2}])
def test_a_resume_that_is_stopped_between_two_moves_can_be_resumed(home, monkeypatch, how):
    checkpoints = home / "run" / "checkpoints"
    for name in NAMES[1:]:
        flip(checkpoints / name / "state.h5")
    wanted = json.loads((home / "run" / "run_complete").read_text())["parameters_sha256"]
    rename, moved = Path.rename, []

    def killed(path, target):
        if path.name in NAMES:
            if moved:
                raise KeyboardInterrupt
            moved.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            resumed(home, ranks=1, **how)
    assert len(steps(home)) == 2
    assert resumed(home, **how)["parameters_sha256"] == wanted
    assert steps(home) == NAMES
    assert steps(home, "run/earlier/0001/checkpoints") == [NAMES[1]]
    assert steps(home, "run/earlier/0002/checkpoints") == [NAMES[2]]


def test_what_cannot_be_moved_aside_is_put_back(home, monkeypatch):
    rename, before = Path.rename, contents(home)

    def refused(path, target):
        if path.name == NAMES[-1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    for how in ({"resume": False}, {"resume_from": 2}):
        with pytest.raises(Exception, match=rf"cannot be moved aside: Permission denied.*{NAMES[-1]}"):
            resumed(home, **how)
        assert contents(home) == before
        assert not list((home / "run" / "earlier").iterdir())


@pytest.mark.parametrize("beside", ["false", "true"])
def test_a_save_replaces_no_checkpoint_that_came_in_the_meantime(home, beside):
    """Whatever stands under the name of the next step is somebody's."""
    source, target = (home / "run" / "checkpoints" / name for name in (NAMES[0], "step_00000008"))
    before = contents(source)

    class Late(run_folder.Saver):
        def save(self, *given, **named):
            if self._comm.rank == 0:
                shutil.copytree(source, target)
            super().save(*given, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mpizero.train.loop.Saver", Late)
        with pytest.raises(CheckpointError, match="exists already and is never overwritten"):
            resumed(home, "train.steps=8", "checkpoint.every=100", f"checkpoint.asynchronous={beside}")
    assert contents(target) == before


def test_the_command_ends_with_status_65_until_it_is_told_what_to_do(on_threads, finished):
    shutil.copytree(finished / "run", on_threads.folder / "run")
    (on_threads.folder / "run" / "checkpoints" / NAMES[-1] / "state.h5").unlink()
    before = contents(on_threads.folder / "run")
    outcome = on_threads.train(2, "train.validate_every=0", flags=["--resume"], status=ExitStatus.DATA)
    assert len(outcome.told) == 1, outcome.err
    assert contents(on_threads.folder / "run") == before
    outcome = on_threads.train(2, "train.validate_every=0", flags=["--resume", "--resume-from", "4"])
    assert "resuming from" in outcome.err
    assert (on_threads.folder / "run/earlier/0001/checkpoints" / NAMES[-1] / "manifest.json").exists()
