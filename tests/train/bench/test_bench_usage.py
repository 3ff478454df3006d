"""What ``mpizero bench`` cannot measure is refused by the name of the option, before anything is measured."""

from __future__ import annotations

import pytest

from mpizero.errors import ExitStatus


@pytest.mark.parametrize(
    ("ranks", "words", "said"),
    [
        (1, "checkpoint --bytes 1", "--bytes 1.0: must be from"),
        (1, "checkpoint --bytes nan", "--bytes nan"),
        (1, "checkpoint --repeat 0", "--repeat 0"),
        (1, "checkpoint --folder nowhere", "--folder nowhere"),
        (1, "checkpoint --backend mpio", 'backend="direct"'),
        (1, "machine --elements 0", "--elements 0: must be a whole number >= 2"),
        (1, "machine --elements nan", "--elements nan: must be a number"),
        (1, "machine --repeat 0", "--repeat 0"),
        (1, "machine --folder nowhere", "--folder: nowhere is no folder"),
        (1, "machine --output nowhere/machine.json", "--output: nowhere is no folder"),
        (1, "machine --heads 3", "--heads 3: must divide --dim 256"),
        (1, "machine --dim 0", "--dim 0"),
        (1, "machine --set model.dim=3", "needs a CONFIG.toml"),
        (1, "machine tiny.toml --dim 32", "--dim 32: tiny.toml gives the shapes"),
        (2, "memory --pipeline 3", "--pipeline 3: does not fit this job"),
        (1, "memory --data 2", "--data 2: does not fit this job"),
        (2, "memory --pipeline 2 --micro-batches 0", "--micro-batches 0"),
        (2, "memory --pipeline 2 --schedule 2f2b", '--schedule "2f2b": must be one of'),
        (2, "memory --pipeline 2 --schedule interleaved", "--virtual-stages 1: does not fit --schedule"),
        (2, "memory --pipeline 2 --strategy zero4", "--strategies zero4: zero4 is none of"),
        (1, "memory --parameters 0", "--parameters 0.0"),
        (1, "memory --strategy ,", "must name at least one of"),
        (1, "memory --steps 0", "--steps 0"),
        (2, "step tiny.toml --steps 0", "--steps 0"),
        (1, "step tiny.toml --warm-up -1", "--warm-up -1"),
        (1, "step tiny.toml --trace none/t.json", "--trace none/t.json"),
    ],
)
def test_what_cannot_be_measured_is_refused(on_threads, ranks, words, said):
    outcome = on_threads(ranks, "bench", *words.split())
    assert outcome.status == ExitStatus.CONFIG
    assert len(outcome.told) == 1, outcome.err
    assert said in outcome.told[0]
