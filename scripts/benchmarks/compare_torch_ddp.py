"""Tokens a second of one GPT under mpizero's strategies, beside PyTorch's DDP and FSDP2 over gloo.

All contenders train the same architecture with AdamW on CPU, with the same number of ranks and one thread each, and
without clipping. Every round runs each contender once, so that a slow moment of the machine meets all of them; ratios
are taken within a round, and medians over rounds. ``--bits`` asks another question: does the same training, with the
same global batch, end with the same bits on 1, 2 and 4 ranks? PyTorch is not a dependency:
``pip install torch==2.13.0`` (the CPU build), in this environment or in one named by ``--torch-python``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OURS = ("ddp", "zero1", "zero2", "zero3")
TORCH = ("torch-ddp", "torch-fsdp2")
SHAPE = ("ranks", "dim", "layers", "heads", "batch", "sequence", "steps", "warmup")
VOCABULARY = 256


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank")
    parser.add_argument("--sequence", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of one run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", default=",".join(OURS), help="of mpizero (default: %(default)s)")
    parser.add_argument("--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")))
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has PyTorch")
    parser.add_argument("--grain", type=int, help="mpizero's micro_batch (default: the sequences of a rank)")
    parser.add_argument("--bits", action="store_true", help="compare results over numbers of ranks instead of speed")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    return parser.parse_args()


def data(args: argparse.Namespace, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return one rank's part of the global batch; speed does not depend on the text."""
    text = np.random.default_rng(0).integers(0, VOCABULARY, (args.ranks * args.batch, args.sequence + 1))
    mine = text[rank * args.batch : (rank + 1) * args.batch]
    return mine[:, :-1], mine[:, 1:]


def timed(args: argparse.Namespace, step: Callable[[], Any], barrier: Callable[[], Any]) -> float:
    """Return tokens a second over all ranks."""
    for _ in range(args.warmup):
        step()
    barrier()
    started = time.perf_counter()
    for _ in range(args.steps):
        step()
    barrier()
    return args.ranks * args.batch * args.sequence * args.steps / (time.perf_counter() - started)


def our_worker(args: argparse.Namespace) -> dict[str, Any]:
    """Be one rank of an mpizero run."""
    from mpi4py import MPI

    import mpizero as mz

    gpt = mz.nn.GPT(dim=args.dim, layers=args.layers, heads=args.heads, sequence=args.sequence, vocabulary=VOCABULARY)
    config = mz.ShardingConfig(comm=MPI.COMM_WORLD, micro_batch=args.grain)
    model, _ = mz.distribute(gpt, mz.AdamW(lr=1e-3), strategy=args.worker, config=config)
    x, y = data(args, MPI.COMM_WORLD.rank)
    with model:
        speed = timed(args, lambda: model.train(x, y), MPI.COMM_WORLD.Barrier)
        result = {"rank": MPI.COMM_WORLD.rank, "tokens_per_second": speed, "parameters": model.parameter_count}
        return result | {"sha256": model.parameters_sha256()}


def torch_model(args: argparse.Namespace) -> Any:
    """Return the same GPT in PyTorch: pre-norm blocks, tanh GELU, tied embedding, fused causal attention."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
            self.qkv, self.projection = nn.Linear(args.dim, 3 * args.dim), nn.Linear(args.dim, args.dim)
            self.up, self.down = nn.Linear(args.dim, 4 * args.dim), nn.Linear(4 * args.dim, args.dim)

        def forward(self, x: Any) -> Any:
            samples, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(samples, length, 3, args.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
            x = x + self.projection(mixed.transpose(1, 2).reshape(samples, length, args.dim))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(VOCABULARY, args.dim), nn.Embedding(args.sequence, args.dim)
            self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
            self.norm = nn.LayerNorm(args.dim)

        def forward(self, x: Any, y: Any) -> Any:
            h = self.token(x) + self.position(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = block(h)
            logits = functional.linear(self.norm(h), self.token.weight)
            return functional.cross_entropy(logits.view(-1, VOCABULARY), y.reshape(-1))

    return GPT()


def torch_worker(args: argparse.Namespace) -> dict[str, Any]:
    """Be one rank of a PyTorch run."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo", init_method=f"file://{args.output}.store", rank=args.rank, world_size=args.ranks
    )
    model: Any = torch_model(args)
    parameters = sum(p.numel() for p in model.parameters())
    if args.worker == "torch-ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.init_device_mesh("cpu", (args.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, y = (torch.from_numpy(np.ascontiguousarray(a)) for a in data(args, args.rank))

    def step() -> None:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    speed = timed(args, step, distributed.barrier)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update((value.full_tensor() if hasattr(value, "full_tensor") else value).numpy().tobytes())
    distributed.destroy_process_group()
    result = {"rank": args.rank, "tokens_per_second": speed, "parameters": parameters}
    return result | {"torch": torch.__version__, "sha256": digest.hexdigest()}


