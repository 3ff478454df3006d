"""`mpizero watch` shows what a run has recorded so far, in the room that there is, and ends with the run."""

from __future__ import annotations

import io
import json
import math
import shutil
import threading
import time
from types import SimpleNamespace

import pytest

from mpizero.cli.main import main
from mpizero.errors import ConfigError, DataError
from mpizero.tools.report.watch import FollowedRun, GrowingFile, screen, terminal_curve, watch
from mpizero.train.events import SessionEnd
from tests.train.conftest import until
from tests.train.report.conftest import EVIL, line, start, write_run


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_curve_joins_its_points_between_the_least_and_the_largest_value(ascii_only):
    """Down from the largest value at the left to the least one in the middle, and up a little to the right."""
    drawn = terminal_curve([1, 2, 3, 4], [math.nan, 8.0, 0.5, 1.0], 40, 8, ascii_only=ascii_only)
    assert len(drawn) == 8
    assert max(map(len, drawn)) <= 40
    assert drawn[0].startswith("  8 ")
    assert drawn[-2].startswith("0.5 ")
    plane = [row[5:].ljust(35) for row in drawn[:-1]]
    assert plane[0][0] == "*" if ascii_only else "\u2800" < plane[0][0] <= "\u28ff"
    assert plane[-1][17] != " "
    assert plane[-1][34] != " " or plane[-2][34] != " "
    assert all(any(row[column] != " " for row in plane) for column in range(35))
    assert all(sum(row[column] != " " for row in plane) == 1 for column in (0, 34))
    assert "step 2 to 4" in drawn[-1]


def test_a_screen_fits_and_tells_what_counts(eventful):
    followed = FollowedRun(eventful)
    followed.look()
    for ascii_only in (False, True):
        lines = screen(followed, 80, 24, ascii_only=ascii_only)
        assert len(lines) <= 23
        assert max(map(len, lines)) < 80
        text = "\n".join(lines)
        assert text.isascii() == ascii_only
        assert "\x1b" not in text
        told = ("Complete after 100 steps, in 2 sessions", "1 step skipped", "validation 0.5", "t: step 50", "Resumed")
        assert all(part in text for part in told)
    small = screen(followed, 40, 12)
    assert len(small) <= 11
    assert max(map(len, small)) < 40


def test_once_prints_once_without_control_characters(eventful, capsys):
    assert main(["watch", str(eventful), "--once"]) == 0
    out = capsys.readouterr().out
    assert "Complete" in out
    assert "\x1b" not in out
    assert EVIL not in out


def test_what_is_not_there(tmp_path, capsys):
    with pytest.raises(DataError, match="no such folder"):
        main(["watch", str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="--interval"):
        main(["watch", str(tmp_path), "--interval", "0"])
    with pytest.raises(DataError, match="no run has recorded anything here"):
        main(["watch", str(tmp_path), "--once"])


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_it_waits_for_a_run_and_ends_with_it(tmp_path, stream):
    """A run that begins, goes on and ends meanwhile: on a terminal one picture over the other, else lines."""
    run = tmp_path / "run"
    run.mkdir()
    watching = threading.Thread(target=lambda: watch(str(run), once=False, interval=0.01, stream=stream))
    watching.start()
    until(lambda: "no run has recorded anything" in stream.getvalue())
    write_run(run, [line(1)], [start()])
    until(lambda: "Running: 1 of 100" in stream.getvalue())
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(SessionEnd(reason="stopped", message="SIGTERM", step=1).to_dict()) + "\n")
    watching.join()
    assert "Stopped after 1 of 100 steps: SIGTERM" in stream.getvalue()
    assert ("\x1b" in stream.getvalue()) == stream.isatty()


def test_ctrl_c_ends_it_quietly(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mpizero.tools.report.watch.time", SimpleNamespace(sleep=interrupt, time=time.time))
    run = write_run(tmp_path / "run", [line(1)])
    assert watch(str(run), once=False, interval=1.0, stream=io.StringIO()) == 0


def test_a_growing_file_is_read_piece_by_piece_and_again_if_it_is_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path)
    assert not file.look()
    path.write_text('{"step": 1}\n{"st')
    assert file.look()
    assert not file.look()
    with path.open("a") as more:
        more.write('ep": 2}\ndamaged\n{"step": 3}\n')
    assert file.look()
    assert [found["step"] for found in file.lines] == [1, 2, 3]
    new = tmp_path / "new"
    new.write_text('{"step": 1}\n')  # as a resume rewrites it
    shutil.move(new, path)
    assert file.look()
    assert [found["step"] for found in file.lines] == [1]
