"""Make mistakes by which one rank's model, settings or optimizer differ from those of the others."""

from __future__ import annotations

import math
from typing import Any

import case
import numpy as np

import mpizero as mz

SEVERAL = (2, 4)


def _mlp(**settings: Any) -> mz.nn.MLP:
    return mz.nn.MLP(4, (8,), 2, **{"task": "regression", **settings})


def _trained(model: Any, optimizer: Any, config: mz.ShardingConfig, steps: int = 4, strategy: str = "zero2") -> None:
    placed = mz.distribute(model, optimizer, strategy=strategy, config=config)
    for _ in range(steps):
        placed.train(*case.samples())


def _differ(*says: str, **settings: Any) -> Any:
    expected: dict[str, Any] = {"ranks": SEVERAL, "status": 78, **settings}
    return case.mistake("ConfigError: ", *says, **expected)


@_differ("seed of the model 0 on rank 0, 1 on rank 1")
def the_rank_as_the_seed_of_the_model():
    """Give the model `seed=rank`, as if each rank had initial parameters of its own."""
    _trained(_mlp(seed=case.rank()), mz.AdamW(), case.config())


@_differ("activation of the model 'tanh' on rank 0, 'relu' on rank")
def another_activation_on_one_rank():
    """Read the activation function from a file that only rank 0 has."""
    _trained(_mlp(activation="tanh" if case.rank() == 0 else "relu"), mz.AdamW(), case.config())


@_differ("dropout of the model 0.1 on rank 0, 0.0 on rank")
def dropout_on_rank_0_alone():
    """Switch dropout on only for rank 0."""
    model = mz.nn.GPT(8, 1, 2, 8, dropout=0.1 if case.rank() == 0 else 0.0)
    mz.ZeRO3Model(model, case.config(share_node_memory=False))


@_differ("heads of the model 2 on rank 0, 4 on rank")
def another_number_of_heads():
    """Give one rank another number of attention heads; all parameters have the same shapes."""
    mz.ZeRO2Model(mz.nn.GPT(8, 1, 2 if case.rank() == 0 else 4, 8), case.config())


@_differ("learning rate 0.1 on rank 0, 0.2 on rank 1")
def a_learning_rate_of_every_rank():
    """Scale the learning rate by the number of the rank instead of the number of ranks."""
    _trained(_mlp(), mz.AdamW(lr=0.1 * (case.rank() + 1)), case.config())


@_differ("lr.total of the optimizer 100 on rank 0, 200 on rank 1")
def a_schedule_that_differs_later():
    """Give each rank a learning-rate schedule of another length; rates differ only from step 2 on."""
    total = 100 * (case.rank() + 1)
    _trained(_mlp(), mz.SGD(lr=lambda step: 0.1 * (1 + math.cos(math.pi * step / total))), case.config())


@_differ("momentum of the optimizer 0.9 on rank 0, 0.5 on rank")
def constants_of_an_own_optimizer():
    """Write an optimizer, and set its momentum only on rank 0."""

    class Heavy:
        slots = ("m",)
        momentum = 0.5

        def update(self, params: Any, grads: Any, state: Any) -> None:
            state["m"] *= self.momentum
            state["m"] += grads
            params -= 0.1 * state["m"]

    optimizer = Heavy()
    if case.rank() == 0:
        optimizer.momentum = 0.9
    _trained(_mlp(), optimizer, case.config())


@_differ("loss_and_grad.penalty of the model 0.0 on rank 0, 0.01 on rank")
def a_penalty_that_each_rank_reads_for_itself():
    """Take a constant of the loss from an environment variable that differs on rank 0."""
    penalty = 0.0 if case.rank() == 0 else 0.01

    def loss_and_grad(parameters: Any, batch: Any) -> Any:
        loss, gradients, weight = case.squares(parameters, batch)
        gradients["weight"] = gradients["weight"] + penalty * parameters["weight"]
        return loss, gradients, weight

    _trained(mz.FunctionModel(case.parameters(), loss_and_grad), mz.SGD(), case.config())


@_differ("frozen of the model {'bias'} on rank 0, {} on rank")
def frozen_on_one_rank():
    """Freeze the bias only on rank 0."""
    frozen = ["bias"] if case.rank() == 0 else []
    _trained(mz.FunctionModel(case.parameters(), case.squares, frozen=frozen), mz.SGD(), case.config())


@_differ("weight of the start values float32 array of shape (4, 2) [")
def start_values_that_are_drawn_anew():
    """Draw initial parameters without a seed, so that ranks have different ones."""
    start = {**case.parameters(), "weight": np.random.default_rng().normal(size=(4, 2)).astype(np.float32)}
    _trained(mz.FunctionModel(start, case.squares), mz.SGD(), case.config())


@_differ("strategy zero3 on rank 0, zero2 on rank")
def another_strategy_on_one_rank():
    """Choose another strategy on one rank, for example by the memory of its node."""
    (mz.ZeRO3Model if case.rank() == 0 else mz.ZeRO2Model)(_mlp(), case.config(timeout=20.0))


@_differ("pipeline of the parallel layout 1 on rank 0, 2 on rank", ranks=(2,))
def another_layout_on_one_rank():
    """Ask for tensor parallelism on rank 0 and for a pipeline on the others."""
    mine = {"tensor_parallel_size": 2} if case.rank() == 0 else {"pipeline_parallel_size": 2}
    mz.HybridShardedModel(mz.nn.GPT(8, 2, 2, 8), case.config(timeout=20.0), **mine)


@_differ("share_node_memory of ShardingConfig True on rank 0, False on rank")
def private_memory_on_one_rank():
    """Set `share_node_memory=True` only on rank 0."""
    mz.ZeRO3Model(_mlp(), case.config(share_node_memory=case.rank() == 0, timeout=20.0))


@_differ("epochs of the options of optimize 3 on rank 0, 2 on rank")
def another_number_of_epochs():
    """Let rank 0 optimize for one epoch more."""
    config = case.config()
    options = mz.OptimizationOptions(epochs=3 if case.rank() == 0 else 2, batch_size=8)
    optimizer = mz.ZeRO2Optimizer(mz.SGD(), config, options=options)
    optimizer.set_model(mz.ZeRO2Model(_mlp(), config))
    optimizer.optimize((np.ones((32, 4), np.float32), np.ones((32, 2), np.float32)))
