"""How ``mpizero doctor`` shows what it has found: in colour to people, without their names in a report of a fault."""

from __future__ import annotations

import io
import json
import re
import socket
import threading

import pytest

from mpizero.testing import run_in_threads
from mpizero.train.cli.output import wants_colour
from mpizero.train.doctor import examination, machine_facts
from mpizero.train.doctor.bug_report import bug_report
from mpizero.train.doctor.check_result import CheckResult

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
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (Terminal(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (Terminal(), {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_colours_are_for_terminals_and_the_environment_has_the_last_word(stream, environment, colour):
    assert wants_colour(stream, environment) is colour


def test_doctor_in_colour_says_the_same_as_without(on_threads, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    plain = on_threads(1, "doctor").out
    assert not ESCAPES.search(plain)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = on_threads(1, "doctor").out
    assert "\x1b[32mok  \x1b[0m  versions" in coloured

    def shape(text):  # times and free memory are never twice the same
        return re.sub(r"[\d.]+", "0", text)

    assert shape(ESCAPES.sub("", coloured)) == shape(plain)


def test_a_report_is_one_block_with_every_check_and_without_the_host(on_threads, monkeypatch):
    monkeypatch.setattr(machine_facts, "host", lambda: "gauss.example.org")
    checks = json.loads(on_threads(2, "doctor", "--json").out)["checks"]
    lines = on_threads(2, "doctor", "--report").out.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert lines[1].startswith("doctor     2 ranks on 1 node: ")
    assert [line[6:19].strip() for line in lines if line[:4].strip() in ("ok", "warn", "FAIL")] == [
        check["name"] for check in checks
    ]
    assert "node-1: 2 ranks" in "\n".join(lines)
    assert not re.search(rf"gauss|\b{re.escape(socket.gethostname())}:", "\n".join(lines))


def test_a_report_names_no_user_no_home_no_host_and_no_secret(monkeypatch):
    monkeypatch.setattr(machine_facts, "host", lambda: "noether-laptop.example.org")
    environment = {
        "USER": "noether",
        "HOME": "/home/math/noether",
        "OMP_NUM_THREADS": "4",
        "MPIZERO_CACHE_DIR": "/scratch/noether/kernels",
        "UCX_AUTH_TOKEN": "open-sesame",
        "WANDB_API_KEY": "open-sesame",
        "OMPI_MCA_orte_precondition_transports": "open-sesame",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_ACCOUNT": "algebra",
    }
    found = CheckResult("kernels", "warn", "noether-laptop: kept in /home/math/noether/.cache", "rm -r /tmp/noether-1")
    text = bug_report(None, [found], environment)
    for personal in ("noether", "math", "open-sesame", "algebra", "example.org"):
        assert personal not in text
    assert "Slurm      SLURM_NTASKS=8\n" in text
    assert "settings   MPIZERO_CACHE_DIR=/scratch/<user>/kernels OMP_NUM_THREADS=4\n" in text
    assert "warn  kernels        node-1: kept in ~/.cache\n" in text
    assert "-> rm -r /tmp/<user>-1\n" in text


@pytest.mark.parametrize(
    ("version", "gpus", "told"), [("2.13.0", 0, True), ("2.13.0+cpu", 0, False), ("2.13.0", 1, False)]
)
def test_doctor_names_pytorch_and_its_build_for_gpus_where_there_is_none(version, gpus, told, monkeypatch):
    monkeypatch.setattr(examination, "installed_version", {"torch": version}.get)
    monkeypatch.setattr(machine_facts, "gpus", lambda: (gpus, {}))
    found = run_in_threads(2, lambda comm: examination.check_versions(comm, 1))[0]
    assert found.status == "ok"
    assert f"torch {version}" in found.text
    assert "jax" not in found.text
    assert ("download.pytorch.org/whl/cpu" in found.text) == told


def test_doctor_fails_where_ranks_have_other_versions_of_pytorch(monkeypatch):
    versions = threading.local()
    monkeypatch.setattr(examination, "installed_version", lambda name: getattr(versions, "torch", None))

    def rank(comm):
        versions.torch = f"2.{comm.rank}"
        return examination.check_versions(comm, 1)

    assert "torch differs: rank 0: 2.0, rank 1: 2.1" in run_in_threads(2, rank)[0].text
