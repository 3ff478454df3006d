"""What any layout saves, of any axes, any other loads: the same arrays, the same next steps."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError
from mpizero.sharding.saved_attributes import recorded_tiles
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import PRIVATE, gpt, part, tokens
from tests.parallel.parallel_layouts import of_first

SCALE = mz.DynamicLossScale(initial=2.0**8, interval=3)
STEPS = 2  # the loss scale grows in the first of them
TILES = {"tensor": 2, "context": 2}  # so all layouts have the same bits


class Layout(NamedTuple):
    """A strategy's name, or the sizes and the ZeRO stage of a hybrid."""

    size: int
    strategy: str = ""
    pipeline: int = 1
    tensor: int = 1
    zero: int = 1
    schedule: str = "1f1b"
    context: int = 1
    order: str = "pipeline,tensor,data"
    memory: dict[str, Any] = {}


LAYOUTS = {
    "1": Layout(1, "ddp"),
    "dp 2": Layout(2, "ddp"),
    "dp 3": Layout(3, "zero1"),
    "dp 4": Layout(4, "zero2"),
    "zero3 x 4": Layout(4, "zero3", memory=PRIVATE),
    "tp 2": Layout(2, tensor=2),
    "pp 2": Layout(2, pipeline=2),
    "pp 2 x dp 2": Layout(4, pipeline=2, zero=3, memory=PRIVATE),
    "tp 2 x dp 2": Layout(4, tensor=2, zero=2, memory=PRIVATE),
    "pp 2 x tp 2": Layout(4, pipeline=2, tensor=2, zero=0),
    "interleaved pp 2": Layout(2, pipeline=2, schedule="interleaved"),
    "2 x 2 x 2": Layout(8, pipeline=2, tensor=2, zero=3, schedule="zero_bubble", memory=PRIVATE),
    "2 x 2 x 2, tensor fastest": Layout(8, pipeline=2, tensor=2, zero=1, order="data,pipeline,tensor"),
    "cp 2": Layout(2, context=2, zero=0),
    "pp 2 x cp 2": Layout(4, pipeline=2, context=2, zero=3, memory=PRIVATE),
    "tp 2 x cp 2": Layout(4, tensor=2, context=2, zero=2),
}


class Placed:
    """A model with AdamW, a loss scale and clipping, placed as a layout says."""

    def __init__(self, comm: Any, layout: Layout, dropout: float = 0.1) -> None:
        settings = {"clip": 0.5, "micro_batch": 2, "minimum_parameter_group_size": 1, "tiles": TILES}
        settings |= layout.memory
        self.config = mz.ShardingConfig(comm="self" if comm is None else comm, **settings)
        if layout.strategy:
            self.model, self.optimizer = mz.distribute(
                gpt(dropout=dropout), mz.AdamW(lr=1e-2), strategy=layout.strategy, config=self.config
            )
        else:
            virtual = 2 if layout.schedule == "interleaved" else 1
            self.model = mz.HybridShardedModel(
                gpt(dropout=dropout),
                self.config,
                layout.pipeline,
                layout.tensor,
                zero_stage=layout.zero,
                schedule=layout.schedule,
                virtual_stages=virtual,
                context_parallel_size=layout.context,
                order=layout.order,
            )
            self.optimizer = mz.HybridShardedOptimizer(mz.AdamW(lr=1e-2), self.config)
            self.optimizer.set_model(self.model)
        self.model.engine.bind(self.optimizer.wrapped_optimizer, SCALE)

    def train(self, steps: int) -> list[tuple[str, float]]:
        """Return the hash and the loss of each step."""
        told = []
        for step in range(steps):
            loss = self.model.train(*part(self.model.batch_group, *tokens(4, step)))
            told.append((self.model.parameters_sha256(), loss))
        return told

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.model.close()
            self.config.close()


@cache
def contents(image: bytes) -> dict[str, bytes]:
    """All arrays of a checkpoint, whole, and what it says besides them and its layout."""
    with checkpoint.from_bytes(image) as reader:
        saved = reader.attributes["mpizero"]
        told = {name: repr(value) for name, value in saved.items() if name not in ("layout", "tiles")}
        told["tiles"] = repr(recorded_tiles(saved))
        return {**{path: reader.read_whole(path).tobytes() for path in reader.arrays}, "told": repr(told).encode()}


def save(comm: Any, name: str) -> bytes:
    with Placed(comm, LAYOUTS[name]) as placed:
        placed.train(2)
        return placed.model.serialize()


@cache
def saved(name: str) -> bytes:
    images = run_in_threads(LAYOUTS[name].size, lambda comm: save(comm, name))
    assert len(set(images)) == 1, "the same bytes on every rank"
    return images[0]


@cache
def uninterrupted(steps: int) -> list[tuple[str, float]]:
    """The hashes and losses of one process after what it has saved."""
    with Placed(None, LAYOUTS["1"]) as placed:
        placed.model.deserialize(saved("1"))
        return placed.train(steps)


