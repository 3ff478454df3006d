"""Time steps of microseconds, of an MLP: by mpizero, with and without recordings, by PyTorch and by JAX, in turns.

The network has three hidden layers with tanh, the loss is the mean squared error, the optimizer AdamW. Each rank has
``--batch`` samples, the same in every step, and one thread. "mpizero called" runs with MPIZERO_REPLAY=0, "mpizero in 8
grains" with an eighth of the batch as micro_batch. "torch" is a plain loop of PyTorch, "torch.compile" has its network
compiled, "jax.jit" a whole step with optax's AdamW; they train on one rank. "torch-ddp" is DistributedDataParallel over
gloo. The table has medians of rounds, in microseconds of a step, and ratios of the same round to the first contender.

``--network`` takes the modules of PyTorch of two examples in place of the MLP, with Adam and the example's batch: both
mpizero and PyTorch compute them by PyTorch, so the ratio is what mpizero adds. It wants PyTorch beside mpizero.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.options import chosen, parser, positive
from harness.tables import aligned
from harness.turns import Team, has_module, serve, team_of, team_of_processes, teams_in_turns, timed

OURS = ("mpizero", "mpizero called", "mpizero in 8 grains")
TORCH = ("torch", "torch.compile", "torch-ddp")
ALONE = ("torch", "torch.compile", "jax.jit")
WIDTH, RATE = 64, 1e-3
#: Samples of a rank, by the network.
BATCHES = {"mlp": 256, "physics_informed": 2048, "neural_operator": 32}
GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
Step = Callable[[], Any]


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=15, mpiexec=True)
    options.add_argument("--ranks", type=positive, default=1, help="(default: %(default)s)")
    options.add_argument("--network", choices=BATCHES, default="mlp", help="(default: %(default)s)")
    batches = ", ".join(f"{name}: {size}" for name, size in BATCHES.items())
    options.add_argument("--batch", type=positive, help=f"samples of a rank (default, by network: {batches})")
    options.add_argument("--steps", type=positive, default=300, help="timed steps of one turn (default: %(default)s)")
    options.add_argument("--contenders", default="mpizero,mpizero called", help="(default: %(default)s)")
    options.add_argument("--peers-python", default=sys.executable, help="interpreter that has PyTorch")
    options.add_argument("--jax-python", default=sys.executable, help="interpreter that has JAX and optax")
    args = options.parse_args()
    args.batch = args.batch or BATCHES[args.network]
    args.contenders = chosen("--contenders", args.contenders, (*OURS, *TORCH, "jax.jit"), str)
    if alone := [name for name in args.contenders if name in ALONE and args.ranks > 1]:
        sys.exit(f"--contenders: {alone[0]!r} trains on one rank")
    if args.network != "mlp" and "jax.jit" in args.contenders:
        sys.exit(f"--contenders: 'jax.jit' computes the MLP only, not --network {args.network}")
    return args


def data(args: argparse.Namespace, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of one rank."""
    rng = np.random.default_rng(rank)
    if args.network == "physics_informed":
        return rng.uniform([0.0, -1.0], [1.0, 1.0], (args.batch, 2)), np.zeros(args.batch)
    if args.network == "neural_operator":
        return rng.standard_normal((args.batch, 64), np.float32), rng.standard_normal((args.batch, 64), np.float32)
    x = rng.standard_normal((args.batch, 3), np.float32)
    return x, np.sin(x[:, :1]) * x[:, 1:2]


