"""An error of one line ends with the user's own line: not one of this package, of Python, or of an installed one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import traceback

import pytest

import mpizero
from mpizero._util.text import TRACEBACK
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ConfigError, MpizeroError
from mpizero.guard.reports import describe_error, user_message
from mpizero.testing import run_in_threads

LIBRARY = sysconfig.get_path("purelib")
STDLIB = sysconfig.get_path("stdlib")
COMMAND = f"{sysconfig.get_path('scripts')}/mpizero"
OWN = mpizero.__file__.replace("__init__", "invented")


def raised(*files):
    """Return an error that has come through a function ``f`` of each of these files, the outermost first."""
    inner = None
    for file in reversed(files):
        space = {"inner": inner, "error": ConfigError("planted")}
        exec(compile(f"def f():\n    {'inner()' if inner else 'raise error'}", file, "exec"), space)
        inner = space["f"]
    with pytest.raises(ConfigError) as caught:
        inner()
    return caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this function, a user's too


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["/home/me/train.py"], "train.py:2 in f"),
        (["/home/me/train.py", OWN], "train.py:2 in f"),
        (["/home/me/train.py", "/home/me/net.py", OWN, OWN], "net.py:2 in f"),
        (["/home/me/train.py", OWN, "/home/me/net.py"], "net.py:2 in f"),  # a layer or function of the user's
        (["/home/me/train.py", OWN, f"{LIBRARY}/numpy/x.py"], "train.py:2 in f"),
        (["/home/me/train.py", f"{STDLIB}/contextlib.py", OWN], "train.py:2 in f"),
        ([f"{LIBRARY}/mpi4py/run.py", "train.py", OWN], "train.py:2 in f"),
        (["<stdin>", OWN], "<stdin>:2 in f"),
        ([COMMAND, f"{LIBRARY}/theirs/main.py", OWN, f"{LIBRARY}/h5py/x.py", OWN], "main.py:2 in f"),
        # A command of this package has no line of the user.
        ([COMMAND, OWN], None),
        ([COMMAND, OWN, f"{LIBRARY}/h5py/x.py", OWN], None),
        (["<frozen runpy>", OWN, f"{STDLIB}/contextlib.py", OWN], None),
        ([f"{STDLIB}/threading.py", OWN], None),
    ],
)
def test_the_innermost_line_of_the_user_is_named(files, named):
    assert describe_error(raised(*files)) == "ConfigError: planted" + (f" ({named})" if named else "")


def test_the_lines_of_a_dataclass_that_nobody_wrote_are_not_the_users():
    with pytest.raises(ConfigError) as caught:
        mpizero.nn.GPT(dim=7, layers=1, heads=2, sequence=4)
    here = f"test_user_lines.py:{caught.traceback[0].lineno + 1} in {caught.traceback[0].name}"
    assert describe_error(caught.value).endswith(f" ({here})")


def test_a_line_that_the_error_names_itself_is_not_named_twice():
    error = raised("/home/me/train.py")
    error.args = ("calls differ: rank 0: barrier at train.py:2 in f",)
    assert describe_error(error) == "ConfigError: calls differ: rank 0: barrier at train.py:2 in f"


def test_all_frames_are_shown_where_the_user_asks_for_them(monkeypatch):
    error = raised("/home/me/train.py", OWN)
    monkeypatch.setenv(TRACEBACK, "1")
    assert user_message(error).count("\n  File ") == 2
    assert user_message(error).startswith("Traceback")
    monkeypatch.setenv(TRACEBACK, "0")
    assert user_message(error) == describe_error(error)


def test_ipython_shows_the_user_the_last_own_line_first_and_no_other(tmp_path, monkeypatch):
    """IPython calls ``_render_traceback_`` of an exception's class, and prints the lines that it returns."""
    script = tmp_path / "cell.py"
    script.write_text("def f():\n    inner()")
    error = raised("/home/me/train.py", str(script), OWN)
    shown = error._render_traceback_()
    assert shown[:2] == [f'  File "{script}", line 2, in f', "    inner()"]
    assert shown[2] == "ConfigError: planted"
    assert not any("invented" in line for line in shown)
    monkeypatch.setenv(TRACEBACK, "1")
    assert error._render_traceback_() == "".join(traceback.format_exception(error)).splitlines()


@pytest.mark.slow
def test_a_rank_without_files_left_to_open_still_describes_its_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import resource\n"
        "from mpizero.guard.reports import describe_error\n"
        "from mpizero._util.text import rendered\n"
        "try:\n"
        "    {}['shard']\n"
        "except KeyError as error:\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "    print(describe_error(error), rendered(error))\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert "program.py:5" in done.stdout, done.stderr
    assert "KeyError: 'shard'" in done.stdout


def test_a_collective_inside_a_context_manager_names_the_line_that_enters_it():
    def differs(comm):
        if comm.rank:
            comm.barrier()
        else:
            with all_ranks(comm, "planted"):
                pass

    with pytest.raises(MpizeroError) as caught:
        run_in_threads(2, differs)
    assert "contextlib" not in str(caught.value)
    assert str(caught.value).count("test_user_lines.py:") == 2
