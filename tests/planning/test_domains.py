"""What is planned for ranks that share the space of fields is what they then hold and send, to the byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.sharding.config import placement
from mpizero.sharding.partition import ParallelLayout
from mpizero.testing import run_in_threads
from mpizero.tools.plan import Sent, TrainingPlan
from mpizero.tools.plan.memory import nbytes_outside
from tests.planning.test_costs import COUNTED, TAGS

PURPOSE = {**TAGS, "slabs": "control", "point to point": "activations"}
SPACE = (13, 11)
X = np.random.default_rng(0).normal(size=(8, *SPACE, 2)).astype("f4")
Y = np.roll(X, 1, axis=1)[..., :1]


def network(**changes: Any) -> Any:
    if "modes" in changes:
        return mz.nn.FNO(2, 1, 2, width=4, layers=2, **changes)
    return mz.nn.UNet(2, 1, 2, width=4, levels=2, groups=2, **changes)


class Own:
    """A model whose first layer is made of halos and sums over space."""

    dtype, seed = np.dtype(np.float32), 0
    loss = mz.nn.FieldLoss(mz.nn.MeanSquaredError())

    def __init__(self, layer: Any) -> None:
        self.blocks = {"own": layer, "last": mz.nn.Conv(2, 1, (3, 3))}


@pytest.mark.parametrize("loss", [mz.nn.MeanSquaredError(), mz.nn.RelativeL2Loss(), mz.nn.SpectralLoss(2)])
def test_what_a_loss_of_fields_keeps_until_its_backward_pass_is_counted(loss: Any) -> None:
    *_, cache = mz.nn.FieldLoss(loss).forward(X[..., :1] * 1, Y)
    assert nbytes_outside(cache, frozenset()) >= Y.nbytes


def measured(comm: Any, model: Any, strategy: str, layout: dict[str, Any], settings: dict[str, Any], batch: int) -> Any:
    """Train two steps; return what this rank sent in the second, by purpose, and what it holds."""
    nodes = {name: settings[name] for name in ("share_node_memory", "ranks_per_node") if name in settings}
    config = mz.Config(micro_batch=1, **{name: value for name, value in settings.items() if name not in nodes})
    with (
        mz.Mesh(comm, **layout, **nodes) as mesh,
        mz.distribute(model, mz.AdamW(1e-3), strategy, mesh=mesh, config=config) as sharded,
    ):
        sharded.reserve(batch)
        engine, before = sharded._engine, (Counter[str](), Counter[str]())
        for x, y in mz.data.batches(mz.data.ArraySource(X, Y), sharded, batch, steps=2):
            sharded.train(x, y)
            nbytes, messages = Counter[str](), Counter[str]()
            for group in (engine.grid.world, *engine.grid.communicators):
                for tag, sent in group.counters.bytes_by_tag.items():
                    purpose = PURPOSE.get(tag, "context")
                    nbytes[purpose] += sent
                    messages[purpose] += group.counters.messages_by_tag[tag]
            step = {name: Sent(nbytes[name] - before[0][name], messages[name] - before[1][name]) for name in nbytes}
            before = nbytes, messages
        group = engine.grid.context_group
        held = {kind: size for kind, size in engine.memory.kinds().items() if size}
        return (
            {name: sent for name, sent in step.items() if sent.bytes},
            held,
            group.private_bytes + (group.shared_bytes // group.size),
        )


@pytest.mark.parametrize(
    ("ranks", "strategy", "layout", "settings", "changes"),
    [
        (2, "zero2", {"domain": (2, 1)}, {}, {}),
        (4, "zero1", {"domain": (2, 2)}, {"share_node_memory": False}, {"dropout": 0.1}),
        (4, "zero3", {"domain": (1, 2)}, {"ranks_per_node": 2}, {"activation_checkpointing": True}),
        (4, "zero1", {"domain": (2, 1), "pipeline": 2}, {}, {"padding": ("reflect", "zeros"), "refine": "linear"}),
        (3, "ddp", {"domain": (3, 1)}, {"clip": 1.0}, {}),
        (4, "zero2", {"domain": (2, 2)}, {"share_node_memory": False}, {"modes": 5}),
        (4, "zero3", {"domain": (2, 2)}, {"ranks_per_node": 2}, {"modes": 4, "loss": mz.nn.FieldLoss(mz.nn.H1Loss())}),
        (2, "zero2", {"domain": (1, 2)}, {}, None),
    ],
)
def test_ranks_of_a_domain_hold_and_send_what_was_planned(
    ranks: int,
    strategy: str,
    layout: dict[str, Any],
    settings: dict[str, Any],
    changes: dict[str, Any] | None,
    example: Any,
) -> None:
    model, batch = Own(example("diffusion_layer").Diffusion(2)) if changes is None else network(**changes), 3
    plan = TrainingPlan(
        model=model,
        optimizer=mz.AdamW(1e-3),
        config=mz.ShardingConfig(micro_batch=1, **settings),
        row=placement(strategy),
        parallel_layout=ParallelLayout(**layout),
        ranks=ranks,
        global_batch=batch,
        x=X[:1],
        y=Y[:1],
    )
    found = run_in_threads(ranks, lambda comm: measured(comm, model, strategy, layout, settings, batch))
    for one, (sent, held, buffers) in zip(plan.by_rank, found, strict=True):
        assert sent == dict(one.sent)
        assert held == {part: one.memory[part].per_rank for part in COUNTED if part in one.memory}
        assert buffers == (one.memory["group buffers"].per_rank if "group buffers" in one.memory else 0)
