"""Train one GPT with mpizero, PyTorch and DeepSpeed alternately, and print tokens a second, memory and ratios.

A contender is one implementation of the same training: the same architecture on CPU, with AdamW and without clipping,
on the same number of ranks and threads, with the same number of samples on each rank. The contenders are mpizero's
four strategies, started by mpiexec; PyTorch's DDP, DDP with ZeroRedundancyOptimizer, and FSDP2; and DeepSpeed's
ZeRO-1, 2 and 3. PyTorch and DeepSpeed use gloo and start with the environment variables of torchrun. "module-" before
the name of a strategy trains the PyTorch module of the others with mpizero, by an interpreter that has PyTorch;
"kernels-" does so with ``kernels="mpizero"``; "torch-plain" trains it on one rank in a plain loop. "products alone"
computes only the matrix products of the same step with NumPy's BLAS, to show how fast a step could be. "@1x2" after a
name runs that contender on 1 rank of 2 threads, whatever ``--ranks`` and ``--threads`` say; the sequences of a step
are then divided by its ranks. Every contender is first run alone, to measure its memory. Then all of them are started.
In each round every contender trains a few steps while the others sleep, so that a slow moment of the machine affects
all alike. Ratios are computed from times of the same round. The tables show medians over rounds, and in parentheses
the smallest and largest value.

With ``--bits`` nothing is timed: each contender trains with the same global batches on 1, 2 and 4 ranks, and the bits
of the resulting parameters are compared.

PyTorch and DeepSpeed need an environment of their own, whose interpreter is given by ``--peers-python``:
``python3 -m venv peers && DS_BUILD_OPS=0 peers/bin/pip install torch==2.13.0 deepspeed`` (the CPU build of PyTorch).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from comparing.ours import LIMIT, MODULES, PRESETS, STRATEGIES, OurModule, Ours, Products
from harness.jobs import environment_of, run
from harness.options import chosen, parser, positive
from harness.tables import aligned
from harness.turns import Team, has_module, serve, team_of, team_of_processes, teams_in_turns, tell

with contextlib.suppress(ImportError):  # the interpreter of PyTorch and DeepSpeed need not have mpizero's dependencies
    from mpizero._util.numbers import Measurement
    from mpizero.train.machine import described, proportional

PEERS = {
    "torch-plain": "a plain loop of PyTorch",
    "torch-ddp": "DDP",
    "torch-zero1": "ZeroRedundancyOptimizer",
    "torch-fsdp2": "FSDP2",
    "deepspeed-zero1": "DeepSpeed ZeRO-1",
    "deepspeed-zero2": "DeepSpeed ZeRO-2",
    "deepspeed-zero3": "DeepSpeed ZeRO-3",
}
OURS = (*STRATEGIES, *MODULES)
USUAL = (LIMIT, *STRATEGIES, *(name for name in PEERS if name != "torch-plain"))
SHAPE = ("ranks", "threads", "dim", "layers", "heads", "batch", "sequence", "vocabulary")
#: Seconds between two measurements of the processes' memory.
GLANCE = 0.02
#: A program that builds DeepSpeed's Adam, which is compiled at run time, before several ranks do so at once.
BUILD = "from deepspeed.accelerator import get_accelerator as get; get().create_op_builder('FusedAdamBuilder').load()"


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=7, mpiexec=True)
    options.add_argument("--preset", choices=PRESETS, default="base", help="shapes that the options below change")
    for name in ("ranks", "dim", "layers", "heads"):
        options.add_argument(f"--{name}", type=positive)
    options.add_argument("--threads", type=positive, default=1, help="of each rank (default: %(default)s)")
    options.add_argument("--batch", type=positive, help="sequences a rank")
    options.add_argument("--sequence", type=positive, help="tokens a sequence")
    options.add_argument("--vocabulary", type=int, default=256)
    options.add_argument("--steps", type=positive, help="timed steps of one turn")
    options.add_argument("--warmup", type=int, default=3, help="steps of a turn before the clock starts")
    options.add_argument("--contenders", default=",".join(USUAL), help="(default: %(default)s)")
    options.add_argument("--grain", type=int, help="mpizero's micro_batch (default: the sequences of a rank)")
    options.add_argument("--peers-python", default=sys.executable, help="interpreter that has PyTorch and DeepSpeed")
    options.add_argument("--no-memory", action="store_true", help="leave out the runs alone, which measure memory")
    options.add_argument("--bits", action="store_true", help="compare results over numbers of ranks instead of speed")
    options.add_argument("--json", action="store_true", help="print speed and memory as one JSON document")
    args = options.parse_args()
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.contenders = chosen("--contenders", args.contenders, (LIMIT, *OURS, *PEERS), contender)
    for name in args.contenders:
        with_layout(args, name)  # ends the script if it cannot be
    return args


def contender(name: str) -> str:
    """Return a contender's name without its numbers of ranks and threads."""
    return name.partition("@")[0]


