"""Thirteen trainings have the bits of every other CPU, instruction set, version of NumPy, number of ranks and MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mpizero.kernels import machine_code
from mpizero.testing import parallel_assert, run_in_threads
from tests.golden.trainings import HASHES, TRAININGS

EXPECTED = json.loads(HASHES.read_text())
#: In float32 products, exp, softmax, dropout and AdamW; in float64 tanh, log and Adam.
NARROWER = ("dropout", "mlp float64")
WHY = "a change that changes bits writes them anew: python -m tests.golden.trainings --write"

pytestmark = pytest.mark.skipif(not machine_code.instruction_set(), reason="this CPU has no fused multiply-adds")


@pytest.mark.parametrize("name", TRAININGS)
def test_one_process_has_the_bits_of_every_cpu(name: str) -> None:
    assert TRAININGS[name].run() == EXPECTED[name], WHY


@pytest.mark.parametrize(
    ("name", "ranks", "strategy"),
    [(name, 2 + i % 3, ("ddp", "zero1", "zero3")[i % 3]) for i, name in enumerate(TRAININGS)],
)
def test_ranks_have_the_bits_of_every_cpu(name: str, ranks: int, strategy: str) -> None:
    assert set(run_in_threads(ranks, lambda comm: TRAININGS[name].run(comm, strategy))) == {EXPECTED[name]}


@pytest.mark.mpi
def test_a_job_has_the_bits_of_every_cpu(world: Any) -> None:
    """Every other training: some on even numbers of ranks, some on odd ones. Threads have all of them."""
    for number, name in list(enumerate(TRAININGS))[world.size % 2 :: 2]:
        strategy = ("zero1", "zero2", "zero3", "ddp")[number // 2 % 4]
        with world.split(0) as comm:
            parallel_assert(world, TRAININGS[name].run(comm, strategy) == EXPECTED[name], f"{name}: {WHY}")


@pytest.mark.slow
@pytest.mark.skipif(machine_code.instruction_set() != "avx512", reason="this CPU has no wider registers")
def test_narrower_registers_have_the_bits_of_every_cpu() -> None:
    """Of two trainings, with most kernels of a model: compiling is slow. ``scripts/every_cpu.sh`` compares all."""
    environment = os.environ | {"MPIZERO_CPU": "avx2"}
    command = [sys.executable, "-m", "tests.golden.trainings", *NARROWER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.count("the same") == len(NARROWER), done.stdout + done.stderr
