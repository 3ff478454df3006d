"""Training on several ranks against PyTorch's optimizers in one process: losses of every step, and parameters."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.nn import from_torch, initial_parameters, model_specs
from mpizero.testing import run_in_threads

torch = pytest.importorskip("torch")

from tests.peers.twins import perceptron_loss, perceptron_twin, text_batches, to_torch_names, torch_twin  # noqa: E402

STEPS, RANKS = 40, 3
#: Ours and PyTorch's, of one name, with the same settings; and what the perceptron is that they train.
OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.05}, "gelu", "classification"),
    "momentum": ("SGD", {"lr": 0.02, "momentum": 0.9, "dampening": 0.3}, "silu", "regression"),
    "nesterov": ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True}, "tanh", "classification"),
    "adam": ("Adam", {"lr": 2e-3, "betas": (0.8, 0.95)}, "relu", "regression"),
    "adamw": ("AdamW", {"lr": 2e-3, "eps": 1e-6}, "gelu", "regression"),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "alpha": 0.9}, "gelu", "classification"),
}


def groups_of(specs, parameters):
    """PyTorch's groups of parameters: weight decay where this library applies it, which is to matrices."""
    pairs = list(zip(specs, parameters, strict=True))
    return [
        {"params": [p for spec, p in pairs if spec.decay], "weight_decay": 0.1},
        {"params": [p for spec, p in pairs if not spec.decay], "weight_decay": 0.0},
    ]


def trained_here(model, optimizer, batches, strategy, **settings):
    """Train on threads as ranks; return the losses and the parameters."""

    def rank(comm):
        losses = []
        with mz.ShardingConfig(comm=comm, minimum_parameter_group_size=1, micro_batch=1, **settings) as config:
            sharded = mz.distribute(model, optimizer, strategy=strategy, config=config)
            with sharded:
                for x, y in batches:
                    losses.append(sharded.train(x[comm.rank :: RANKS], y[comm.rank :: RANKS]))
                return losses, sharded.gather_full_parameters()

    return run_in_threads(RANKS, rank)[0]


def trained_there(optimizer, parameters, loss_of, batches, clip=None, schedule=None):
    """Train in PyTorch; return the losses."""
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        if rates is not None:
            rates.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twelve_steps_of_a_perceptron_have_pytorch_s_losses_and_parameters(name, rng):
    kind, settings, activation, task = OPTIMIZERS[name]
    model = mz.nn.MLP(5, (8, 7), 4, activation=activation, task=task, dtype="float64", seed=3)
    twin = perceptron_twin(model, initial_parameters(model))
    target = (lambda: rng.integers(0, 4, 7)) if task == "classification" else lambda: rng.normal(size=(7, 4))
    batches = [(rng.normal(size=(7, 5)), target()) for _ in range(12)]
    losses, values = trained_here(model, getattr(mz, kind)(weight_decay=0.1, **settings), batches, "zero2")

    def loss_of(x, y):
        return perceptron_loss(task, twin(torch.from_numpy(x)), torch.from_numpy(y))

    optimizer = getattr(torch.optim, kind)(groups_of(model_specs(model), twin.parameters()), **settings)
    np.testing.assert_allclose(losses, trained_there(optimizer, None, loss_of, batches), rtol=1e-9)
    wanted = np.concatenate([parameter.detach().numpy().T.ravel() for parameter in twin.parameters()])
    np.testing.assert_allclose(values, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "clip", "rtol"), [("float64", None, 1e-14), ("float64", 0.5, 1e-7), ("float32", 0.5, 1e-5)]
)
def test_forty_steps_of_a_gpt_with_a_schedule_have_pytorch_s_losses(dtype, clip, rtol):
    """With clipping within 1e-7, as PyTorch clips by the norm + 1e-6."""
    model = mz.nn.GPT(16, 2, 2, 8, dtype=dtype, seed=1)
    batches = text_batches(STEPS, sequence=8, batch=6)
    twin = torch_twin(model, initial_parameters(model))
    rate = mz.optim.cosine(1e-2, steps=STEPS, warmup=5)
    ours = mz.AdamW(lr=rate, weight_decay=0.1)
    losses, values = trained_here(model, ours, batches, "zero3", clip=clip)
    named = dict(twin.named_parameters())
    specs = [spec for spec in model_specs(model) if spec.tied is None]
    parameters = [named[name] for name in to_torch_names(model) if name in named]
    optimizer = torch.optim.AdamW(groups_of(specs, parameters), lr=1.0)
    wanted = trained_there(optimizer, parameters, twin.mean_loss, batches, clip, rate)
    np.testing.assert_allclose(losses, wanted, rtol=rtol)
    assert losses[-1] < losses[0] - 1.0
    if dtype == "float64":
        back = from_torch(model, twin.state_dict())
        np.testing.assert_allclose(values, np.concatenate([back[spec.name].ravel() for spec in specs]), atol=1e-6)