def loads(comm: Any, name: str, images: dict[str, bytes], expected: list[tuple[str, float]]) -> None:
    """Load each of the images; the arrays are those that were saved, and the next steps those of one process.

    After the first image the layout goes on for all steps that are expected; after the others, which leave the same
    arrays, for one.
    """
    with Placed(comm, LAYOUTS[name]) as placed:
        for number, (writer, image) in enumerate(images.items()):
            placed.model.deserialize(image)
            again = placed.model.serialize()
            assert len(set(comm.allgather_object(sha256(again).digest()))) == 1, "the same bytes on every rank"
            same = comm.rank != number % comm.size or contents(again) == contents(image)
            parallel_assert(comm, same, f"{writer} -> {name}: arrays")
            steps = len(expected) if number == 0 else 1
            parallel_assert(comm, placed.train(steps) == expected[:steps], f"{writer} -> {name}: steps")


def test_all_layouts_save_the_same_arrays() -> None:
    expected = contents(saved("1"))
    for name in LAYOUTS:
        assert contents(saved(name)) == expected, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_what_others_have_saved_and_goes_on_with_the_same_bits(name: str) -> None:
    """A fifth of all pairs; ``scripts/exactness_checkpoints.py`` has them all."""
    number = list(LAYOUTS).index(name)
    images = {writer: saved(writer) for i, writer in enumerate(LAYOUTS) if writer != name and (i + number) % 5 == 0}
    expected = uninterrupted(STEPS)
    run_in_threads(LAYOUTS[name].size, lambda comm: loads(comm, name, images, expected))


@pytest.mark.mpi
def test_ranks_of_mpi_load_what_other_layouts_have_saved(world: Any) -> None:
    """Every layout of this size loads files of some other ones, written by fewer of the ranks or by all."""
    fitting = [name for name, layout in LAYOUTS.items() if layout.size <= world.size]
    mine = [name for name in fitting if LAYOUTS[name].size == world.size]
    chosen = {}
    for number, name in enumerate(mine):
        writers = [writer for writer in fitting if writer != name]
        every = 7 if len(writers) > 7 else 2
        chosen[name] = writers[number % every :: every] if world.size <= 4 else [writers[7 + 4 * number]]
    images = {}
    for name in sorted({writer for writers in chosen.values() for writer in writers}):
        with world.split(int(world.rank >= LAYOUTS[name].size)) as group:
            image = save(group, name) if world.rank < LAYOUTS[name].size else None
            images[name] = world.broadcast_object(image)
    expected = of_first(world, lambda: uninterrupted(STEPS))
    for name, writers in chosen.items():
        loads(world, name, {writer: images[writer] for writer in writers}, expected)


@pytest.mark.mpi(min_size=2)
def test_a_folder_of_a_hybrid_holds_the_whole_model_and_its_strict_layout(world: Any, tmp_path_factory: Any) -> None:
    folder = Path(world.broadcast_object(str(tmp_path_factory.mktemp("saved")) if world.rank == 0 else None))
    axis = "tensor" if world.size % 2 == 0 else "pipeline"
    layout = Layout(world.size, **{axis: 2 if world.size % 2 == 0 else world.size}, zero=2)
    with Placed(world, layout, dropout=0.0) as placed:  # an optimizer's file does not say which masks come next
        model, optimizer = placed.model, placed.optimizer
        placed.train(1)
        model.save_model(folder / "model")
        optimizer.save(folder / "optimizer")
        named, state = model.named_parameters(), optimizer.state_dict()
        with h5py.File(folder / "model" / "state.h5") as file:
            for name, values in named.items():
                np.testing.assert_array_equal(file["parameters"][name], values)
            for slot, arrays in state["state"].items():
                for name, values in arrays.items():
                    np.testing.assert_array_equal(file["optimizer"][slot][name], values)
        after = placed.train(2)
        model.load_model(folder / "model", strict_layout=True)
        assert placed.train(2) == after
        model.load_named(named)
        optimizer.load(folder / "optimizer")
        assert placed.train(1) == after[:1]
        model.set_parameters(np.concatenate([values.reshape(-1) for values in named.values()]))
        optimizer.load_state_dict(state)
        assert placed.train(1) == after[:1]
        model.export_npz(folder / "model.npz")
        before = model.parameters_sha256()
        placed.train(1)
        model.import_npz(folder / "model.npz")
        assert model.parameters_sha256() == before
    with Placed(world, Layout(world.size, "zero2")) as placed:
        with pytest.raises(CheckpointError, match=rf"ZeRO-2 over {world.size} ranks on . nodes? \({axis} ."):
            placed.model.load_model(folder / "model", strict_layout=True)
        placed.model.load_model(folder / "model")
        assert placed.optimizer.step_count == 1
    world.barrier()


@pytest.mark.parametrize("name", ["tp 2", "pp 2 x dp 2", "2 x 2 x 2"])
def test_copies_of_a_split_model_are_models_of_their_own(name: str) -> None:
    def body(comm: Any) -> None:
        with Placed(comm, LAYOUTS[name]) as placed:
            placed.train(1)
            model, vector = placed.model, placed.model.get_parameters()
            with model.clone() as clone, model.deep_copy() as deep, model.with_parameters(-vector) as negative:
                assert clone.parameters_sha256() == deep.parameters_sha256() == model.parameters_sha256()
                assert np.array_equal(negative.get_parameters(), -vector)
                assert negative.parameter_count == vector.size == clone.layout.size
                x, y = part(model.batch_group, *tokens(4, 9))
                assert deep.train(x, y) == model.train(x, y)
                assert deep.parameters_sha256() == model.parameters_sha256() != clone.parameters_sha256()

    run_in_threads(LAYOUTS[name].size, body)