def example(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Return the module's class and the loss of the example ``args.network``."""
    sys.path.insert(0, str(GALLERY))
    from importlib import import_module

    module = import_module(args.network)
    return (
        (module.Residual, module.squared) if args.network == "physics_informed" else (module.Operator, module.relative)
    )


def ours(args: argparse.Namespace) -> tuple[Step, Step, int]:
    """Return a step of mpizero's, a barrier, and the rank."""
    from mpi4py import MPI

    import mpizero as mz

    world, micro = MPI.COMM_WORLD, -(-args.batch // (8 if args.be == "mpizero in 8 grains" else 1))
    if args.network == "mlp":
        net: Any = mz.nn.MLP(3, [WIDTH] * 3, 1, task="regression", activation="tanh")
        optimizer: Any = mz.AdamW(lr=RATE)
    else:
        from mpizero.adapters.torch import TorchModel

        net, optimizer = TorchModel(*example(args)), mz.Adam(lr=RATE)
    model = mz.distribute(net, optimizer, "ddp", config=mz.Config(micro_batch=micro))
    x, y = data(args, world.rank)
    return lambda: model.train(x, y), world.Barrier, world.rank


def torchs(args: argparse.Namespace) -> tuple[Step, Step, int]:
    """Return a step of PyTorch's, a barrier, and the rank."""
    import torch

    torch.set_num_threads(1)
    rank, mean = int(os.environ["RANK"]), torch.nn.functional.mse_loss
    if args.network == "mlp":
        net, loss_of, adam = mlp(), mean, torch.optim.AdamW
    else:
        make, total = example(args)
        net, loss_of, adam = make(), lambda found, target: total(found, target) / args.batch, torch.optim.Adam
    if args.be == "torch-ddp":
        torch.distributed.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = adam(net.parameters(), lr=RATE, fused=True)
    called = torch.compile(net) if args.be == "torch.compile" else net
    x, y = map(torch.from_numpy, data(args, rank))

    def step() -> float:
        loss = loss_of(called(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, torch.distributed.barrier if args.be == "torch-ddp" else lambda: None, rank


def mlp() -> Any:
    """Return the MLP as a module of PyTorch."""
    from torch import nn

    sizes = [3, *[WIDTH] * 3]
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def jaxs(args: argparse.Namespace) -> tuple[Step, Step, int]:
    """Return a step of JAX's, a barrier that does nothing, and 0."""
    import jax
    import optax

    sizes, optimizer = [3, *[WIDTH] * 3, 1], optax.adamw(RATE, weight_decay=0.01)
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    made = zip(keys, sizes, sizes[1:], strict=False)
    layers = [(jax.random.normal(key, (a, b)) / a**0.5, jax.numpy.zeros(b)) for key, a, b in made]

    def loss(layers: Any, x: Any, y: Any) -> Any:
        for weight, bias in layers[:-1]:
            x = jax.numpy.tanh(x @ weight + bias)
        return ((x @ layers[-1][0] + layers[-1][1] - y) ** 2).mean()

    @jax.jit
    def update(layers: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(layers, x, y)
        changes, state = optimizer.update(gradient, state, layers)
        return optax.apply_updates(layers, changes), state, value

    kept, (x, y) = [layers, optimizer.init(layers)], data(args, 0)

    def step() -> float:
        kept[0], kept[1], value = update(*kept, x, y)
        return float(value)

    return step, lambda: None, 0


def worker(args: argparse.Namespace) -> None:
    """Run as one rank of the contender ``args.be``, until the benchmark closes the connection."""
    step, barrier, rank = (ours if args.be in OURS else torchs if args.be in TORCH else jaxs)(args)
    turn = partial(timed, step, barrier)
    serve(args.socket, rank, {"prepare": lambda: turn(warmup=20, steps=args.steps), "turn": turn})


def team(args: argparse.Namespace, name: str) -> Team:
    """Start the ranks of the contender ``name``."""
    words = ["--ranks", str(args.ranks), "--batch", str(args.batch), "--steps", str(args.steps)]
    words += ["--network", args.network, "--be", name]
    if name in OURS:
        replay = {"MPIZERO_REPLAY": "0" if name == "mpizero called" else "1"}
        return team_of(__file__, args.mpiexec, args.ranks, *words, name=name, environment=replay)
    python = args.peers_python if name in TORCH else args.jax_python
    one_thread = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    return team_of_processes(name, args.ranks, python, [__file__, *words], one_thread)


def main() -> None:
    """Run as a rank, or let all contenders take turns and print their table."""
    args = arguments()
    if args.be:
        worker(args)
        return
    from mpizero._util.numbers import Measurement

    for name in args.contenders:
        python, module = (args.peers_python, "torch") if name in TORCH else (args.jax_python, "optax")
        if name not in OURS and not has_module(python, module):
            sys.exit(f"{python} has no {module}, which {name!r} needs: name another interpreter, or leave it out")
    starts = {name: partial(team, args, name) for name in args.contenders}
    seconds, _ = teams_in_turns(args.rounds, starts, warmup=10, steps=args.steps)
    rows, first = [], args.contenders[0]
    for name, values in seconds.items():
        each = Measurement.of(values).text(0, 1e6 / args.steps)
        rows.append((name, each, Measurement.of_ratios(values, seconds[first])))
    print(aligned(("", "us a step", f"over {first}"), rows))


if __name__ == "__main__":
    main()
