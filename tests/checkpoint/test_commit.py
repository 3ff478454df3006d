"""Saving is atomic: killed, full or forbidden, what was committed before stays loadable and nothing else stays."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import shutil
import signal
import socket
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import CheckpointIOError, LocalArray, atomic_folder
from mpizero.checkpoint.convert import export
from mpizero.errors import CheckpointError, ExitStatus, PeerFailure
from mpizero.testing import run_in_threads
from tests.checkpoint.sealed import digest, flip, seal


def test_an_existing_checkpoint_is_never_overwritten_unasked(small, tmp_path):
    small.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="never overwritten"):
        small.save(tmp_path / "c")
    assert small.loads(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(("ranks", "can_exchange"), [(1, True), (3, False)])
def test_a_model_is_replaced_when_asked(small, tmp_path, ranks, can_exchange, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", lambda first, second: False)
    other = small.plus_one()
    small.save(tmp_path / "c")
    run_in_threads(ranks, lambda comm: other.save(tmp_path / "c", comm, replace=True))
    assert other.loads(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("name", ["state.h5", "manifest.json"])
def test_a_damaged_checkpoint_makes_room(small, tmp_path, name):
    small.save(tmp_path / "c")
    flip(tmp_path / "c" / name, 300)
    small.save(tmp_path / "c")
    assert small.loads(tmp_path / "c")


def test_an_empty_folder_is_taken_over_and_folders_above_are_made(small, tmp_path):
    (tmp_path / "a").mkdir()
    small.save(tmp_path / "a")
    small.save(tmp_path / "b" / "c" / "d")
    assert small.loads(tmp_path / "a")
    assert small.loads(tmp_path / "b" / "c" / "d")


@pytest.mark.parametrize("replace", [True, False])
def test_folders_and_files_that_are_no_checkpoints_are_left_alone(small, tmp_path, replace):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    (tmp_path / "notes").write_text("x")
    for name in ("thesis", "notes"):
        with pytest.raises(CheckpointError, match="choose another name"):
            small.save(tmp_path / name, replace=replace)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["notes", "thesis"]


def test_a_link_to_a_checkpoint_is_followed_when_replacing(small, tmp_path):
    small.save(tmp_path / "real")
    (tmp_path / "latest").symlink_to("real")
    small.save(tmp_path / "latest", replace=True)
    assert (tmp_path / "latest").is_symlink()
    assert small.loads(tmp_path / "latest")


def test_all_is_on_disk_before_it_gets_its_name_and_the_name_before_the_save_ends(small, tmp_path, monkeypatch):
    """What a power failure may leave: a folder has its name only if both files and itself have been synchronized."""
    done, real = [], {"fsync": os.fsync, "rename": os.rename}
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), real["fsync"](file))
    )
    monkeypatch.setattr(os, "rename", lambda *paths: (done.append("rename"), real["rename"](*paths)))
    small.save(tmp_path / "c")
    place = done.index("rename")
    before = [Path(path) for path in done[:place]]
    assert {path.name for path in before if path.suffix} >= {"state.h5", "manifest.json"}
    manifest = next(path for path in before if path.name == "manifest.json")
    assert before.index(manifest) < max(index for index, path in enumerate(before) if path == manifest.parent)
    assert str(tmp_path) in done[place:]


@pytest.mark.parametrize("waits", [True, False])
def test_a_folder_that_cannot_be_made_is_one_clear_error_on_every_rank_at_the_call(small, tmp_path, waits):
    (tmp_path / "file").write_text("x")

    def save(comm):
        with pytest.raises(OSError, match="Not a directory|File exists") as caught:
            (small.save if waits else small.begin)(tmp_path / "file" / "c", comm)
        assert isinstance(caught.value, CheckpointIOError)
        assert caught.value.status is ExitStatus.INPUT_OUTPUT
        assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
        return str(caught.value)

    (text,) = set(run_in_threads(3, save))
    assert str(tmp_path / "file") in text
    assert os.listdir(tmp_path) == ["file"]


def test_a_rank_that_dies_takes_the_others_along_and_leaves_nothing(small, tmp_path):
    def save(comm):
        if comm.rank == 1:
            raise KeyboardInterrupt
        small.save(tmp_path / "c", comm)

    with pytest.raises((KeyboardInterrupt, PeerFailure)):
        run_in_threads(3, save)
    assert os.listdir(tmp_path) == []


def full(n, value=1.0):
    return [LocalArray("parameters/w", (n,), np.dtype("f4"), ((0, np.full(n, value, "f4")),))]


def test_a_full_disk_is_one_clear_error_and_leaves_the_last_good_checkpoint(tmp_path):
    checkpoint.write(tmp_path / "step_00000001", full(10), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointIOError, match="^checkpoint .*/step_00000002 was not written: .*File too large"):
            checkpoint.write(tmp_path / "step_00000002", full(10**6), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["step_00000001"]
    assert checkpoint.verify(tmp_path / "step_00000001") > 0


def test_more_than_the_free_space_is_refused_before_writing(small, tmp_path, monkeypatch):
    real = os.statvfs

    def nearly_full(path):
        values = list(real(path))
        values[4] = 0
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with pytest.raises(OSError, match=r"No space left.*: \d+ bytes are needed, 0 are free") as caught:
        small.save(tmp_path / "c")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def survives(save, kill_at):
    """Save in a child that is killed before its system call of this number; tell whether it came to the end."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    points = [(os, n) for n in ("mkdir", "open", "pwrite", "posix_fallocate", "fsync", "rename", "unlink", "rmdir")]
    calls = itertools.count(1)

    def counted(original, *given, **named):
        if next(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **named)

    for module, name in [*points, (atomic_folder, "_exchange")]:
        setattr(module, name, partial(counted, getattr(module, name)))
    try:
        save()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replace", "exchange", "seen"), [(False, True, {1, 2}), (True, True, {1, 2}), (True, False, {0, 1, 2})]
)
def test_a_save_killed_at_any_system_call_loses_nothing_that_was_committed(
    tmp_path, monkeypatch, replace, exchange, seen
):
    """Where names cannot be exchanged there is a moment without a checkpoint of this name, which is 0 here."""
    if not exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", lambda first, second: False)
    first, target, found = tmp_path / "step_00000001", tmp_path / f"step_0000000{1 if replace else 2}", set()

    def value(path):
        with checkpoint.open_checkpoint(path) as reader:
            (number,) = set(reader.read_whole("parameters/w"))
            assert number == reader.attributes["n"]
            return number

    checkpoint.write(first, full(3000, 1.0), {"n": 1})
    for kill_at in itertools.count(1):
        ended = survives(lambda: checkpoint.write(target, full(3000, 2.0), {"n": 2}, replace=replace), kill_at)
        assert value(first) in ({1, 2} if replace else {1})
        if target.is_dir():
            checkpoint.verify(target)
        newest = checkpoint.latest(tmp_path)
        found.add(value(newest) if newest else 0)
        if ended:
            break
        if replace:
            checkpoint.write(first, full(3000, 1.0), {"n": 1}, replace=True)
            assert os.listdir(tmp_path) == [first.name]
        elif target.is_dir():
            shutil.rmtree(target)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert kill_at > 15
    assert found == seen


