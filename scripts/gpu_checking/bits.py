"""Train on several ranks that share the GPU, with every strategy: one hash for all trainings that must not differ."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.jobs import run

from gpu_checking.__main__ import simulate_if_asked
from gpu_checking.report import Report, Skipped, timed
from gpu_checking.trainings import gpt, text

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
#: Seconds that one MPI job may take.
LIMIT = 45


@dataclass(frozen=True)
class Row:
    """Describe a training of the job on ``ranks`` ranks.

    ``place`` is a strategy, "stages" (two pipeline stages), or "tensor" (a tensor group of all ranks, or as many
    tiles). All trainings of a ``group`` must have one hash. ``settings`` are further ones of ``ShardingConfig``.
    """

    ranks: int
    place: str
    group: str = "data and stages"
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        further = "".join(f", {name}={value}" for name, value in self.settings.items())
        return f"{self.ranks} x {self.place}{further}"


def rows(small: bool) -> list[Row]:
    """Return all trainings."""
    host: dict[str, Any] = {"optimizer_device": "cpu"}
    found = [Row(1, "ddp"), Row(1, "ddp"), Row(1, "ddp", "optimizer on the host", host)]
    for ranks in (2, 3, 4):
        for number, strategy in enumerate(STRATEGIES):
            if not small or number == ranks - 1:
                found.append(Row(ranks, strategy))
        if not small or ranks == 2:
            found.append(Row(ranks, "zero2", "optimizer on the host", host))
    found += [Row(2, "zero3", settings={"share_node_memory": False}), Row(2, "stages")]
    return [*found, Row(1, "tensor", "two tiles", {"tiles": {"tensor": 2}}), Row(2, "tensor", "two tiles")]


def train(comm: Any, row: Row, small: bool) -> str:
    """Train three steps; return the hash of the parameters. Collective over ``comm``."""
    import mpizero as mz

    x, y = text(small, 2 if small else 12)
    settings = {"device": "cuda", "micro_batch": 1 if small else 2, "clip": 1.0} | row.settings
    with mz.ShardingConfig(comm=comm, **settings) as config:
        model, optimizer = gpt(small, dropout=0.1), mz.AdamW(lr=1e-3)
        if row.place in STRATEGIES:
            placed = mz.distribute(model, optimizer, strategy=row.place, config=config)
            part = slice(comm.rank * len(x) // comm.size, (comm.rank + 1) * len(x) // comm.size)
        else:
            layout = {"pipeline_parallel_size" if row.place == "stages" else "tensor_parallel_size": comm.size}
            placed = mz.HybridShardedModel(model, config, zero_stage=1, optimizer=optimizer, **layout)
            part = slice(None)
        with placed:
            for _ in range(1 if small else 3):
                placed.train(x[part], y[part])
            return str(placed.parameters_sha256())


def job() -> None:
    """Run as a rank: train the rows of this number of ranks; rank 0 writes their hashes to the file that is named."""
    from mpi4py import MPI

    simulate_if_asked()
    small, path = sys.argv[1] == "--small", Path(sys.argv[2])
    if MPI.COMM_WORLD.size != int(sys.argv[3]):  # the launcher is another MPI's
        sys.exit(f"started {sys.argv[3]} ranks, {MPI.get_vendor()[0]} sees {MPI.COMM_WORLD.size}")
    found = []
    for number, row in enumerate(rows(small)):
        if row.ranks == int(sys.argv[3]):
            seconds, digest = timed(train, MPI.COMM_WORLD, row, small)
            found.append((number, digest, seconds))
            if MPI.COMM_WORLD.rank == 0:
                print(f"{row}: {digest[:16]}, {seconds:.1f} s", flush=True)
                path.write_text(json.dumps(found), encoding="utf-8")


def mpiexec() -> str:
    """Return the launcher: the one from the wheels, or beside the interpreter, or on the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = os.environ.get("MPIZERO_CHECK_MPIEXEC") or (str(beside) if beside.exists() else shutil.which("mpiexec"))
    if launcher is None:
        raise Skipped("there is no mpiexec: neither in the wheels, nor beside this Python, nor on the PATH")
    return launcher


def bits(report: Report, small: bool) -> None:
    """Train all rows, and compare their hashes."""
    command = [sys.executable, "-c", "from gpu_checking.bits import job; job()", "--small" if small else "--whole"]
    every = rows(small)
    found: dict[int, str] = {}
    os.environ |= {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({row.ranks for row in every}):
            path = Path(folder) / f"{ranks}.json"
            with report.attempt(f"{ranks} ranks"):
                launched = [mpiexec(), "-n", str(ranks), *command, str(path), str(ranks)]
                ended = run(launched, LIMIT, threads=None)
                print(ended.out, ended.err, flush=True)
                report.check(f"{ranks} ranks end well", ended.status == 0, f"exit status {ended.status}")
            if path.exists():
                found |= {number: digest for number, digest, _ in json.loads(path.read_text(encoding="utf-8"))}
    hashes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for number, digest in found.items():
        hashes[every[number].group][digest].append(str(every[number]))
    for group, by_hash in hashes.items():
        told = "; ".join(f"{digest[:12]} of {', '.join(names)}" for digest, names in by_hash.items())
        report.check(f"one hash for {group}", len(by_hash) == 1, told)
    report.check("every training ended", len(found) == len(every), f"{len(found)} of {len(every)}")
    report.figure("in short", f"{len(found)} trainings, {len(hashes)} groups, one hash each")
