"""A model of blocks may bring its start values as arrays, on every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import LayoutError, MpizeroError
from mpizero.testing import run_in_threads

SHAPE = {"dim": 8, "layers": 2, "heads": 2, "sequence": 4}


class Given:
    """A GPT that begins with values of its own but for its norms, which keep those of their layer."""

    def __init__(self) -> None:
        whole = mz.nn.GPT(**SHAPE, seed=3)
        self.blocks, self.loss, self.dtype, self.seed = whole.blocks, whole.loss, whole.dtype, whole.seed
        rng = np.random.default_rng(1)
        start = mz.nn.initial_parameters(whole)
        self.start_values = {n: rng.normal(size=a.shape).astype(a.dtype) for n, a in start.items() if "norm" not in n}
        self.expected = start | self.start_values


@pytest.mark.parametrize(("pipeline", "tensor", "stage"), [(1, 1, 0), (1, 1, 3), (2, 1, 1), (1, 2, 1)])
def test_arrays_are_the_start_values_whatever_the_layout(pipeline: int, tensor: int, stage: int) -> None:
    def body(comm: Any) -> None:
        sizes = {"pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor, "zero_stage": stage}
        given = Given()
        with (
            mz.ShardingConfig(comm=comm, ranks_per_node=1) as config,
            mz.HybridShardedModel(given, config, **sizes) as model,
        ):
            for name, array in model.named_parameters().items():
                assert array.tobytes() == given.expected[name].tobytes(), name

    run_in_threads(2, body)


def test_start_values_that_differ_between_ranks_are_told() -> None:
    def body(comm: Any) -> None:
        given = Given()
        given.start_values["embedding.token.weight"] = given.start_values["embedding.token.weight"] + comm.rank
        mz.ZeRO1Model(given, mz.ShardingConfig(comm=comm))

    with pytest.raises(MpizeroError, match=r"of the start values .*on rank 1"):
        run_in_threads(2, body)


def test_start_values_of_another_shape_are_refused_with_the_name() -> None:
    wrong = Given()
    name = next(iter(wrong.expected))
    wrong.start_values[name] = np.zeros((3, 8), np.float32)
    with pytest.raises(LayoutError, match=rf"{name} has shape .* its start values have shape \(3, 8\)"):
        mz.ZeRO1Model(wrong, mz.ShardingConfig(comm="self"))
