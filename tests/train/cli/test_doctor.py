"""How ``mpizero doctor`` shows what it has found: in colour to people, without their names in a report of a fault."""

from __future__ import annotations

import io
import re
import socket
import sys
import threading

import pytest

from mpizero._util.text import wants_colour
from mpizero.comm.startup import one_process
from mpizero.testing import run_in_threads
from mpizero.tools import doctor
from mpizero.tools.doctor import CheckResult, bug_report, check_cores, check_messages, check_torch
from mpizero.train import machine

ESCAPES = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "colour"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (io.StringIO(), {"TERM": "xterm"}, False),
        (Terminal(), {"TERM": "xterm", "OMPI_COMM_WORLD_RANK": "0"}, False),
        (Terminal(), {"FORCE_COLOR": "1", "OMPI_COMM_WORLD_RANK": "0"}, True),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (Terminal(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (Terminal(), {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_colours_are_for_terminals_and_the_environment_has_the_last_word(stream, environment, colour):
    assert wants_colour(stream, environment) is colour


CUDA = "from typing import Optional\n__all__ = ['cuda']\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
CPU = "__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("text", "gpus", "status", "told"),
    [
        (CUDA, 0, "warn", "PyTorch 2.13.0+cu130 for CUDA 13.0, but no GPU is seen"),
        (CUDA, 1, "ok", "PyTorch 2.13.0+cu130 for CUDA 13.0"),
        (CPU, 0, "ok", "PyTorch 2.13.0+cpu"),
    ],
    ids=["no GPU", "a GPU", "for CPUs"],
)
def test_a_pytorch_is_named_without_loading_it_and_one_for_cuda_needs_a_gpu(
    tmp_path, monkeypatch, text, gpus, status, told
):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(machine, "gpus", lambda: (gpus, []))
    found = check_torch(one_process(), 1)
    assert (found.status, found.text) == (status, told)
    assert ("pytorch.org/get-started" in (found.remedy or "")) == (status == "warn")


class Nodes:
    """Ranks on nodes of three."""

    def __init__(self, comm):
        self.comm = comm

    def split_node(self, name):
        return self.comm.split_node(3, name=name)

    def __getattr__(self, name):
        return getattr(self.comm, name)


def test_calls_of_mpi_are_counted_until_a_message_has_gone_to_the_next_node(monkeypatch):
    assert check_messages(one_process(), 1).text == "all ranks are on one node"
    assert {found.text for found in run_in_threads(3, lambda comm: check_messages(Nodes(comm), 1))} == {
        "all ranks are on one node"
    }
    counts = run_in_threads(7, lambda comm: machine.try_message(Nodes(comm), pause=0.0))
    assert set(counts) == {max(counts)} != {None}  # how many is a matter of the machine
    for calls, status, told in ((50, "ok", "50 calls"), (51, "warn", "51 calls"), (501, "warn", "more than 500 calls")):
        monkeypatch.setattr(machine, "try_message", lambda comm, calls=calls: calls)
        found = check_messages(one_process(), 1)
        assert (found.status, f"1 MiB between nodes takes {told}" in found.text) == (status, True)
        assert ("CH4_NETMOD=ofi" in found.remedy) == (status == "warn")


def test_unequal_nodes_are_told_beside_cores_without_work(monkeypatch):
    """Three ranks on one node and one on another."""
    rank_of = threading.local()

    def work(comm):
        rank_of.host = "b" if comm.rank == 3 else "a"
        return check_cores(Nodes(comm), 1)

    monkeypatch.setattr(machine, "host", lambda: rank_of.host)
    monkeypatch.setattr(machine, "cores", lambda: list(range(64)))
    found = run_in_threads(4, work)[0]
    assert found.text == "a: 3 ranks x 1 thread on 64 cores; b: 1 rank x 1 thread on 64 cores"
    assert "cores stay idle; start the same number of ranks on every node" in found.remedy


def test_doctor_in_colour_says_the_same_as_without(on_threads, monkeypatch):
    results = [CheckResult("versions", "ok", "3.12"), CheckResult("cores", "warn", "2", "start fewer ranks")]
    monkeypatch.setattr(doctor, "examine", lambda *given, **named: results)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = on_threads(1, "doctor").out
    assert not ESCAPES.search(plain)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = on_threads(1, "doctor").out
    assert "\x1b[32mok  \x1b[0m  versions" in coloured
    assert ESCAPES.sub("", coloured) == plain


def test_a_report_is_one_block_with_every_check_and_without_the_host(on_threads, monkeypatch):
    monkeypatch.setattr(machine, "host", lambda: "gauss.example.org")
    lines = on_threads(2, "doctor", "--report").out.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert lines[1].startswith("doctor     2 ranks on 1 node: ")
    checks = {line[6:19].strip() for line in lines if line[:4].strip() in ("ok", "warn", "FAIL")}
    assert len(checks) == len([*doctor.CHECKS, *doctor.LAUNCH_CHECKS])
    assert "node-1: 2 ranks" in "\n".join(lines)
    assert not re.search(rf"gauss|\b{re.escape(socket.gethostname())}:", "\n".join(lines))


def test_a_report_names_no_user_no_home_no_host_and_no_secret(monkeypatch):
    monkeypatch.setattr(machine, "host", lambda: "noether-laptop.example.org")
    environment = {
        "USER": "noether",
        "HOME": "/home/gauss/noether",
        "OMP_NUM_THREADS": "4",
        "MPIZERO_CACHE_DIR": "/scratch/noether/kernels",
        "UCX_AUTH_TOKEN": "open-sesame",
        "WANDB_API_KEY": "open-sesame",
        "OMPI_MCA_orte_precondition_transports": "open-sesame",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_ACCOUNT": "algebra",
    }
    found = CheckResult("kernels", "warn", "noether-laptop: kept in /home/gauss/noether/.cache", "rm -r /tmp/noether-1")
    text = bug_report(None, [found], environment)
    for personal in ("noether", "gauss", "open-sesame", "algebra", "example.org"):
        assert personal not in text
    assert "Slurm      SLURM_NTASKS=8\n" in text
    assert "settings   MPIZERO_CACHE_DIR=/scratch/<user>/kernels OMP_NUM_THREADS=4\n" in text
    assert "warn  kernels        node-1: kept in ~/.cache\n" in text
    assert "-> rm -r /tmp/<user>-1\n" in text