def forwarded(args: argparse.Namespace, worker: str, output: str) -> list[str]:
    """Return this script's command line for one rank."""
    values = {key: getattr(args, key) for key in SHAPE} | {"grain": args.grain or args.batch}
    options = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return [__file__, *options, "--worker", worker, "--output", output]


def run(args: argparse.Namespace, contender: str) -> dict[str, Any]:
    """Run one contender once, in processes of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "result.json")
        rest = forwarded(args, contender, output)
        if contender in TORCH:
            commands = [[args.torch_python, *rest, "--rank", str(rank)] for rank in range(args.ranks)]
        else:
            commands = [[args.mpiexec, "-n", str(args.ranks), sys.executable, *rest]]
        jobs = [subprocess.Popen(command, env=environment) for command in commands]
        if any([job.wait(timeout=600) for job in jobs]):  # a list: wait for all of them
            sys.exit(f"{contender} failed: {' '.join(commands[0])}")
        return dict(json.loads(Path(output).read_text(encoding="utf-8")))


def require_torch(python: str) -> None:
    """Leave with the way out where PyTorch is missing."""
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        sys.exit(
            f"{python} has no PyTorch, which this comparison needs: `pip install torch==2.13.0` (the CPU build) there, "
            "or name another interpreter with --torch-python"
        )


def summary(args: argparse.Namespace, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds; ratios are taken within a round."""
    speeds = {name: [row[name]["tokens_per_second"] for row in rounds] for name in rounds[0]}
    results = {}
    for name, mine in speeds.items():
        results[name] = {
            "tokens_per_second": round(statistics.median(mine)),
            "rounds": [round(speed) for speed in mine],
            "parameters": rounds[0][name]["parameters"],
        }
        for peer in TORCH if name not in TORCH else ():
            pairs = zip(mine, speeds[peer], strict=True)
            results[name][f"over {peer}"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
    return {
        "configuration": {key: getattr(args, key) for key in SHAPE} | {"threads": 1},
        "torch": rounds[0][TORCH[0]]["torch"],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "results": results,
    }


def compare_bits(args: argparse.Namespace, contenders: list[str]) -> None:
    """Train with one global batch on 1, 2 and 4 ranks and print how many results there are."""
    total = args.ranks * args.batch
    shape = vars(args) | {"grain": total // 4, "steps": 10, "warmup": 0}
    runs = [argparse.Namespace(**shape | {"ranks": n, "batch": total // n}) for n in (1, 2, 4)]
    found = {name: [run(one, name)["sha256"] for one in runs] for name in contenders}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"after 10 steps with {total} sequences each, on 1, 2 and 4 ranks:")
    for name, hashes in found.items():
        different = len(set(hashes))
        verdict = "the same bits" if different == 1 else f"{different} different results"
        print(f"{name:14s} {verdict}: {', '.join(digest[:8] for digest in hashes)}")


def main() -> None:
    """Run all contenders in turn and compare."""
    args = arguments()
    if args.worker:
        result = torch_worker(args) if args.worker in TORCH else our_worker(args)
        if result["rank"] == 0:
            Path(args.output).write_text(json.dumps(result), encoding="utf-8")
        return
    require_torch(args.torch_python)
    contenders = [*args.strategies.split(","), *TORCH]
    if args.bits:
        compare_bits(args, contenders)
        return
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds):
        rounds.append({name: run(args, name) for name in contenders})
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    table = summary(args, rounds)
    if args.json:
        print(json.dumps(table, indent=1))
        return
    print(f"{table['machine']}; PyTorch {table['torch']}; {table['configuration']}")
    print(f"{'':14s} {'tokens/s':>9s} {'over DDP':>9s} {'over FSDP2':>11s} {'parameters':>11s}")
    for name, row in table["results"].items():
        ratios = [row.get(f"over {peer}") for peer in TORCH]
        shown = [f"{ratio:.2f}x" if ratio else "" for ratio in ratios]
        print(f"{name:14s} {row['tokens_per_second']:9,d} {shown[0]:>9s} {shown[1]:>11s} {row['parameters']:11,d}")


if __name__ == "__main__":
    main()
