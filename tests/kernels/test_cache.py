"""Machine code is loaded only from where nobody but this user, or root, could have put it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from mpizero.errors import ConfigError
from mpizero.kernels import machine_code
from mpizero.testing import run_in_threads

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_colleague(script, *arguments):
    """Run a shell script as another user who is in the group of this one."""
    command, quiet = ["sh", "-c", script, "sh", *map(str, arguments)], subprocess.DEVNULL
    subprocess.run(command, user=STRANGER, group=os.getegid(), stderr=quiet, check=False)


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files, for all users; not below tmp_path, which is closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("MPIZERO_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder / "home"))
    yield folder
    shutil.rmtree(folder)


def own(temporary):
    return temporary / f"mpizero-{os.geteuid()}"


def place(name="kernels-0"):
    return machine_code._choose_folder(name)


@needs_root
def test_an_object_that_a_colleague_plants_is_never_loaded(temporary, monkeypatch, capfd):
    mine, built = temporary / "mine", []
    monkeypatch.setenv("MPIZERO_CACHE_DIR", str(mine))
    evil = temporary / "evil.o"
    machine_code.load_or_build(evil, lambda: b"evil")
    evil.chmod(0o777)

    def loaded():
        """Whether the object was built, from where it was loaded, and what was told."""
        before = len(built)
        folder = machine_code.find_folder.__wrapped__("a cpu").path
        assert machine_code.load_or_build(folder / "x.o", lambda: built.append(1) or b"honest") == b"honest"
        return len(built) > before, folder, capfd.readouterr().err

    def plant():
        as_colleague('rm -f "$2"; cp "$1" "$2"', evil, good)

    umask = os.umask(0o002)  # the group may write what nobody closes
    try:
        new, folder, told = loaded()
    finally:
        os.umask(umask)
    good = folder / "x.o"
    assert (new, folder.parent, told) == (True, mine, "")
    plant()
    assert loaded() == (False, folder, "")

    for path in (mine, folder):
        path.chmod(0o775)  # as older versions made it
    plant()
    assert good.stat().st_uid == STRANGER
    for first in (True, False):  # compiled once there, too
        new, other, told = loaded()
        assert (new, other.parent) == (first, own(temporary))
        assert f"{mine} can be written by group {os.getegid()} (mode 0775)" in told
        assert f"rm -r {mine}" in told
        assert told.count("\n") == 1

    for path in (mine, folder):
        path.chmod(0o700)  # closed afterwards, with what the colleague has left
    new, other, told = loaded()
    assert (new, other) == (True, folder)
    assert f"{good} belongs to user {STRANGER}" in told
    assert loaded() == (False, folder, "")


def test_folders_and_files_are_this_users_alone_whatever_the_umask(temporary, monkeypatch):
    monkeypatch.setenv("MPIZERO_CACHE_DIR", str(temporary / "a" / "b"))
    before = os.umask(0)
    try:
        found = place()
        machine_code.load_or_build(found.path / "x.o", lambda: b"code")
    finally:
        os.umask(before)
    assert found == (temporary / "a" / "b" / "kernels-0", "", "")
    made = {path: stat.S_IMODE(path.lstat().st_mode) for path in (temporary / "a").rglob("*")}
    assert {mode for path, mode in made.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in made.items() if path.is_file()} == {0o600}


def foreign_link(root):
    root.rename(root.with_name("real"))
    root.symlink_to(root.with_name("real"))
    os.chown(root, STRANGER, STRANGER, follow_symlinks=False)


HOMES = [("MPIZERO_CACHE_DIR", "a/b", "a/b"), ("XDG_CACHE_HOME", "a", "a/mpizero"), ("HOME", "a", "a/.cache/mpizero")]
SPOILS = [
    (lambda root: root.chmod(0o775), "{root} can be written by group"),
    (lambda root: (root / "kernels-0").chmod(0o777), "kernels-0 can be written by all users (mode 0777)"),
    (lambda root: os.chown(root, STRANGER, STRANGER), "{root} belongs to user 65534"),
    (lambda root: os.chown(root / "kernels-0", STRANGER, STRANGER), "kernels-0 belongs to user 65534"),
    (lambda root: root.parent.chmod(0o777), "{root.parent} can be written by all users and has no sticky bit"),
    (foreign_link, "{root} is a link of user 65534"),
]


@needs_root
@pytest.mark.parametrize(
    ("spoil", "said", "variable", "value", "where"), [(*s, *HOMES[i % 3]) for i, s in enumerate(SPOILS)]
)
def test_a_folder_that_others_can_write_is_refused_and_a_private_one_taken(
    temporary, monkeypatch, spoil, said, variable, value, where
):
    root = temporary / where
    monkeypatch.setenv(variable, str(temporary / value))
    assert place().path == root / "kernels-0"
    spoil(root)
    found = place()
    assert said.format(root=root) in found.refused
    assert str(found.path) in found.refused
    assert found.remedy
    assert found.path == own(temporary) / "kernels-0"
    assert stat.S_IMODE(found.path.stat().st_mode) == stat.S_IMODE(own(temporary).stat().st_mode) == 0o700


def test_links_and_shared_project_folders_of_ones_own_are_fine(temporary, monkeypatch):
    (temporary / "project").mkdir()
    (temporary / "project").chmod(0o2775)
    (temporary / "project" / "mine").mkdir(mode=0o700)
    (temporary / "cache").symlink_to(temporary / "project" / "mine")
    monkeypatch.setenv("MPIZERO_CACHE_DIR", str(temporary / "cache"))
    assert place() == (temporary / "cache" / "kernels-0", "", "")


@needs_root
def test_a_name_among_temporary_files_that_a_stranger_has_taken_is_not_used(temporary, monkeypatch):
    monkeypatch.setenv("HOME", "nowhere")
    (temporary / "theirs").mkdir()
    as_colleague('ln -s "$1" "$2"; mkdir -m 777 "$2-0"', temporary / "theirs", own(temporary))
    found = [place().path.parent for _ in range(3)]
    assert len(set(found)) == 1
    assert found[0].parent == temporary
    assert found[0].name.startswith(f"mpizero-{os.geteuid()}-")
    assert found[0].stat().st_uid == os.geteuid()
    assert list((temporary / "theirs").iterdir()) == []


def test_all_that_look_at_the_same_time_take_the_same_folder(temporary, monkeypatch):
    monkeypatch.setenv("HOME", "nowhere")
    assert set(run_in_threads(8, lambda comm: (comm.barrier(), place().path)[1])) == {own(temporary) / "kernels-0"}


def test_without_a_home_a_tilde_is_no_folder(temporary, monkeypatch):
    monkeypatch.chdir(temporary)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user number that nobody knows
    assert place() == (own(temporary) / "kernels-0", "", "")
    monkeypatch.setenv("MPIZERO_CACHE_DIR", "~/cache")
    with pytest.raises(ConfigError, match="MPIZERO_CACHE_DIR=~/cache: there is no such home folder"):
        place()
    assert not (temporary / "~").exists()


def test_where_no_folder_is_private_the_error_names_each(temporary, monkeypatch):
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.setattr(
        machine_code, "private_folder", lambda base, name: (_ for _ in ()).throw(PermissionError(f"{base} no"))
    )
    with pytest.raises(PermissionError, match=r"no; /var/tmp no; /dev/shm no; set MPIZERO_CACHE_DIR"):
        place()