def with_layout(args: argparse.Namespace, name: str) -> argparse.Namespace:
    """Return the options with the ranks and threads of the contender ``name``, and with the sequences of its ranks.

    End the script if these numbers are no numbers, or if so many ranks cannot share the sequences equally.
    """
    _, given, sizes = name.partition("@")
    sizes = sizes if given else f"{args.ranks}x{args.threads}"
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", sizes):
        sys.exit(f"--contenders: {name!r}: after @ come ranks and threads, such as {contender(name)}@1x2")
    ranks, threads = map(int, sizes.split("x"))
    total = args.ranks * args.batch
    if total % ranks:
        sys.exit(
            f"--contenders: {name!r}: {ranks} ranks cannot share {total} sequences (--ranks times --batch) equally"
        )
    if ranks > 1 and contender(name) == "torch-plain":
        sys.exit(f"--contenders: {name!r}: a plain loop of PyTorch trains on one rank: give torch-plain@1x{threads}")
    return argparse.Namespace(**vars(args) | {"ranks": ranks, "threads": threads, "batch": total // ranks})


def worker(args: argparse.Namespace) -> None:
    """Run as one rank of the contender ``args.be``, until the benchmark closes the connection."""
    shape = {name: getattr(args, name) for name in SHAPE}
    one: Any
    if args.be in PEERS:
        from comparing.peers import CLASSES

        one, rank = CLASSES[args.be](shape), int(os.environ["RANK"])
    else:
        if args.be in MODULES:
            one = OurModule(*MODULES[args.be], shape, args.grain)
        else:
            one = (Products if args.be == LIMIT else Ours)(args.be, shape, args.grain)
        rank = one.world.rank
    actions = {name: getattr(one, name) for name in ("prepare", "turn", "digest") if hasattr(one, name)}
    serve(args.socket, rank, actions)
    if args.be in OURS:
        one.model.close()
    with contextlib.suppress(ImportError):
        if args.be in PEERS:
            from torch import distributed

            distributed.destroy_process_group()


def team(args: argparse.Namespace, name: str, own_adam: bool) -> Team:
    """Start the ranks of the contender ``name``: mpizero's by mpiexec, the others with the variables of torchrun.

    ``own_adam`` says whether DeepSpeed uses its own fused Adam; otherwise it uses PyTorch's.
    """
    args, be = with_layout(args, name), contender(name)
    words = [word for key in SHAPE for word in (f"--{key}", str(getattr(args, key)))]
    words += ["--be", be, *(["--grain", str(args.grain)] if args.grain else [])]
    environment = environment_of(args.threads)
    if be not in PEERS:
        return team_of(__file__, args.mpiexec, args.ranks, *words, name=name, environment=environment)
    environment |= {"COMPARE_DEEPSPEED_ADAM": "own" if own_adam else "torch", **for_deepspeed(args)}
    return team_of_processes(name, args.ranks, args.peers_python, [__file__, *words], environment)


def for_deepspeed(args: argparse.Namespace) -> dict[str, str]:
    """Return variables of the environment that DeepSpeed needs, which looks for ninja beside its interpreter."""
    path = f"{Path(args.peers_python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"DS_ACCELERATOR": "cpu", "PATH": path}


def require(args: argparse.Namespace) -> bool:
    """Check that PyTorch and DeepSpeed are installed as needed, or end the script with advice.

    Return True if DeepSpeed takes part and its own fused Adam can be built.
    """
    modules = [name for name in args.contenders if contender(name) in MODULES]
    if modules and importlib.util.find_spec("torch") is None:
        sys.exit(
            f"{sys.executable} has no torch, which --contenders '{','.join(modules)}' need: start this script with an "
            "interpreter that has both mpizero and PyTorch"
        )
    wanted = {name.partition("-")[0] for name in map(contender, args.contenders) if name in PEERS}
    for module in sorted(wanted, reverse=True):
        if not has_module(args.peers_python, module, for_deepspeed(args)):
            others = ",".join(name for name in args.contenders if module not in name)
            sys.exit(
                f"{args.peers_python} has no {module}, which this comparison needs: `DS_BUILD_OPS=0 pip install "
                "torch==2.13.0 deepspeed` (the CPU build of PyTorch) there, name another interpreter with "
                f"--peers-python, or leave it out with --contenders '{others}'"
            )
    if "deepspeed" not in wanted:
        return False
    done = run([args.peers_python, "-c", BUILD], environment=for_deepspeed(args))
    if done.status:
        last = done.err.strip().splitlines()[-1:]
        tell(f"DeepSpeed's fused Adam cannot be built, PyTorch's takes its place: {last}")
    return not done.status


@contextlib.contextmanager
def watched(pids: Sequence[int]) -> Iterator[dict[str, int]]:
    """Measure the memory (PSS, in bytes) of processes until the end of the ``with`` block.

    Yield a dictionary that is updated meanwhile: "rank" is the largest memory of one process, "node" of all together.
    """
    most = {"rank": 0, "node": 0}
    stop = threading.Event()

    def look() -> None:
        while True:
            sizes = [proportional(pid) for pid in pids]
            most["rank"], most["node"] = max(most["rank"], *sizes), max(most["node"], sum(sizes))
            if stop.wait(GLANCE):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


def memory(args: argparse.Namespace, name: str, own_adam: bool) -> dict[str, Any]:
    """Run the contender ``name`` alone for a few steps.

    Return its "parameters", "version" and "note", and its memory in bytes: "pss_rank" (the largest of one rank),
    "pss_node" (of all ranks together) and "pss_node_start" (of all ranks before the model was built).
    """
    with team(args, name, own_adam) as alone:
        pids = list(alone.pids.values())
        with watched(pids) as before:
            time.sleep(3 * GLANCE)
        with watched(pids) as most:
            told = alone.ask("prepare")[0]
            alone.ask("turn", warmup=1, steps=4)
    return told | {"pss_rank": most["rank"], "pss_node": most["node"], "pss_node_start": before["node"]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders, first each alone and then alternately; return all results as a JSON document."""
    own_adam = require(args)
    names = args.contenders
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in () if args.no_memory else names:
        tell(f"{name} alone")
        results[name] = memory(args, name, own_adam)
    starts = {name: partial(team, args, name, own_adam) for name in names}
    seconds, said = teams_in_turns(args.rounds, starts, args.warmup, args.steps)
    tokens = args.ranks * args.batch * args.sequence * args.steps
    for name in names:
        speeds = [tokens / s for s in seconds[name]]
        results[name] |= said[name]
        results[name] |= {"tokens_per_second": Measurement.of(speeds).rounded(0), "rounds": [round(s) for s in speeds]}
        if contender(name) in OURS:
            results[name]["over"] = {
                peer: Measurement.of_ratios(seconds[peer], seconds[name]).rounded(3)
                for peer in names
                if contender(peer) not in OURS
            }
    return {
        "configuration": {key: getattr(args, key) for key in (*SHAPE, "steps", "warmup", "grain")},
        "rounds": args.rounds,
        "machine": described(),
        "results": results,
    }


def report(found: dict[str, Any]) -> str:
    """Format the result of :func:`measure` as tables."""
    shape, results = found["configuration"], found["results"]
    versions = sorted({row["version"] for row in results.values()} - {"mpizero"})
    lines = [
        f"{found['machine']}; {', '.join(versions)}",
        f"GPT of dim {shape['dim']}, {shape['layers']} layers, {shape['batch']} x {shape['sequence']} tokens a rank, "
        f"{shape['ranks']} ranks, threads of a rank: {shape['threads']}; "
        f"{found['rounds']} rounds of {shape['steps']} steps",
    ]
    rows = []
    for name, row in results.items():
        speed = row["tokens_per_second"]
        held = [row["pss_rank"], row["pss_node"], row["pss_node"] - row["pss_node_start"]] if "pss_node" in row else []
        mega = [f"{size / 1e6:.0f}" for size in held] or ["-"] * 3
        rows.append((name, *(f"{speed[key]:,.0f}" for key in ("median", "least", "most")), *mega, row["note"]))
    columns = ("tokens/s", "least", "most", "MB a rank", "MB node", "MB since import", "optimizer")
    lines.append(aligned(("", *columns), rows))
    ours = [name for name in results if contender(name) in OURS]
    if ours:
        over = {name: results[name]["over"] for name in ours}
        ratios = [(peer, *(Measurement(**over[name][peer]) for name in ours)) for peer in over[ours[0]]]
        lines += ["", aligned(("tokens/s over", *ours), ratios)]
    return "\n".join(lines)


def compare_bits(args: argparse.Namespace) -> None:
    """Train each contender with the same global batches on 1, 2 and 4 ranks; print hashes of the parameters."""
    own_adam = require(args)
    total = args.ranks * args.batch
    if total % 4:
        sys.exit(f"--bits: {args.ranks} ranks x {args.batch} sequences must divide by 4")
    if several := [name for name in args.contenders if name != contender(name)]:
        sys.exit(f"--bits: {several[0]!r} cannot have ranks of its own: each contender trains on 1, 2 and 4 ranks")
    print(f"after 10 steps with {total} sequences each, on 1, 2 and 4 ranks:")
    for name in args.contenders:
        hashes = []
        for ranks in (1, 2, 4) if name != LIMIT else ():
            shape = vars(args) | {"ranks": ranks, "batch": total // ranks, "grain": total // 4}
            with team(argparse.Namespace(**shape), name, own_adam) as each:
                each.ask("prepare")
                each.ask("turn", warmup=0, steps=10)
                hashes.append(each.ask("digest")[0])
        if hashes:
            different = len(set(hashes))
            verdict = "the same bits" if different == 1 else f"{different} different results"
            print(f"{name:17s}{verdict}: {', '.join(digest[:8] for digest in hashes)}", flush=True)


def main() -> None:
    """Run all contenders, and print speed and memory, or with ``--bits`` the comparison of bits."""
    args = arguments()
    if args.be:
        worker(args)
    elif args.bits:
        compare_bits(args)
    else:
        found = measure(args)
        print(json.dumps(found, indent=1) if args.json else report(found))


if __name__ == "__main__":
    main()
