"""Jobs of the scripts' harness: what they give back, what is ended, and what is counted as left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from harness import jobs, tables  # noqa: E402
from harness.matrix import one_hash  # noqa: E402

sys.path.remove(str(SCRIPTS))

#: Starts a process that outlives it, in a session of its own.
LEAVES = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_job_gives_its_last_answer_back_beside_what_it_prints():
    program = (
        "from harness.jobs import answer; print(1); answer([0]); answer({'a': None}); print(2); raise SystemExit(3)"
    )
    ended = jobs.run(python(program), environment={"PYTHONPATH": str(SCRIPTS)})
    assert (ended.status, ended.answer, ended.late, ended.strays) == (3, {"a": None}, False, 0)
    assert jobs.run(python("print('nothing')")).answer is None


def test_a_job_that_hangs_is_ended_at_its_limit():
    asked = []
    ended = jobs.run(python("import time; time.sleep(60)"), limit=0.3, at_limit=asked.append)
    assert ended.late
    assert not asked[0].processes()


def test_the_end_of_a_job_is_that_of_all_that_it_has_started():
    job = jobs.Job(python(f"{LEAVES}; import time; time.sleep(60)"))
    job.wait(60.0, lambda job: len(job.processes()) == 2 and job.end() is None)
    assert job.process.returncode == -9
    assert not job.processes()


def test_a_process_that_changes_to_another_program_is_the_jobs(monkeypatch):
    job = jobs.Job(["sleep", "60"])
    own, read, empty = Path(f"/proc/{job.process.pid}/environ"), Path.read_bytes, [True] * 3
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"" if path == own and empty and empty.pop() else read(path))
    assert list(job.processes()) == [job.process.pid]
    job.end()


def test_a_process_that_outlives_its_job_is_counted_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LAST", 0.1)
    found, seen = [], tmp_path / "seen"

    def look(job):
        found.append(job)
        seen.touch()
        return True

    waits = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    ended = jobs.run(python(f"{LEAVES}; {waits}"), meanwhile=look)
    assert (ended.status, ended.strays) == (0, 1)
    assert not found[0].processes()


def test_a_rank_is_started_by_a_wrapper_between_the_others():
    command = jobs.Mpi("mpiexec", "env A=1 python").command(4, ["p"], 1, 'exec "$@"')
    plain = ["env", "A=1", "python", "p"]
    wrapped = ["bash", "-c", 'exec "$@"', "victim", *plain]
    assert command == ["mpiexec", "-n", "1", *plain, ":", "-n", "1", *wrapped, ":", "-n", "2", *plain]


def test_other_hashes_are_told_with_their_rows(capsys):
    rows = [
        {"case": "a", "where": where, "sha256": digest} for where, digest in zip("xyz", ("1", "2", "1"), strict=True)
    ]
    one_hash(rows[::2], "case", ["where"])
    assert "2 trainings: one hash for each case" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"a: \['y'\]: 2"):
        one_hash(rows, "case", ["where"])


def test_a_table_takes_the_place_of_what_is_between_two_marks():
    text = tables.markdown(("a", "b"), [(1, "x")])
    assert tables.between("0<b>old<e>1", "<b>", "<e>", text, "page") == "0<b>\n| a | b |\n|---|---|\n| 1 | x |\n<e>1"
    with pytest.raises(SystemExit, match="page: expected <e> and then <b>"):
        tables.between("0<b>old<e>1", "<e>", "<b>", text, "page")
    assert tables.aligned(("", "n", ""), [("a", 1, "left"), ("bcd", 20, "l")]) == "      n\na     1  left\nbcd  20  l"
