"""Train modules of PyTorch and models of JAX on the GPU, beside the same training by PyTorch and JAX alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

import mpizero as mz
from gpu_checking.report import Report, Skipped

#: Largest relative difference of losses in float32.
LIMIT = 1e-4
RATE = 0.05


def _need(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise Skipped(f"{name} is not installed")


def _batch(samples: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(3).normal(size=(samples, 8)).astype(np.float32)
    return x, np.cumsum(x, axis=1)[:, :4].copy()


def _ours(model: Any, device: str, batch: Any, steps: int, strategy: str = "ddp") -> list[float]:
    """Train with mpizero by plain gradient descent, in one grain; return the losses."""
    with (
        mz.ShardingConfig(comm="self", device=device, micro_batch=len(batch[0])) as config,
        mz.distribute(model, mz.SGD(lr=RATE), strategy=strategy, config=config) as placed,
    ):
        return [placed.train(*batch) for _ in range(steps)]


def _compare(report: Report, name: str, ours: Callable[[], list[float]], theirs: list[float]) -> None:
    """Check that losses are those of the other library."""
    with report.attempt(name):
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours(), theirs, strict=True))
        report.check(name, apart <= LIMIT, f"losses differ by {apart:.1e} at most (limit {LIMIT:.0e})")


def torch_models(report: Report, small: bool) -> None:
    """Train a module of PyTorch by mpizero: whole, by blocks, and one that the user has moved to the GPU."""
    _need("torch")
    import torch
    from torch import nn

    from mpizero.adapters.torch import TorchModel

    device = "cpu" if small else "cuda"
    if not small and not torch.cuda.is_available():
        raise Skipped("PyTorch finds no GPU")
    steps, batch = (2, _batch(6)) if small else (20, _batch(96))

    def network() -> Any:
        torch.manual_seed(5)
        width = 8 if small else 256
        return nn.Sequential(
            nn.Linear(8, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        )

    def plain() -> list[float]:
        net, (x, y) = network().to(device), (torch.from_numpy(values).to(device) for values in batch)
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=RATE), []
        for _ in range(steps):
            loss = ((net(x) - y) ** 2).sum() / len(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    loss, theirs = nn.MSELoss(reduction="sum"), plain()
    names = [str(number) for number in range(6)]
    _compare(report, "whole", lambda: _ours(TorchModel(network, loss), device, batch, steps), theirs)
    _compare(report, "blocks", lambda: _ours(TorchModel(network, loss, blocks=names), device, batch, steps), theirs)
    blocks = TorchModel(network, loss, blocks=names)
    _compare(report, "blocks, zero3", lambda: _ours(blocks, device, batch, steps, "zero3"), theirs)
    _compare(
        report, "moved by the user", lambda: _ours(TorchModel(network().to(device), loss), device, batch, steps), theirs
    )
    drop = [nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)]
    once, again = (
        _ours(TorchModel(lambda: nn.Sequential(*drop), loss, blocks=["0", "1", "2"], seed=1), device, batch, steps)
        for _ in range(2)
    )
    report.check("dropout has the same numbers in every run", once == again, f"{once[-1]:.6g} and {again[-1]:.6g}")
    there = "" if small else f" on {torch.cuda.get_device_name()}"
    report.figure("in short", f"PyTorch {torch.__version__}{there}: 4 ways, {steps} steps, losses within {LIMIT:.0e}")


def jax_models(report: Report, small: bool) -> None:
    """Train a model of JAX by mpizero, whole and by blocks; it computes where JAX does, on the GPU if JAX finds it."""
    _need("jax")
    import jax
    import jax.numpy as jnp

    from mpizero.adapters.jax import JaxModel

    steps, batch = (2, _batch(6)) if small else (20, _batch(96))
    width = 8 if small else 256
    keys = jax.random.split(jax.random.key(5), 2)
    start = {
        "in": {"w": jax.random.normal(keys[0], (8, width)) / 8, "b": jnp.zeros(width)},
        "out": {"w": jax.random.normal(keys[1], (width, 4)) / width, "b": jnp.zeros(4)},
    }

    def hidden(parameters: Any, x: Any) -> Any:
        return jnp.tanh(x @ parameters["w"] + parameters["b"])

    def last(parameters: Any, x: Any) -> Any:
        return x @ parameters["w"] + parameters["b"]

    def squares(prediction: Any, y: Any) -> Any:
        return jnp.sum((prediction - y) ** 2)

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return squares(last(parameters["out"], hidden(parameters["in"], x)), y)

    def plain() -> list[float]:
        x, y = batch
        step = jax.jit(jax.value_and_grad(lambda parameters: loss(parameters, x, y) / len(x)))
        parameters, losses = start, []
        for _ in range(steps):
            value, slope = step(parameters)
            parameters = jax.tree.map(lambda p, g: p - RATE * g, parameters, slope)
            losses.append(float(value))
        return losses

    theirs = plain()
    blocks = {"in": (start["in"], hidden), "out": (start["out"], last)}
    report.figure("JAX computes on", ", ".join(map(str, jax.devices())))
    _compare(report, "whole", lambda: _ours(JaxModel(start, loss), "cpu", batch, steps), theirs)
    by_blocks = JaxModel(None, squares, blocks=blocks)
    _compare(report, "blocks", lambda: _ours(by_blocks, "cpu", batch, steps), theirs)
    report.figure(
        "in short", f"JAX {jax.__version__}, {jax.default_backend()}: {steps} steps, losses within {LIMIT:.0e}"
    )
