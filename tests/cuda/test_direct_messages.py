"""Messages from GPU to GPU, where MPI takes them there: the bits of those through the host, and only once proven."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpizero.comm import p2p
from mpizero.errors import CollectiveError, ConfigError
from mpizero.kernels import gpu
from mpizero.testing import run_in_threads
from tests.cuda import simulated  # noqa: F401 - skips this module without the simulator
from tests.faults.jobs import launchers, run_job

PROGRAM = Path(__file__).with_name("direct_program.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=launchers(), ids=lambda pair: pair[0])
def said(request, tmp_path_factory):
    """What each of two ranks of MPI has to say of every layout, and of the probe."""
    ended = run_job(request.param, tmp_path_factory.mktemp("job"), ["-m", "mpi4py", PROGRAM])
    assert ended.status == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.parametrize("layout", ["pipeline", "tensor", "context"])
def test_what_goes_from_gpu_to_gpu_has_the_bits_of_what_goes_through_the_host(layout, said):
    for rank in said:
        (loss, parameters, told, copied), through_host = rank[layout]
        assert [loss, parameters] == through_host[:2]
        assert "messages go from GPU to GPU" in told
        assert "messages go through the host (direct_messages = false)" in through_host[2]
        assert copied == 0
        assert through_host[3] > 0


def test_a_probe_believes_what_arrives_and_tries_nothing_that_mpi_does_not_claim(said):
    (first, second) = (rank["probe"] for rank in said)
    assert first == second
    fine, wrong, unclaimed = first
    assert fine == ""
    assert wrong.startswith("a pattern sent between GPUs arrived wrong on rank")
    assert unclaimed == "this MPI does not say that it takes memory of CUDA devices"


def test_threads_of_one_process_send_through_the_host():
    def ask(comm):
        with pytest.raises(CollectiveError, match="expected a NumPy array, got SimulatedArray"):
            comm.isend(gpu.open_device(0).put(np.ones(1)), 0)
        return p2p.prove(comm, pytest.fail)

    assert run_in_threads(2, ask) == ["these ranks are threads of one process"] * 2


class Lost:
    """A message that never arrives."""

    def test(self):
        return False


def test_a_pattern_that_never_arrives_ends_the_job_with_the_way_out(monkeypatch):
    monkeypatch.setattr(p2p, "PATIENCE", 0.01)
    with pytest.raises(ConfigError, match="direct_messages = false"):
        p2p._wait([Lost()])
