"""Time training steps between nodes: how much of the messages is hidden, beside PyTorch and the wire.

Start it with ``scripts/two_hosts.sh -- python scripts/benchmarks/nodes.py``, or by the mpiexec of a cluster. Each
contender trains the same GPT, some steps a round in turns: mpizero with the strategies "ddp", "zero1", "zero2" and
"zero3"; PyTorch's DistributedDataParallel ("torch-ddp"), the same with ZeroRedundancyOptimizer ("torch-zero1"), and
FSDP2 ("torch-fsdp2"), and DeepSpeed ("deepspeed-zero2", "deepspeed-zero3"), all over gloo, where they are installed;
and "torch-plain", PyTorch without messages, which says how much of a lead is not the messages'. "zero2+wire" is mpizero
with ``wire="bfloat16"``, "zero2+half" with ``wire_parameters=True``, too, and "zero2@4" with ``bucket_mb=4``.

With ``--slept`` the blocks of the model compute nothing: each sleeps for its part of ``--forward`` and ``--backward``
seconds, so that other work on the machine disturbs little. Its parameters, gradients and messages are as large as the
GPT's. A block sleeps in ``PIECES`` pieces, between which messages progress, as between the layers of a real block.

Printed are, for each contender: seconds of a step, of the slowest rank (median, with the least and the most); seconds
of the same step alone, without other ranks; the *wire*: the bytes that the busiest host sends in a step, as its network
interface counts them, over the speed of the link (``--rate``); and the *hidden* share: the part of the wire by which a
step is shorter than one that computes first and sends afterwards, (alone + wire - step) / wire.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.options import chosen, parser
from harness.tables import aligned
from harness.turns import alternate, bytes_sent
from mpi4py import MPI

import mpizero as mz
from mpizero._util.numbers import Measurement
from mpizero.nn import poll
from mpizero.types import EVALUATE, Init, ParameterSpec

WORLD = MPI.COMM_WORLD
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
PEERS = ("torch-plain", "torch-ddp", "torch-zero1", "torch-fsdp2", "deepspeed-zero2", "deepspeed-zero3")
#: Settings by what follows a strategy's name.
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "wire": {"wire": "bfloat16"},
    "half": {"wire": "bfloat16", "wire_parameters": True},
}
#: Pieces of a slept block: as many as a transformer block has layers between which messages progress.
PIECES = 10
#: Elements of each array of a slept block, in units of dim x dim, as in a transformer block.
MATRICES = {"qkv": 3, "projection": 1, "widen": 4, "narrow": 4}


@dataclass(frozen=True)
class SleepingBlock(mz.nn.Layer):
    """Sleep in place of the computation of a transformer block of ``dim`` features."""

    dim: int
    seconds: tuple[float, float]

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe matrices of the sizes of a transformer block's."""
        return tuple(ParameterSpec(name, (n * self.dim, self.dim), Init("normal")) for name, n in MATRICES.items())

    def sleep(self, params: Any, seconds: float) -> None:
        """Sleep in pieces, between which messages progress."""
        for _ in range(PIECES):
            time.sleep(seconds / PIECES)
            poll(params)

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> tuple[Any, Any]:
        """Return ``x`` after a while."""
        self.sleep(params, self.seconds[0])
        return x, None

    def backward_input(self, params: Any, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of ``x`` after a while."""
        self.sleep(params, self.seconds[1])
        return dy, None

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        """Write gradients that are the same in every step."""
        for name in MATRICES:
            grads[name][...] = 1e-3


class SleepingModel:
    """Sleep in ``args.layers`` blocks in place of a GPT's computation."""

    def __init__(self, args: argparse.Namespace) -> None:
        seconds = args.forward / args.layers, args.backward / args.layers
        self.blocks = {f"block{number}": SleepingBlock(args.dim, seconds) for number in range(args.layers)}
        self.loss, self.dtype, self.seed = mz.nn.MeanSquaredError(), "float32", 0


class Ours:
    """Train with mpizero over ``comm``, always on the same batch; ``name`` is a strategy, perhaps with more."""

    def __init__(self, name: str, args: argparse.Namespace, comm: Any) -> None:
        named, _, bucket = name.partition("@")
        strategy, _, more = named.partition("+")
        self.mesh = mz.Mesh(comm)
        if args.slept:
            self.batch = np.full((1, 4), WORLD.rank + 1, np.float32), np.zeros((1, 4), np.float32)
            model: Any = SleepingModel(args)
        else:
            model = mz.nn.GPT(dim=args.dim, layers=args.layers, heads=args.dim // 64, sequence=128, vocabulary=256)
            tokens = np.random.default_rng(WORLD.rank).integers(0, 256, (args.samples, 129))
            self.batch = tokens[:, :-1], tokens[:, 1:]
        bucket_mb = float(bucket) if bucket else None
        config = mz.Config(micro_batch=len(self.batch[0]), bucket_mb=bucket_mb, **SETTINGS[more])
        self.model = mz.distribute(model, mz.AdamW(lr=1e-3), strategy, mesh=self.mesh, config=config)

    def step(self) -> None:
        """Train one step."""
        self.model.train(*self.batch)

    def drain(self) -> None:
        """Wait for the parameters that the last step has left in flight."""
        self.model._engine.store.wait()

    def close(self) -> None:
        """Free the model and its communicators."""
        self.model.close()
        self.mesh.close()


class Peer:
    """Train with PyTorch or DeepSpeed: ``name`` is a contender of ``comparing/peers.py``, or its slept form."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import torch
        from comparing.peers import CLASSES

        shape = {"dim": args.dim, "layers": args.layers, "heads": args.dim // 64, "batch": args.samples}
        shape |= {"sequence": 128, "vocabulary": 256, "threads": 1, "ranks": WORLD.size}
        self.peer: Any = CLASSES[name](shape)
        if not name.startswith("deepspeed"):  # which adds its own layer to the process group
            self.peer.join = lambda: None
        if args.slept:
            from comparing.network import Sleeping

            seconds = args.forward / args.layers, args.backward / args.layers
            self.peer.join()
            self.peer.wrap(Sleeping(args.dim, args.layers, MATRICES.values(), *seconds))
            self.peer.loss = lambda: self.peer.model(torch.ones(1, 4)).square().mean()
        else:
            self.peer.prepare()
        self.step = self.peer.step

    def drain(self) -> None:
        """Do nothing: PyTorch's steps leave no messages in flight."""

    def close(self) -> None:
        """Drop the model."""
        del self.peer


def join_torch() -> None:
    """Start PyTorch's process group of all ranks; collective over all ranks."""
    from torch import distributed

    host = WORLD.bcast(MPI.Get_processor_name())
    end_messages()
    os.environ |= {"RANK": str(WORLD.rank), "WORLD_SIZE": str(WORLD.size), "MASTER_ADDR": host, "MASTER_PORT": "29631"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}  # of DeepSpeed
    distributed.init_process_group("gloo")


def end_messages() -> None:
    """Wait for all ranks, and let MPI make progress for a while, which other ranks may still need.

    PyTorch waits outside of MPI: a rank that waits there makes none.
    """
    WORLD.Barrier()
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        WORLD.Iprobe()


def timed(contender: Ours | Peer, steps: int) -> tuple[float, float, float]:
    """Train ``steps`` steps on all ranks after one more, which leaves messages in flight as they do.

    Return the slowest rank's seconds, the most seconds of a processor, and the most bytes of a host, all of one step.
    """
    contender.step()
    before, cpu, started = bytes_sent(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        contender.step()
    seconds, cpu, size = time.perf_counter() - started, time.process_time() - cpu, bytes_sent() - before
    contender.drain()
    found = np.array([seconds, cpu, size]) / steps
    WORLD.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    end_messages()
    return float(found[0]), float(found[1]), float(found[2])


def measure(args: argparse.Namespace, names: list[str]) -> str:
    """Train with all contenders in turns, and return a table with a row for each."""
    if any(name in PEERS for name in names):
        sys.path.insert(0, str(Path(__file__).parent))  # where `comparing` is
        join_torch()
    made = {name: Peer(name, args) if name in PEERS else Ours(name, args, WORLD) for name in names}
    made["alone"] = Ours("ddp", args, MPI.COMM_SELF)
    quiet = WORLD.rank > 0
    found = alternate(args.rounds, [*made], lambda name: timed(made[name], args.steps), warm_up=1, quiet=quiet)
    for contender in made.values():
        contender.close()
    rows = []
    for name, values in found.items():
        seconds, processor, sizes = zip(*values, strict=True)
        wire = 8 * statistics.median(sizes) / args.rate
        alone = found["torch-plain" if name in PEERS and "torch-plain" in found else "alone"]
        computing, step = statistics.median(value for value, *_ in alone), Measurement.of(seconds)
        hidden = f"{100 * (computing + wire - step.median) / wire:.0f} %" if wire > 0.01 * computing else ""
        size = f"{statistics.median(sizes) / 1e6:.1f}"
        cells = (f"{step.median:.2f}", f"{step.least:.2f} to {step.most:.2f}", f"{statistics.median(processor):.2f}")
        rows.append((name, *cells, size, f"{wire:.2f}", hidden))
    heading = ("", "seconds", "range", "processor", "MB a host", "wire", "hidden")
    return f"{WORLD.size} ranks, {MPI.Get_library_version().splitlines()[0]}\n{aligned(heading, rows)}"


def main() -> None:
    """Measure, and print a table."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--contenders", default=",".join(STRATEGIES), help="(default: %(default)s)")
    options.add_argument("--dim", type=int, default=512, help="(default: %(default)s)")
    options.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    options.add_argument("--samples", type=int, default=8, help="of 128 tokens, a rank and step (default: %(default)s)")
    options.add_argument("--steps", type=int, default=3, help="in each round, after one more (default: %(default)s)")
    options.add_argument("--slept", action="store_true", help="sleep instead of computing")
    options.add_argument("--forward", type=float, default=0.7, help="seconds slept forward (default: %(default)s)")
    options.add_argument("--backward", type=float, default=1.4, help="and backward (default: %(default)s)")
    options.add_argument("--rate", type=float, default=1e9, help="bits a second of the link (default: %(default)s)")
    args = options.parse_args()
    ours = (f"{strategy}+{more}" if more else strategy for strategy in STRATEGIES for more in SETTINGS)
    names = chosen("--contenders", args.contenders, (*ours, *PEERS), lambda name: name.partition("@")[0])
    result = measure(args, names)
    if WORLD.rank == 0:
        print(result, flush=True)


if __name__ == "__main__":
    main()
