"""The parts of training that need no model: sampling, figures, the run's folder, stop requests, progress."""

from __future__ import annotations

import errno
import io
import itertools
import json
import mmap
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero.comm.startup import one_process
from mpizero.sharding.forward_backward import Evaluation
from mpizero.tools.bench.strategies import sent_formula
from mpizero.tools.generate import FirstRankWriter, LanguageModel, Sampling, write
from mpizero.train import machine
from mpizero.train.events import Progress, byte_progress
from mpizero.train.loop import validation_metrics
from mpizero.train.machine import peak_growth, peak_resident, proportional, proportional_growth, resident
from mpizero.train.run_folder import RunFolder, RunFolderError
from mpizero.train.setup import Speed, perplexity
from mpizero.train.stopping import StopFile
from tests.train.conftest import until


def test_no_temperature_takes_the_likeliest_and_only_the_likeliest_k_are_chosen():
    random, logits = np.random.default_rng(0), np.array([1.0, 1.1, 1.2, 1.4, 1.3])
    assert Sampling(temperature=0).choose(logits, random) == 3
    assert {Sampling(temperature=10.0, top_k=2).choose(logits, random) for _ in range(200)} == {3, 4}


def test_choices_follow_the_probabilities():
    random, logits = np.random.default_rng(0), np.log(np.array([0.5, 0.3, 0.2], np.float32))
    counts = np.bincount([Sampling(temperature=1.0, top_k=0).choose(logits, random) for _ in range(2000)], minlength=3)
    np.testing.assert_allclose(counts / 2000, [0.5, 0.3, 0.2], atol=0.03)


def test_characters_come_when_they_are_whole_and_broken_ones_are_marked(monkeypatch):
    chosen, said = "aé€".encode() + b"\xff" + b"b\xe2", []
    told = iter(chosen)
    model = LanguageModel(1, lambda context: np.eye(256)[[[next(told)]]])
    monkeypatch.setattr(FirstRankWriter, "say", lambda self, text, end="": said.append(text + end))
    write(model, b"", len(chosen), Sampling(temperature=0), one_process())
    assert said == ["", "a", "é", "€", "�", "b", "�", "\n"]


def test_speed_is_the_median_without_warm_up_and_disturbed_steps_and_a_short_run_has_one_too():
    speed = Speed("tokens")
    assert speed.median() is None
    speed.step(10, 2)
    assert speed.median() == 5
    for seconds in (100, 100, 2):
        speed.step(10, seconds)
    speed.disturb()
    for seconds in (50, 1):
        speed.step(10, seconds)
    assert speed.median() == 7.5


def test_validation_figures_fit_the_task():
    assert set(validation_metrics(Evaluation(2.0, 4.0, None), "language")) == {"validation_loss", "perplexity"}
    scores = validation_metrics(Evaluation(2.0, 4.0, 3, 4), "classification")
    assert scores == {"validation_loss": 0.5, "accuracy": 0.75}
    assert validation_metrics(Evaluation(2.0, 4.0, None), "regression") == {"validation_loss": 0.5}
    assert json.dumps(validation_metrics(Evaluation(float("nan"), 4.0, None), "language"), allow_nan=False)
    assert perplexity(1e4) == float("inf")


def test_memory_is_told_in_bytes():
    assert 1e6 < proportional() < 1.1 * resident()  # the kernel counts resident pages by batches
    assert resident() < 1.1 * peak_resident()


def test_memory_held_for_a_while_is_seen_by_whoever_looks_for_peaks(monkeypatch):
    """The proportional size is made up: it also depends on the processes that share libraries with this one."""
    size = [100]
    monkeypatch.setattr(machine, "proportional", lambda: size[0])
    with (
        proportional_growth() as proportional_bytes,
        peak_growth() as resident_bytes,
        mmap.mmap(-1, 40_000_000) as held,  # an array may lie where freed memory was kept
    ):
        np.frombuffer(held, np.uint8)[:] = 1
        size[0] = 140
        until(lambda: proportional_bytes[0])
        size[0] = 90
    assert proportional_bytes == [40]
    assert 3e7 < resident_bytes[0] < 6e7


def test_metrics_after_the_resumed_step_move_to_another_file_as_do_lines_that_no_run_has_written(tmp_path):
    folder = RunFolder(tmp_path / "checkpoints")
    folder.open()
    folder.write_metrics({"step": 1})
    folder.write_metrics({"step": 2})
    folder.close()
    others = [b'{"step": 1e999}', b'{"step": "2"}', b'{"step": true}', b"[]", b"[" * 99_999, b"9" * 9999, b"\xff\x1b[J"]
    others += [b'{"step": 3, "lo']  # cut when the run was killed
    with folder.metrics.open("ab") as file:
        file.write(b"\n".join(others))
    assert folder.continue_metrics(1) == 1
    assert folder.metrics.read_bytes() == b'{"step": 1}\n'
    assert folder.superseded.read_bytes().splitlines() == [b'{"step": 2}', *others]


