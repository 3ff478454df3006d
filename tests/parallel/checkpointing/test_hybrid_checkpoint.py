"""What any layout saves, of any axes, any other loads: the same arrays, the same next steps."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError
from mpizero.sharding.saved_attributes import recorded_tiles
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import PRIVATE, STRATEGIES, gpt, part, require_saved, sharded, tokens
from tests.parallel.parallel_layouts import Case, Way, of_first, placed

SCALE = mz.DynamicLossScale(initial=2.0**8, interval=3)
STEPS = 2  # the loss scale grows in the first of them
NODES = {"ranks_per_node": 2}
TILES = {"tensor": 2, "context": 2}  # so all layouts have the same bits


class Layout(NamedTuple):
    """So many ranks, the name of a strategy or how a hybrid is spread, and settings of memory."""

    size: int
    way: str | Way
    memory: dict[str, Any] = {}


#: Replicas of every strategy with every kind of memory, then hybrids.
LAYOUTS = {
    "zero2 x 4": Layout(4, "zero2", PRIVATE),
    "zero3 x 3": Layout(3, "zero3", PRIVATE),
    "1": Layout(1, "ddp"),
    "zero3 x 2": Layout(2, "zero3"),
    "zero1 x 3 in nodes": Layout(3, "zero1", NODES),
    "ddp x 4 in nodes": Layout(4, "ddp", NODES),
    "zero1 x 4": Layout(4, "zero1"),
    "zero3 x 4 in groups of nodes": Layout(4, "zero3", {"ranks_per_node": 1, "shard_nodes": 2}),
    "pp 2 x dp 2": Layout(4, Way(2, zero=3), PRIVATE),
    "tp 2 x dp 2": Layout(4, Way(tensor=2, zero=2), PRIVATE),
    "pp 2 x tp 2": Layout(4, Way(2, 2, zero=0)),
    "interleaved pp 2": Layout(2, Way(2, schedule="interleaved")),
    "2 x 2 x 2": Layout(8, Way(2, 2, zero=3, schedule="zero_bubble"), PRIVATE),
    "2 x 2 x 2, tensor fastest": Layout(8, Way(2, 2, more={"order": "data,pipeline,tensor"})),
    "pp 2 x cp 2": Layout(4, Way(2, context=2, zero=3), PRIVATE),
    "tp 2 x cp 2": Layout(4, Way(tensor=2, context=2, zero=2)),
}


def place(comm: Any, layout: Layout, dropout: float = 0.1) -> Any:
    """A model with AdamW, a loss scale and clipping, placed as a layout says."""
    settings = {"clip": 0.5, "micro_batch": 2, "tiles": TILES, **layout.memory}
    network, optimizer = gpt(dropout=dropout), mz.AdamW(lr=1e-2)
    if isinstance(layout.way, str):
        model = sharded(layout.way, comm, network, optimizer, **settings)
    else:
        model = placed(Case(lambda: network, lambda: optimizer), comm, layout.way, **settings)
    model._engine.bind(optimizer, SCALE)
    return model


def train(model: Any, steps: int) -> list[tuple[str, float]]:
    """Return the hash and the loss of each step."""
    told = []
    for step in range(steps):
        loss = model.train(*part(model.batch_group, *tokens(4, step)))
        told.append((model.parameters_sha256(), loss))
    return told


@cache
def contents(image: bytes) -> dict[str, bytes]:
    """All arrays of a checkpoint, whole, and what it says besides them and its layout."""
    with checkpoint.from_bytes(image) as reader:
        saved = reader.attributes["mpizero"]
        told = {name: repr(value) for name, value in saved.items() if name not in ("layout", "tiles")}
        told["tiles"] = repr(recorded_tiles(saved))
        return {**{path: reader.read_whole(path).tobytes() for path in reader.arrays}, "told": repr(told).encode()}


@cache
def saved() -> bytes:
    """What one process saves after two steps."""
    with place(None, LAYOUTS["1"]) as model:
        train(model, 2)
        return bytes(model.serialize())


@cache
def uninterrupted(steps: int) -> list[tuple[str, float]]:
    """The hashes and losses of one process after what it has saved."""
    with place(None, LAYOUTS["1"]) as model:
        model.deserialize(saved())
        return train(model, steps)


def goes_on(comm: Any, name: str, image: bytes, expected: list[tuple[str, float]]) -> bytes:
    """Load; what is saved again has the same arrays, and the next steps are those of one process. Collective."""
    with place(comm, LAYOUTS[name]) as model:
        model.deserialize(image)
        again = bytes(model.serialize())
        assert len(set(comm.allgather_object(sha256(again).digest()))) == 1, "the same bytes on every rank"
        parallel_assert(comm, comm.rank != 0 or contents(again) == contents(image), f"{name}: arrays")
        parallel_assert(comm, train(model, len(expected)) == expected, f"{name}: steps")
        return again


@pytest.mark.slow
def test_a_state_in_the_middle_of_a_run_is_all_that_the_run_needs() -> None:
    with place(None, LAYOUTS["1"]) as model:
        train(model, 2)
        assert train(model, STEPS) == uninterrupted(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [False, True])
def test_every_layout_loads_what_another_has_saved_and_goes_on_with_the_same_bits(hybrid: bool) -> None:
    """Each loads the file of the one before it in the table; ``scripts/exactness_checkpoints.py`` has all pairs."""
    image = saved()
    for name, layout in LAYOUTS.items():
        if hybrid is isinstance(layout.way, Way):
            arguments = name, image, uninterrupted(STEPS)
            image = run_in_threads(layout.size, lambda comm, given=arguments: goes_on(comm, *given))[0]


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_of_mpi_load_what_others_have_saved(world: Any) -> None:
    """One layout of this size, or two, loads the file of one process, and then that of the other."""
    image, expected = of_first(world, lambda: (saved(), uninterrupted(STEPS)))
    for name in [name for name, layout in LAYOUTS.items() if layout.size == world.size][-2:]:
        image = goes_on(world, name, image, expected)


def kept_in_files(world: Any, layout: Layout, folder: Path) -> None:
    """Go on from whatever was saved: folders and files of model and optimizer, dictionaries, vectors and bytes."""
    with place(world, layout, dropout=0.0) as model:  # an optimizer's file does not say which masks come next
        optimizer = model.optimizer
        train(model, 1)
        model.save_model(folder / "model")
        optimizer.save(folder / "optimizer")
        named, state, image = model.named_parameters(), optimizer.state_dict(), optimizer.serialize()
        require_saved(folder / "model" / "state.h5", named, state)
        after = train(model, 2)
        model.load_model(folder / "model", strict_layout=True)
        assert train(model, 2) == after
        vector = np.concatenate([values.reshape(-1) for values in named.values()])
        for load, values in (
            (lambda: optimizer.load(folder / "optimizer"), lambda: model.load_named(named)),
            (lambda: optimizer.load_state_dict(state), lambda: model.set_parameters(vector)),
            (lambda: optimizer.deserialize(image), lambda: model.load_named(named)),
        ):
            optimizer.reset()
            assert optimizer.step_count == 0
            values()
            load()
            assert optimizer.step_count == 1
            assert train(model, 1) == after[:1]


@pytest.mark.mpi
def test_folders_and_files_hold_the_whole_model_and_its_strict_layout(world: Any, tmp_path_factory: Any) -> None:
    folder = Path(world.broadcast_object(str(tmp_path_factory.mktemp("saved")) if world.rank == 0 else None))
    replicas = Layout(world.size, STRATEGIES[world.size % 4], (PRIVATE, {})[world.size % 2])
    kept_in_files(world, replicas, folder / "replicas")
    if world.size > 1:
        axis, way = ("tensor", Way(tensor=2, zero=2)) if world.size % 2 == 0 else ("pipeline", Way(world.size, zero=2))
        kept_in_files(world, Layout(world.size, way), folder / "hybrid")
        with place(world, replicas) as model:
            with pytest.raises(CheckpointError, match=rf"ZeRO-2 over {world.size} ranks on . nodes? \({axis} ."):
                model.load_model(folder / "hybrid" / "model", strict_layout=True)
            model.load_model(folder / "hybrid" / "model")
            assert model.optimizer.step_count == 1
    world.barrier()


@pytest.mark.slow
def test_copies_of_a_split_model_are_models_of_their_own() -> None:
    def body(comm: Any) -> None:
        with place(comm, LAYOUTS["2 x 2 x 2"]) as model:
            train(model, 1)
            vector = model.get_parameters()
            with model.clone() as clone, model.deep_copy() as deep, model.with_parameters(-vector) as negative:
                assert clone.parameters_sha256() == deep.parameters_sha256() == model.parameters_sha256()
                assert np.array_equal(negative.get_parameters(), -vector)
                assert negative.parameter_count == vector.size == clone._engine.global_view.layout.size
                x, y = part(model.batch_group, *tokens(4, 9))
                assert deep.train(x, y) == model.train(x, y)
                assert deep.parameters_sha256() == model.parameters_sha256() != clone.parameters_sha256()

    run_in_threads(8, body)
