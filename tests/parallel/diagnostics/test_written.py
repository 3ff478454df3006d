"""A layer that leaves a gradient unwritten, or adds to it, is named in the first step; no step is made with it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import LayoutError, RemoteError
from mpizero.guard import guard
from mpizero.nn.layer import Layer
from mpizero.sharding.integrity import WriteCheck
from mpizero.testing import run_in_threads
from mpizero.types import ParameterSpec
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, gpt, mlp, part, points, sharded, tokens
from tests.parallel.parallel_layouts import Blocks, Case, Chain, Way, placed
from tests.parallel.writes import (
    add,
    bind_a_wrong_name,
    bind_by_update,
    forget,
    overwrite,
    rebind,
    write_in_two_parts,
    write_nan,
    write_some,
)


@dataclass(frozen=True)
class Scale(Layer):
    """A user's layer: y = gain * x, whose gradient ``write`` puts into ``grads``, of micro-batch ``at`` or of all."""

    features: int
    write: Any
    at: int | None = None

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        return (ParameterSpec("gain", (self.features,), mz.types.Init("ones")),)

    def forward(self, params: Any, x: Any, run: Any = None) -> Any:
        return x * params["gain"], (x, run.first_sample)

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy * params["gain"], dy

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        write = self.write if self.at in (None, cache[1]) else overwrite
        write(grads, "gain", (cache[0] * pending).sum(0))


UNWRITTEN = r"block '1', Scale: the backward pass has not written {}the gradient of 'gain'.*backward_weights at test_"
WRONG: dict[Any, str] = {
    rebind: r"grads\['gain'\] = ... binds a name to another array.*grads\['gain'\]\[...\] = value",
    bind_by_update: r"grads\['gain'\] = ... binds a name to another array",
    bind_a_wrong_name: r"this layer has no parameter 'GAIN' \(did you mean 'gain'\?\)",
    forget: UNWRITTEN.format(""),
    add: UNWRITTEN.format(""),
    write_some: UNWRITTEN.format("4 of the 6 elements of "),
}


def model_of(*layers: Any, dtype: str = "float32") -> Chain:
    layers = mz.nn.Linear(6, 6), *layers, mz.nn.Linear(6, 3)
    return Chain({str(i): layer for i, layer in enumerate(layers)}, mz.nn.CrossEntropy(), np.dtype(dtype))


@pytest.mark.parametrize("write", WRONG)
def test_a_layer_that_does_not_overwrite_its_gradient_is_named_and_no_step_is_made(write: Any) -> None:
    x, y = points(8)

    def run(comm: Any) -> None:
        for number, strategy in enumerate(STRATEGIES, list(WRONG).index(write)):
            memory = MEMORIES[number % 3]
            with sharded(strategy, comm, model_of(Scale(6, write)), micro_batch=1, **memory) as model:
                before = model.parameters_sha256()
                for _ in range(2):  # nor by the next step
                    with pytest.raises((LayoutError, RemoteError), match=WRONG[write]):
                        model.train(*part(comm, x, y))
                assert model.parameters_sha256() == before

    run_in_threads(2, run)


@pytest.mark.parametrize("write", [forget, add, write_some])
def test_what_a_block_has_not_written_is_found_in_every_grain_and_block(write: Any) -> None:
    """Grains 1 and 3 have no rows; the block that is written last is smaller than the others."""
    plain = mlp(hidden=(3, 7))
    x, y = points(4)

    def run(comm: Any, block: str, at: int, memory: dict[str, Any]) -> None:
        wrong = Scale({"hidden.0": 3, "hidden.1": 7, "output": 3}[block], write, at)
        model = Blocks(plain, {block: lambda layer: mz.nn.Sequential([layer, wrong])})
        with sharded("ddp", comm, model, micro_batch=1, **memory) as placed:
            before = placed.parameters_sha256()
            with pytest.raises((LayoutError, RemoteError), match=f"block '{block}', Scale: .* has not written"):
                placed.train(*part(comm, x, y))
            assert placed.parameters_sha256() == before

    for number, (block, at) in enumerate(product(plain.blocks, range(4))):
        if (number + list(WRONG).index(write)) % 2:  # the others are found of another write
            run(None, block, at, {})
    for block, memory in product(plain.blocks, (PRIVATE, {"ranks_per_node": 1, "bucket_mb": 256 / 2**20})):
        run_in_threads(2, lambda comm, b=block, m=memory: run(comm, b, 3, m))