def test_checkpoints_on_another_file_system_move_aside_there(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        os.mkdir(f"{other}/step_00000002")
        (tmp_path / "checkpoints").symlink_to(other)
        folder = RunFolder(tmp_path / "checkpoints")
        folder.open()
        folder.write_metrics({"step": 2})
        assert folder.set_aside() == tmp_path / "earlier" / "0001"
        folder.close()
        assert os.listdir(f"{other}/earlier/0001/checkpoints") == ["step_00000002"]
        assert (tmp_path / "earlier" / "0001" / "metrics.jsonl").exists()


def test_a_run_folder_is_the_parent_of_checkpoints_and_is_locked_while_open(tmp_path):
    folder, other = RunFolder(tmp_path / "checkpoints"), RunFolder(tmp_path)
    assert folder.root == other.root == tmp_path
    folder.open()
    with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
        other.open()
    folder.close()
    other.open()
    assert other.set_aside() is None, "nothing was there"
    other.close()


def test_the_file_stop_or_a_folder_in_its_place_stops_a_run_once(tmp_path):
    for make in (Path.mkdir, Path.touch, Path.mkdir, Path.mkdir):
        folder = RunFolder(tmp_path)
        folder.open()
        folder.obey_stop()  # nobody has asked for a stop
        assert os.listdir(tmp_path) == [".lock"]
        make(folder.stop_file)
        assert StopFile(folder.stop_file).reason()
        folder.obey_stop()
        folder.close()
        assert sorted(os.listdir(tmp_path)) == [".lock", "STOPPED"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_full_disk_is_named_and_leaves_no_lock(tmp_path, name):
    folder = RunFolder(tmp_path)
    folder.open()
    (tmp_path / name).symlink_to("/dev/full")
    for _ in range(2):
        told = rf"run folder {re.escape(str(tmp_path))}: .* cannot be written: No space left on device"
        with pytest.raises(RunFolderError, match=told):
            (folder.write_metrics if name == "metrics.jsonl" else folder.write_event)({"step": 1})
    folder.close()
    other = RunFolder(tmp_path)
    other.open()
    other.close()


def test_a_disk_that_is_full_when_a_run_begins_is_named(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mpizero.train.run_folder._write", full)
        with pytest.raises(RunFolderError, match="run folder .*: cannot be used: No space left on device"):
            RunFolder(tmp_path).open()
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()


def test_the_log_of_a_job_has_few_whole_lines_however_long_it_runs(monkeypatch):
    stream, clock = io.StringIO(), itertools.count(step=5)
    monkeypatch.setattr("mpizero.train.events.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    progress = Progress(17_281, stream=stream)
    progress.begin()
    for step in range(1, 17_282):  # one in five seconds, for a day
        progress.step(step, {"loss": "1"})
    progress.close()
    first, *lines, last = stream.getvalue().splitlines()
    assert (first, last) == ("step 1/17281  loss 1", "step 17281/17281  loss 1")
    assert len(lines) < 400
    assert not {"\r", "\x1b"} & set(stream.getvalue())
    at = [int(line.split()[1].split("/")[0]) for line in (first, *lines)]
    gaps = [5 * (after - before) for before, after in itertools.pairwise(at)]
    assert gaps[0] == 10
    assert sorted(gaps) == gaps
    assert gaps[-1] == 300


def test_a_message_stays_one_line_whatever_it_quotes_and_other_ranks_show_none():
    for active in (True, False):
        stream = io.StringIO()
        progress = Progress(1, active=active, stream=stream)
        progress.say("run/\x1b[2J\nstep 1/1")
        assert stream.getvalue() == "mpizero: run/\\u001b[2J\\nstep 1/1\n" * active
    progress.begin()
    progress.step(1, {})
    assert stream.getvalue() == ""


def test_a_bar_over_bytes_is_shown_on_a_terminal_only(monkeypatch):
    quiet, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for stream in (quiet, terminal):
        with byte_progress(2_000_000, "verify", stream) as progress:
            progress.update(500_000)
            progress.update(1_500_000)
    assert quiet.getvalue() == ""
    assert "verify:" in terminal.getvalue()
    assert "2.00M" in terminal.getvalue()


def test_bytes_sent_follow_the_formulas():
    assert sent_formula("zero1", 100, groups=4, ranks_per_group=1) == 4 * 2 * 75
    assert sent_formula("zero3", 100, groups=4, ranks_per_group=1) == 4 * 3 * 75
    assert sent_formula("zero3", 100, groups=1, ranks_per_group=4) == 0


def test_a_pipe_in_the_place_of_metrics_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="metrics.jsonl: not a regular file"):
        RunFolder(tmp_path).continue_metrics(5)
