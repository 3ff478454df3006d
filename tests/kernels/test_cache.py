"""Machine code is loaded only from where nobody but this user, or root, could have put it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpizero.errors import ConfigError
from mpizero.kernels import machine_code
from tests.kernels.test_compile import STEP, checkout  # noqa: F401 - a fixture

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def start(checkout, **environment):  # noqa: F811
    """Run the program that takes one step, with a umask that lets the group write; return output and errors."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "MPIZERO_"))}
    done = subprocess.run(
        [sys.executable, "-c", STEP],
        env=inherited | {"PYTHONPATH": str(checkout)} | {k: str(v) for k, v in environment.items()},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        umask=0o002,
        check=True,
    )
    return done.stdout.split("\n")[:-1], done.stderr


def as_colleague(script, *arguments):
    """Run a shell script as another user who is in the group of this one."""
    subprocess.run(["sh", "-c", script, "sh", *map(str, arguments)], user=STRANGER, group=os.getegid(), check=False)


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
def test_an_object_that_a_colleague_plants_is_never_executed(checkout, temporary):  # noqa: F811
    formulas = checkout / "mpizero/kernels/formulas.py"
    honest = formulas.read_text()
    formulas.write_text(honest.replace("return w - lr * (g + decay * w)\n", "return w + lr * g\n"))
    assert start(checkout, MPIZERO_CACHE_DIR=temporary / "evil")[0][-1].startswith("w 1.5")
    (evil,) = (temporary / "evil").glob("*/cpu.update.sgd-f4.o")
    for path in (temporary / "evil", evil.parent, evil):
        path.chmod(0o777)
    formulas.write_text(honest)
    mine = temporary / "mine"
    assert start(checkout, MPIZERO_CACHE_DIR=mine)[0] == ["built sgd", "w 0.5 True"]
    (good,) = mine.glob("*/cpu.update.sgd-f4.o")
    plant = 'rm -f "$2"; cp "$1" "$2"'

    as_colleague(plant, evil, good)  # into the folder that a umask of 002 would leave open
    assert start(checkout, MPIZERO_CACHE_DIR=mine) == (["w 0.5 False"], "")

    mine.chmod(0o775)  # as older versions made it
    good.parent.chmod(0o775)
    as_colleague(plant, evil, good)
    assert good.stat().st_uid == STRANGER
    out, told = start(checkout, MPIZERO_CACHE_DIR=mine, TMPDIR=temporary)
    assert out == ["built sgd", "w 0.5 True"]
    assert f"{mine} can be written by group {os.getegid()} (mode 0775)" in told
    assert f"rm -r {mine}" in told
    assert told.count("\n") == 2  # and that kernels are compiled
    assert start(checkout, MPIZERO_CACHE_DIR=mine, TMPDIR=temporary)[0] == ["w 0.5 False"]  # compiled once there, too

    mine.chmod(0o700)  # closed afterwards, with what the colleague has left
    good.parent.chmod(0o700)
    out, told = start(checkout, MPIZERO_CACHE_DIR=mine)
    assert out == ["built sgd", "w 0.5 True"]
    assert f"{good} belongs to user {STRANGER}" in told
    assert start(checkout, MPIZERO_CACHE_DIR=mine) == (["w 0.5 False"], "")


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


def opened_root(root):
    root.chmod(0o775)


def opened_leaf(root):
    (root / "kernels-0").chmod(0o777)


def foreign_root(root):
    os.chown(root, STRANGER, STRANGER)


def foreign_leaf(root):
    os.chown(root / "kernels-0", STRANGER, STRANGER)


def open_parent(root):
    root.parent.chmod(0o777)


def foreign_link(root):
    root.rename(root.with_name("real"))
    root.symlink_to(root.with_name("real"))
    os.chown(root, STRANGER, STRANGER, follow_symlinks=False)


@needs_root
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (opened_root, "b can be written by group"),
        (opened_leaf, "kernels-0 can be written by all users (mode 0777)"),
        (foreign_root, "b belongs to user 65534"),
        (foreign_leaf, "kernels-0 belongs to user 65534"),
        (open_parent, "a can be written by all users and has no sticky bit"),
        (foreign_link, "b is a link of user 65534"),
    ],
)
@pytest.mark.parametrize("variable", ["MPIZERO_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_a_folder_that_others_can_write_is_refused_and_a_private_one_taken(
    temporary, monkeypatch, spoil, said, variable
):
    root = temporary / "a" / "b"
    named = {"MPIZERO_CACHE_DIR": root, "XDG_CACHE_HOME": root.parent, "HOME": root.parent}[variable]
    if variable != "MPIZERO_CACHE_DIR":
        name = root.with_name("mpizero") if variable == "XDG_CACHE_HOME" else root.parent / ".cache" / "mpizero"
        root, said = name, said.replace("b ", "mpizero ", 1) if said.startswith("b ") else said
        said = said.replace("a can", ".cache can") if variable == "HOME" else said
    monkeypatch.setenv(variable, str(named))
    assert place().path == root / "kernels-0"
    spoil(root)
    found = place()
    assert said in found.refused
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


def test_processes_that_look_at_the_same_time_take_the_same_folder(temporary, monkeypatch):
    monkeypatch.setenv("HOME", "nowhere")
    code = "from mpizero.kernels import machine_code as cache; print(cache._choose_folder('kernels-0').path)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(temporary)}, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    assert {process.communicate(timeout=60)[0].strip() for process in started} == {str(own(temporary) / "kernels-0")}


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
        machine_code, "own_folder", lambda base, name: (_ for _ in ()).throw(PermissionError(f"{base} no"))
    )
    with pytest.raises(PermissionError, match=r"no; /var/tmp no; /dev/shm no; set MPIZERO_CACHE_DIR"):
        place()
