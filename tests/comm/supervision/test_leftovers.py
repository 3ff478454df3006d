"""What killed jobs have left in shared memory is found and removed; what anybody uses, or may use, is spared."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import socket
import subprocess
import sys

import pytest

from mpizero.guard import reports
from mpizero.guard.reports import leftovers, remove_leftovers, session_folders

if not hasattr(fcntl, "F_SETLEASE"):
    pytest.skip("this system grants no leases", allow_module_level=True)

OLD = 3600


def make(folder, name, age=OLD):
    path = folder / name
    path.write_bytes(bytes(8192))
    os.utime(path, (path.stat().st_atime - age,) * 2)
    return path


@pytest.fixture(autouse=True)
def _changed_when_modified(monkeypatch):
    """The time of the last change of state cannot be set: take that of the contents."""
    monkeypatch.setattr(reports, "_changed", lambda status: status.st_mtime)


def paths(found):
    return [item.path for item in found]


def test_what_nobody_uses_is_removed_and_what_is_mapped_or_open_is_not_even_named(tmp_path):
    unused, mapped, opened = (make(tmp_path, f"mpich_shm_{name}_0") for name in ("a", "b", "c"))
    with open(mapped, "r+b") as file:
        kept = mmap.mmap(file.fileno(), 4096)
    with open(opened, "rb+"):
        found = leftovers(str(tmp_path))
        assert paths(found) == [str(unused)]
        gone, spared = remove_leftovers(found)
    kept.close()
    assert (paths(gone), spared) == ([str(unused)], [])
    assert [mapped.exists(), opened.exists(), unused.exists()] == [True, True, False]
    assert set(paths(leftovers(str(tmp_path)))) == {str(mapped), str(opened)}


@pytest.mark.slow
def test_a_file_that_another_process_maps_without_having_it_open_is_spared(tmp_path):
    path = make(tmp_path, "vader_segment.node.0.1.0")
    code = (
        "import ctypes, os, sys; c = ctypes.CDLL(None); f = os.open(sys.argv[1], os.O_RDWR); c.mmap.restype = "
        "ctypes.c_void_p; c.mmap(None, ctypes.c_size_t(4096), 3, 1, f, ctypes.c_long(0)); os.close(f); "
        "print('mapped', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"mapped\n"
        assert leftovers(str(tmp_path)) == []
        other.stdin.close()
    assert paths(leftovers(str(tmp_path))) == [str(path)]


def test_files_of_other_names_links_and_folders_are_nobodys_business(tmp_path):
    target = make(tmp_path, "precious.npy")
    (tmp_path / "mpich_shm_link").symlink_to(target)
    (tmp_path / "mpich_folder").mkdir()
    os.mkfifo(tmp_path / "mpich_pipe")
    assert leftovers(str(tmp_path)) == []


def test_young_files_are_spared_with_the_reason(tmp_path):
    path = make(tmp_path, "mpich_shm_young", age=100)
    gone, spared = remove_leftovers(leftovers(str(tmp_path)))
    assert (gone, paths(spared)) == ([], [str(path)])
    assert re.fullmatch(r"it was changed 1\d\d s ago", spared[0].spared)
    assert path.exists()


def test_files_of_others_are_not_touched(tmp_path, monkeypatch):
    make(tmp_path, "mpich_shm_other")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert leftovers(str(tmp_path)) == []


def test_a_file_whose_users_cannot_be_told_is_spared_and_said_so(tmp_path, monkeypatch):
    path = make(tmp_path, "mpich_shm_unknown")

    def refused(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refused)
    gone, spared = remove_leftovers(leftovers(str(tmp_path)))
    assert gone == []
    assert "whether it is in use cannot be told" in spared[0].spared
    assert path.exists()


def test_a_file_that_is_opened_after_it_was_found_is_spared(tmp_path):
    path = make(tmp_path, "mpich_shm_late")
    found = leftovers(str(tmp_path))
    with open(path, "rb+"):
        gone, spared = remove_leftovers(found)
    assert (gone, path.exists()) == ([], True)
    assert spared[0].spared == "somebody has opened it"


def test_session_folders_of_dead_launchers_are_removed_and_those_of_living_ones_not(tmp_path):
    top = tmp_path / f"ompi.{socket.gethostname()}.{os.getuid()}"
    dead, living = top / "pid.4194305", top / f"pid.{os.getpid()}"
    for folder in (dead, living):
        folder.mkdir(parents=True)
        make(folder, "smseg")
        os.utime(folder, (1, 1))
    gone, spared = remove_leftovers(session_folders(str(tmp_path)))
    assert (paths(gone), spared) == ([str(dead)], [])
    assert living.exists()