def test_leftovers_of_killed_saves_are_removed_and_saves_in_progress_are_not(small, tmp_path):
    host = socket.gethostname()
    (tmp_path / f".tmp-step_00000009.{host}.1").mkdir()
    (tmp_path / ".tmp-del-step_00000003.other.host.77").mkdir()
    (tmp_path / ".tmp-unrelated").mkdir()
    busy = tmp_path / ".tmp-step_00000004.elsewhere.12"  # a file system that shows the locks of other hosts
    busy.mkdir()
    lock = os.open(busy, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        small.save(tmp_path / "step_00000005")
        assert sorted(os.listdir(tmp_path)) == [busy.name, ".tmp-unrelated", "step_00000005"]
        with pytest.raises(CheckpointError, match=r"another run \(host elsewhere, process 12\) is writing it"):
            small.save(tmp_path / "step_00000004")
    finally:
        os.close(lock)
    small.save(tmp_path / "step_00000004")
    assert sorted(os.listdir(tmp_path)) == [busy.name, ".tmp-unrelated", "step_00000004", "step_00000005"]


def leftover(folder: Path, host: str, hours: float, step: int = 4) -> Path:
    """Make what a save on some host has left, last written so many hours before the newest file here."""
    path = folder / f".tmp-step_{step:08d}.{host}.12"
    path.mkdir()
    (path / "state.h5").write_bytes(b"x")
    for part in (path / "state.h5", path):
        now = part.stat().st_mtime
        os.utime(part, (now - 3600 * hours,) * 2)
    return path


def no_locks(file: int, how: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("locks", [True, False], ids=["locks that other hosts do not see", "no locks"])
def test_another_host_s_save_is_spared_for_a_day_after_its_last_write(small, tmp_path, locks, monkeypatch):
    """Its lock may not be seen here: nothing tells whether it lives but the date of what it has written."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    fresh, old = leftover(tmp_path, "elsewhere", 20, 4), leftover(tmp_path, "elsewhere", 25, 5)
    monkeypatch.setattr("time.time", lambda: 0.0)  # this host's clock does not count
    small.save(tmp_path / "step_00000003")
    checkpoint.prune(tmp_path, 1)
    small.save(tmp_path / "step_00000004")  # where the other run dies, this one goes on
    assert sorted(os.listdir(tmp_path)) == [fresh.name, "step_00000003", "step_00000004"]
    assert (fresh / "state.h5").exists()
    assert not old.exists()


def test_where_locks_do_not_exist_a_container_with_the_same_name_and_process_is_no_hindrance(
    small, tmp_path, monkeypatch
):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    left = tmp_path / f".tmp-c.{socket.gethostname()}.{os.getpid()}"
    left.mkdir()
    (left / "state.h5").write_bytes(b"x")
    small.save(tmp_path / "c")
    assert small.loads(tmp_path / "c")


def removes_state(path: str) -> None:
    os.unlink(f"{path}/state.h5")


def rewrites_state(path: str) -> None:
    data = Path(f"{path}/state.h5").read_bytes()
    os.unlink(f"{path}/state.h5")
    Path(f"{path}/state.h5").write_bytes(data)


def cuts_manifest(path: str) -> None:
    os.truncate(f"{path}/manifest.json", 10)


@pytest.mark.parametrize(
    ("harm", "told", "replace", "waits"),
    [
        (removes_state, "state.h5: No such file or directory, after it was written", False, False),
        (rewrites_state, "state.h5: is not the file that was written", True, True),
        (cuts_manifest, "manifest.json: is not the file that was written", True, False),
    ],
)
def test_a_commit_that_another_host_spoils_is_an_error_and_costs_no_earlier_checkpoint(
    small, tmp_path, monkeypatch, harm, told, replace, waits
):
    """Another host takes the folder for a leftover in the moment between the last write and the new name."""
    small.save(tmp_path / "step_00000001")
    target = tmp_path / ("step_00000001" if replace else "step_00000002")
    other = small.plus_one()

    def inject(site: str, *rest: object) -> None:
        if site == "save.commit":
            harm(str(next(tmp_path.glob(".tmp-*"))))

    def fail(comm):
        with pytest.raises(CheckpointError, match=told) as caught:
            other.save(target, comm, waits, replace=replace)
        return str(caught.value)

    with monkeypatch.context() as patched:
        patched.setattr(atomic_folder, "inject", inject)
        assert len(set(run_in_threads(2, fail))) == 1
    assert os.listdir(tmp_path) == ["step_00000001"]
    assert small.loads(tmp_path / "step_00000001")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_failure_after_the_new_name_was_given_puts_the_old_checkpoint_back(
    small, tmp_path, monkeypatch, can_exchange
):
    other = small.plus_one()
    small.save(tmp_path / "c")

    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patched:
        patched.setattr(atomic_folder, "sync_folder", refuse)
        if not can_exchange:
            patched.setattr(atomic_folder, "_exchange", lambda first, second: False)
        with pytest.raises(CheckpointIOError, match="Input/output error"):
            other.save(tmp_path / "c", replace=True)
    assert os.listdir(tmp_path) == ["c"]
    assert small.loads(tmp_path / "c")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "state.h5").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: seal(folder, lambda body: body.update(version=2)),
    ],
    ids=["no state", "no manifest", "a newer version"],
)
def test_a_checkpoint_that_cannot_be_opened_is_never_replaced(small, tmp_path, spoil):
    small.save(tmp_path / "c")
    spoil(tmp_path / "c")
    before = digest(tmp_path / "c")
    for replace in (True, False):
        with pytest.raises(CheckpointError, match="exists already, and cannot be opened .*may be whole"):
            small.save(tmp_path / "c", replace=replace)
    assert digest(tmp_path / "c") == before
    assert os.listdir(tmp_path) == ["c"]


def test_a_damaged_checkpoint_that_was_mended_while_a_save_was_written_stays(small, tmp_path):
    small.save(tmp_path / "c")
    path = tmp_path / "c" / "state.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    pending = small.begin(tmp_path / "c")
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="a sound checkpoint has taken the place of the damaged one"):
        pending.commit()
    assert small.loads(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(("mask", "folder", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_who_may_look_into_a_checkpoint_is_what_the_umask_says(small, tmp_path, mask, folder, file):
    before = os.umask(mask)
    try:
        small.save(tmp_path / "c")
        small.save(tmp_path / "begun", waits=False)
        with checkpoint.open_checkpoint(tmp_path / "c") as reader:
            for name, kind in (("a.npz", "npz"), ("a.h5", "hdf5")):
                export(reader, tmp_path / name, kind)
    finally:
        os.umask(before)
    for made in (tmp_path / "c", tmp_path / "begun"):
        assert made.stat().st_mode & 0o777 == folder
        assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {file}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("a.*")} == {file}


def test_no_file_stays_open(small, tmp_path):
    small.save(tmp_path / "warm")
    before = len(os.listdir("/proc/self/fd"))
    small.save(tmp_path / "c")
    assert small.loads(tmp_path / "c")
    with pytest.raises(CheckpointError):
        small.save(tmp_path / "c")
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
