"""What mpizero takes of a process: nothing as a guest, and all is given back with the last communicator."""

from __future__ import annotations

import json

import pytest

from tests.faults.conftest import FOLDER
from tests.faults.jobs import run_job

PROGRAM = "programs/guest_program.py"


def seen(folder):
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*.json"))]
    assert len(found) == 2
    assert found[0]["sha256"] == found[1]["sha256"]
    return found


def differing(a, b):
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


@pytest.mark.parametrize(
    ("kind", "environment"), [("guest_single_part", {}), ("environment_part", {"MPIZERO_EMBEDDED": "1"})]
)
def test_a_guest_on_some_ranks_changes_nothing_in_the_process_at_any_thread_level(job, tmp_path, kind, environment):
    ended = job(kind, ranks=3, environment=environment)
    assert (ended.status, ended.err) == (0, "")
    for rank in seen(tmp_path):
        assert differing(rank["before"], rank["during"]) == {}
        assert differing(rank["before"], rank["after"]) == {}


def test_what_watches_over_a_process_is_given_back_with_its_last_communicator(job, tmp_path):
    ended = job("watched")
    assert (ended.status, ended.err) == (0, "")
    hooks = {"excepthook", "unraisablehook", "thread hook", "exit", "threads", "handlers", "environment"}
    for rank in seen(tmp_path):
        assert hooks <= differing(rank["first"], rank["imported"]).keys()
        assert hooks.isdisjoint(differing(rank["first"], rank["before"]))
        assert hooks | {"atexit"} <= differing(rank["before"], rank["during"]).keys()
        assert differing(rank["before"], rank["after"]).keys() <= {"atexit"}  # Python counts what was there, too


def test_errors_of_a_guest_are_exceptions_on_all_of_its_ranks_and_end_nobody(job, tmp_path):
    ended = job("errors", ranks=3)
    assert (ended.status, ended.err) == (0, "")
    assert [(tmp_path / f"caught-{rank}").read_text() for rank in range(2)] == ["DataError nothing"] * 2


def test_a_host_tells_of_its_error_before_the_job_is_ended(job):
    ended = job("hosts_hook_speaks")
    assert ended.status == 70
    assert ended.out.splitlines().count("host: ValueError: planted") == 1
    assert ended.said[-1].endswith("ValueError: planted")


def test_a_handler_of_the_program_is_called_while_a_model_lives_and_when_it_is_closed(job):
    ended = job("own_signal")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("before before after after") == 2


def test_a_program_that_a_rank_starts_is_no_rank_and_is_told_so(job, tmp_path):
    ended = job("child")
    assert ended.status == 0
    assert ended.err.count("RuntimeWarning: this program works alone") == 2, "its own and the fork's"
    assert json.loads((tmp_path / "child").read_text()) == ["1", "True", 11]


def test_nor_is_one_of_a_rank_that_is_not_watched_over(job, tmp_path):
    ended = job("child_of_guest_and_of_closed")
    assert ended.status == 0
    for guest in (True, False):
        assert json.loads((tmp_path / f"child-{guest}").read_text()) == ["1", "True", 11]


def test_a_job_that_a_rank_starts_is_another_job(job, launcher):
    if "openmpi" in str(launcher):
        pytest.skip("Open MPI's mpiexec starts no job within a job")
    ended = job("job_of_rank", ranks=1)
    assert (ended.status, ended.err) == (0, "")


@pytest.fixture
def wrapped(launcher, tmp_path):
    def run(kind, *command):
        return run_job(launcher, tmp_path, [FOLDER / "programs" / "wrapper.py", kind, *command])

    return run


SIZE = ["-c", "import mpizero as mz; print(mz.ShardingConfig().communicator.size)"]


def test_ranks_that_a_wrapper_cuts_off_from_the_launcher_do_not_work_alone(wrapped, launcher):
    ended = wrapped("closes", *SIZE)
    if "openmpi" in str(launcher):  # it finds its launcher by name
        assert (ended.status, "".join(ended.out.split())) == (0, "22")
        return
    assert (ended.status, ended.out) == (1, "")
    for rank in range(2):
        assert f"has started rank {rank} of 2, but it is not clear whether this process is that rank" in ended.err
    for part in ("wrapper.py closes", "(PMI_FD=", "close_fds=False", 'comm="self"'):
        assert part in ended.err


def test_the_command_line_behind_such_a_wrapper_says_so_too(wrapped, launcher):
    if "openmpi" in str(launcher):
        pytest.skip("Open MPI's ranks find their launcher by name")
    ended = wrapped("closes", "-m", "mpizero", "report", "run")
    assert ended.status == 78
    assert "has not passed on the connection to the launcher" in ended.said[0]


def test_a_wrapper_that_passes_the_connection_on_starts_ranks(wrapped):
    ended = wrapped("passes", *SIZE)
    assert (ended.status, ended.err, "".join(ended.out.split())) == (0, "", "22")


def test_a_program_of_a_process_that_has_imported_mpizero_but_not_mpi_may_be_the_rank(wrapped):
    ended = wrapped("imports_passes", *SIZE)
    assert (ended.status, ended.out) == (1, "")
    assert "may be the rank itself, as it has imported mpizero" in ended.err


def test_a_program_of_a_rank_works_alone_if_it_says_so_and_its_commands_speak(wrapped):
    alone = ["-c", "import mpizero as mz; print(mz.ShardingConfig(comm='self').communicator.size)"]
    assert "".join(wrapped("is_rank", *alone).out.split()) == "11"
    ended = wrapped("is_rank", "-m", "mpizero", "--version")
    assert ended.out.count("mpizero ") == 2, "each is a program of its own"