@pytest.mark.parametrize(
    ("dtype", "wrap"),
    [("float64", lambda layer: layer), ("float32", mz.nn.Checkpointed), ("float64", lambda x: mz.nn.Sequential([x]))],
)
def test_the_innermost_layer_is_named(dtype: str, wrap: Any) -> None:
    model = sharded("zero1", None, model_of(wrap(Scale(6, forget)), dtype=dtype))
    with model, pytest.raises(LayoutError, match="block '1', Scale: .* the gradient of 'gain'"):
        model.train(*points(4))


def test_a_frozen_layer_need_not_write() -> None:
    for strategy in STRATEGIES:
        with sharded(strategy, None, model_of(mz.nn.Frozen(Scale(6, forget)))) as model:
            model.train(*points(4))


def test_views_may_be_written_in_parts_and_added_to_once_they_are_written() -> None:
    hashes = []
    for write in (write_in_two_parts, overwrite):
        with sharded("zero1", None, model_of(Scale(6, write))) as model:
            model.train(*points(4))
            hashes.append(model.parameters_sha256())
    assert hashes[0] == hashes[1]


def test_a_nan_that_was_computed_is_a_bad_step() -> None:
    with sharded("zero1", None, model_of(Scale(6, write_nan))) as model:
        model.train(*points(4))
        assert "the gradient of '1.gain' is not finite" in model.last_step.skipped


def test_only_the_first_step_is_looked_at_unless_every_step_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[int] = []
    monkeypatch.setattr(
        WriteCheck,
        "write_sentinels",
        lambda self, views, real=WriteCheck.write_sentinels: marked.append(real(self, views)),
    )
    # Two micro-batches; the three blocks of the second one are written to the same memory, which each leaves marked.
    for debug, expected in ((), [2 + 3, 0, 0]), (("gradients",), [5, 5, 5]):
        monkeypatch.setattr(guard.current(), "debug", frozenset(debug))
        with sharded("ddp", None, model_of(Scale(6, write_in_two_parts)), micro_batch=2) as model:
            found = []
            for _ in range(3):
                marked.clear()
                model.train(*points(4))
                found.append(len(marked))
        assert found == expected


@pytest.mark.parametrize(
    "way",
    [Way(2), Way(2, zero=3, schedule="zero_bubble"), Way(tensor=2, zero=2), Way(context=2, zero=3), Way(2, 2)],
    ids=str,
)
def test_our_own_layers_write_all_of_their_gradients_in_every_step(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused rows of tables, tied tables, attention, norms, and layers of which a rank has a part."""
    monkeypatch.setattr(guard.current(), "debug", frozenset({"gradients"}))

    def run(comm: Any) -> None:
        with placed(Case(gpt), comm, way, micro_batch=1) as model:
            for _ in range(2):
                model.train(*part(model.batch_group, *tokens(8)))
                assert model.last_step.skipped is None

    run_in_threads(4, run)


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_in_a_pipeline_it_is_named_on_all_ranks(schedule: str, at: str) -> None:
    bad, good = Scale(6, forget), mz.nn.Linear(6, 6)  # the stages are blocks 0 and 1, 2 and 3
    wrong = model_of(*((bad, good) if at == "first" else (good, bad)))

    def run(comm: Any) -> str:
        with placed(Case(lambda: wrong), comm, Way(2, schedule=schedule), micro_batch=1) as model:
            with pytest.raises((LayoutError, RemoteError), match="Scale: the backward pass has not written") as caught:
                model.train(*part(model.batch_group, *points(4)))
            return type(caught.value).__name__

    assert sorted(run_in_threads(2, run)) == ["LayoutError", "RemoteError"]
