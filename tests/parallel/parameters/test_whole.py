"""Slices, copies and shards of a model are one model: its vector, its hash, its checkpoint are those of one process.

Stages and slices are made by hand here, from the parameter tables of a model; nothing is computed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.comm import ProcessGrid
from mpizero.errors import CheckpointError, LayoutError, RemoteError
from mpizero.layout import Axes, Coordinates, GrainRule, Partition
from mpizero.layout.flat import FlatLayout
from mpizero.layout.tensor_parts import part_shape
from mpizero.nn import initial_parameters
from mpizero.nn.arrays import initial_values
from mpizero.sharding import saved_attributes, state_dict
from mpizero.sharding.config import placement
from mpizero.sharding.full_params import GlobalView, check_cover, given_parameters
from mpizero.sharding.grad_reduce import GradientExchange
from mpizero.sharding.integrity import Integrity
from mpizero.sharding.params import IntegerState, Memory, ParameterStore
from mpizero.sharding.partition import ParallelLayout, blocks_of
from mpizero.sharding.update import Updater, UpdateScope
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.types import Array, Init, ParameterSpec, Part

Blocks = Mapping[str, Sequence[ParameterSpec]]

#: The axis along which tensor ranks hold slices of a parameter, by the end of its name, and the blocks of that axis
#: that are split one by one; a projection's bias and the norms are held whole by all.
SPLIT = {
    "token.weight": (0, 1),
    "head.projection.weight": (0, 1),
    "qkv.weight": (1, 3),
    "qkv.bias": (0, 3),
    "attention.projection.weight": (0, 1),
    "expand.weight": (1, 1),
    "expand.bias": (0, 1),
    "feed_forward.projection.weight": (0, 1),
}


@dataclass(frozen=True)
class Spread:
    """A layout: its axes, its strategy, how many chunks of blocks each stage has, and how many tiles each rank."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    context: int = 1
    strategy: str = "zero1"
    chunks: int = 1
    private: bool = False
    minimum: int = 1
    tiles: int = 1

    @property
    def axes(self) -> Axes:
        return Axes(self.pipeline, self.tensor, self.data, self.context)

    @property
    def size(self) -> int:
        return self.axes.size


SPREADS = [
    Spread(),
    Spread(data=2, strategy="ddp"),
    Spread(data=4, strategy="zero3", private=True),
    Spread(tensor=2),
    Spread(pipeline=2),
    Spread(pipeline=2, chunks=2, strategy="ddp"),
    Spread(tensor=3, strategy="ddp", private=True),
    Spread(context=2),
    Spread(pipeline=2, data=2, strategy="zero3", private=True, minimum=700),
    Spread(tensor=2, data=2, strategy="zero2", private=True),
    Spread(pipeline=2, tensor=2, strategy="ddp"),
    Spread(tensor=2, context=2, strategy="zero3", private=True),
    Spread(pipeline=2, tensor=2, data=2, strategy="zero3", private=True),
    Spread(pipeline=2, tensor=2, context=2, strategy="zero1"),
    Spread(tiles=4),
    Spread(pipeline=2, strategy="zero3", private=True, tiles=2),
    Spread(tensor=2, data=2, strategy="zero3", private=True, tiles=2),
]


def gpt(dtype: str = "float32", **changes: Any) -> mz.nn.GPT:
    settings: dict[str, Any] = {"dim": 12, "layers": 3, "heads": 3, "sequence": 5, "vocabulary": 31, "seed": 7}
    return mz.nn.GPT(dtype=dtype, **{**settings, **changes})


def sliced(spec: ParameterSpec, name: str, here: Coordinates, spread: Spread) -> ParameterSpec:
    """What a tensor rank holds of a parameter."""
    rule = next((rule for end, rule in SPLIT.items() if name.endswith(end)), None)
    if rule is None or spread.tensor * spread.tiles == 1:
        return spec
    axis, blocks = rule
    width = spec.shape[axis] // blocks
    shards = Partition(width, spread.tensor * spread.tiles)
    mine = [shards.shard(here.tensor * spread.tiles + tile) for tile in range(spread.tiles)]
    tiles = tuple(tuple((b * width + s.start, b * width + s.stop) for b in range(blocks)) for s in mine)
    ranges = tuple((first[0], last[1]) for first, last in zip(tiles[0], tiles[-1], strict=True))
    part = Part(spec.shape, axis, ranges, tiles if spread.tiles > 1 else ())
    return replace(spec, shape=part_shape(part), part=part)


def local_blocks(blocks: Blocks, spread: Spread, here: Coordinates) -> Blocks:
    """The blocks of a stage, sliced; a tied use whose home is elsewhere becomes a copy."""
    whole = FlatLayout.build(blocks).by_name
    pieces = [list(blocks)[s] for s in Partition(len(blocks), spread.pipeline * spread.chunks)]
    mine = [name for chunk in range(spread.chunks) for name in pieces[chunk * spread.pipeline + here.pipeline]]
    found: dict[str, list[ParameterSpec]] = {}
    for block in mine:
        found[block] = []
        for spec in blocks[block]:
            own = spec
            if spec.tied is not None and not spec.tied.startswith(tuple(f"{name}." for name in mine)):
                home = whole[spec.tied].spec
                own = replace(home, name=spec.name, guest=home.name)
            found[block].append(sliced(own, f"{block}.{spec.name}", here, spread))
    return found


def place(comm: Any, model: Any, spread: Spread) -> Any:
    """What saving and loading know of an engine: parameters with their start values, and the state of AdamW."""
    grid = ProcessGrid.create(comm, share_node_memory=not spread.private, axes=spread.axes)
    row, blocks = placement(spread.strategy), blocks_of(model)
    local = local_blocks(blocks, spread, grid.here)
    layout = FlatLayout.build(local, one_unit=row.one_unit, minimum_unit=spread.minimum)
    memory = Memory(grid.node)
    store = ParameterStore(layout, grid, memory, row.shard_parameters, model.dtype)
    engine = SimpleNamespace(layout=layout, store=store, grid=grid, memory=memory, dtype=store.values.dtype)
    engine.prints_notices = grid.world.rank == 0
    engine.start_over = lambda: start(engine, model)
    engine.whole = GlobalView(blocks, store, grid)
    tiles = {"tensor": spread.tensor * spread.tiles}
    sizes = {axis: getattr(spread, axis) for axis in ("pipeline", "tensor", "context")}
    engine.partitioned = SimpleNamespace(parallel_layout=ParallelLayout(**sizes, tiles=tiles))
    engine.updater = engine.bound_updater = Updater(
        mz.AdamW(), store, UpdateScope(not row.shard_optimizer, in_rows=True)
    )
    engine.placement, engine.step_number, engine.loss_scale, engine.pristine = row, 0, None, False
    engine.grain_rule, engine.config, engine.model = GrainRule(), mz.ShardingConfig(comm=comm), model
    engine.integrity, engine.half_loaded = Integrity(grid, store, 0), None
    engine.exchange, engine.integers = GradientExchange(store, row), IntegerState(model, local, grid)
    start(engine, model)
    return engine


def start(engine: Any, model: Any) -> None:
    for unit, span in zip(engine.layout.units, engine.store.share.spans, strict=True):
        out = engine.store.owned(unit.index)
        for entry, part in engine.layout.pieces(span):
            first, last = part.start - entry.offset, part.stop - entry.offset
            initial_values(entry.spec, model.seed, first, last, out[part.start - span.start : part.stop - span.start])
    engine.store.publish()


def finish(engine: Any) -> None:
    engine.memory.close()
    engine.grid.close()


def start_vector(model: Any) -> Array:
    return np.concatenate([values.reshape(-1) for values in initial_parameters(model).values()])


def selected(spec: ParameterSpec, whole: Array) -> Array:
    """What a rank holds of a parameter, by NumPy's indexing, 1-D."""
    if spec.part is None:
        return whole.reshape(-1)
    axis = spec.part.axis
    return np.concatenate([whole.take(range(*span), axis=axis) for span in spec.part.ranges], axis).reshape(-1)


def held_of(engine: Any, values: Array) -> Array:
    """What a rank holds of a vector."""
    entries = [(entry, engine.whole.home(entry.spec)) for entry in engine.layout.parameters]
    wholes = [values[home.span.start : home.span.stop].reshape(home.spec.shape) for _, home in entries]
    return np.concatenate([selected(entry.spec, whole) for (entry, _), whole in zip(entries, wholes, strict=True)])


def on_threads(body: Callable[[Any, Spread], None], spread: Spread) -> None:
    run_in_threads(spread.size, lambda comm: body(comm, spread))


def on_mpi(body: Callable[..., None], world: Any, *more: Sequence[Any]) -> None:
    """Call the body for every spread of so many ranks, with one of each of ``more`` in turn."""
    mine = [spread for spread in SPREADS if spread.size == world.size]
    for number, spread in enumerate(mine):
        body(world, spread, *([each[(number + world.size) % len(each)]] for each in more))


# ---------------------------------------------------------------------- one vector


MODELS = (gpt(), gpt("float64", tied=False), mz.nn.MLP(5, [7, 6, 4], 3))


def has_start_values(comm: Any, spread: Spread, models: Sequence[Any] = MODELS) -> None:
    for model in models:
        engine = place(comm, model, spread)
        whole, expected = engine.whole, start_vector(model)
        parallel_assert(comm, whole.parameter_count == expected.size)
        parallel_assert(comm, whole.vector().tobytes() == expected.tobytes(), "vector")
        units = list(whole.units())
        parallel_assert(comm, np.concatenate(units).tobytes() == expected.tobytes(), "units")
        named = whole.named(whole.vector())
        initial = initial_parameters(model)
        parallel_assert(comm, list(named) == list(initial))
        parallel_assert(comm, all(np.array_equal(named[name], initial[name]) for name in initial))
        finish(engine)


@pytest.mark.parametrize("spread", SPREADS)
def test_however_it_is_spread_a_model_starts_with_the_values_of_one_process(spread: Spread) -> None:
    on_threads(has_start_values, spread)


@pytest.mark.mpi
def test_on_mpi_ranks_too_a_model_starts_with_the_values_of_one_process(world: Any) -> None:
    on_mpi(has_start_values, world, MODELS)


def holds_what_was_set(comm: Any, spread: Spread) -> None:
    model = gpt("float64")
    engine = place(comm, model, spread)
    values = np.random.default_rng(1).normal(size=start_vector(model).size)
    engine.whole.fill(values)
    parallel_assert(comm, np.array_equal(engine.whole.vector(), values), "vector")
    held = np.concatenate([values[:0], *(engine.store.gathered(unit) for unit in engine.layout.units)])
    parallel_assert(comm, np.array_equal(held, held_of(engine, values)), "slices, replicas and copies")
    parallel_assert(comm, np.array_equal(engine.whole.assemble(held), values), "assembled")
    finish(engine)


@pytest.mark.parametrize("spread", SPREADS)
def test_every_slice_replica_and_copy_takes_its_part_of_a_vector(spread: Spread) -> None:
    on_threads(holds_what_was_set, spread)


@pytest.mark.mpi
def test_on_mpi_ranks_too_every_slice_replica_and_copy_takes_its_part_of_a_vector(world: Any) -> None:
    on_mpi(holds_what_was_set, world)


@pytest.mark.parametrize(
    "spread", [Spread(), Spread(data=3, strategy="ddp", private=True), Spread(context=2), Spread(tiles=4)]
)
def test_a_model_that_is_not_split_sends_nothing_to_be_seen_whole(spread: Spread) -> None:
    def body(comm: Any, spread: Spread) -> None:
        engine = place(comm, gpt(), spread)
        sent = engine.grid.bytes_sent
        assert engine.whole.layout is engine.layout
        assert not engine.whole.gathers
        engine.whole.vector()
        assert len(list(engine.whole.units())) == len(engine.layout.units)
        assert engine.grid.bytes_sent == sent
        comm.barrier()
        finish(engine)

    on_threads(body, spread)


@pytest.mark.parametrize("spread", [Spread(pipeline=2), Spread(tensor=2), Spread(pipeline=2, tensor=2)])
def test_a_vector_costs_each_element_one_message_to_each_other_rank(spread: Spread) -> None:
    def sent(comm: Any) -> int:
        engine = place(comm, gpt(), spread)
        before = engine.grid.bytes_sent
        engine.whole.vector()
        found = engine.grid.bytes_sent - before
        finish(engine)
        return int(found)

    total = sum(run_in_threads(spread.size, sent))
    assert total == start_vector(gpt()).nbytes * (spread.size - 1)


# ---------------------------------------------------------------------- one checkpoint


def state_of(model: Any) -> dict[str, Array]:
    """Values for every optimizer array, the same for every layout."""
    rng = np.random.default_rng(2)
    names = initial_parameters(model)
    return {
        f"optimizer/{slot}/{name}": rng.normal(size=names[name].shape).astype(model.dtype)
        for slot in ("exp_avg", "exp_avg_sq")
        for name in names
    }


def give_state(engine: Any, state: Mapping[str, Array]) -> None:
    for slot, values in engine.updater.state.items():
        for piece in engine.updater.pieces:
            spec = piece.entry.spec
            held = selected(spec, state[f"optimizer/{slot}/{spec.guest or spec.name}"])
            start = piece.span.start - piece.entry.offset
            values[piece.state : piece.state + piece.size] = held[start : start + piece.size]


def saved(comm: Any, spread: Spread) -> bytes:
    model = gpt()
    engine = place(comm, model, spread)
    engine.whole.fill(start_vector(model)[::-1].copy())
    give_state(engine, state_of(model))
    engine.updater.step_count = engine.step_number = 3
    arrays = state_dict.local_arrays(engine)
    image = checkpoint.to_bytes(arrays, {"mpizero": state_dict.attributes(engine)}, comm)
    finish(engine)
    return image


@cache
def saved_on_threads(spread: Spread) -> bytes:
    images = run_in_threads(spread.size, lambda comm: saved(comm, spread))
    assert len(set(images)) == 1, "the same bytes on every rank"
    return images[0]


def contents(image: bytes) -> dict[str, bytes]:
    with checkpoint.from_bytes(image) as reader:
        return {path: reader.read_whole(path).tobytes() for path in reader.arrays}


def test_a_checkpoint_holds_the_arrays_of_the_whole_model_whoever_wrote_it() -> None:
    model = gpt()
    names = initial_parameters(model)
    values = start_vector(model)[::-1].tobytes()
    for spread in SPREADS:
        found = contents(saved_on_threads(spread))
        parameters = b"".join(found.pop(f"parameters/{name}") for name in names)
        assert parameters == values, spread
        assert found == {path: array.tobytes() for path, array in state_of(model).items()}, spread


def loads(comm: Any, spread: Spread, image: bytes, pristine: bool) -> None:
    model = gpt()
    engine = place(comm, model, spread)
    engine.pristine = pristine
    with checkpoint.from_bytes(image) as reader:
        state_dict.restore(engine, reader)
    parallel_assert(comm, np.array_equal(engine.whole.vector(), start_vector(model)[::-1]), "parameters")
    kept = {slot: values.copy() for slot, values in engine.updater.state.items()}
    give_state(engine, state_of(model))
    equal = all(np.array_equal(kept[slot], values) for slot, values in engine.updater.state.items())
    parallel_assert(comm, equal, "optimizer state")
    parallel_assert(comm, (engine.updater.step_count, engine.step_number) == (3, 3), "steps")
    held = np.concatenate([engine.store.gathered(unit) for unit in engine.layout.units])
    parallel_assert(comm, np.array_equal(held, held_of(engine, start_vector(model)[::-1])), "replicas and copies")
    finish(engine)


@pytest.mark.parametrize("number", range(len(SPREADS)))
def test_every_layout_reads_what_every_layout_writes(number: int) -> None:
    """All files hold the same arrays, as the test above shows: so it takes one reading of each layout's."""
    spread, writer = SPREADS[number], SPREADS[(5 * number + 9) % len(SPREADS)]
    image = saved_on_threads(writer)
    run_in_threads(spread.size, lambda comm: loads(comm, spread, image, pristine=number % 2 == 0))


@pytest.mark.mpi
def test_on_mpi_ranks_too_every_layout_reads_what_every_layout_writes(world: Any) -> None:
    mine = [spread for spread in SPREADS if spread.size == world.size]
    for number, writer in enumerate(mine):
        image = saved(world, writer)
        for reader in mine[number % 3 :: 3]:  # all files hold the same arrays
            loads(world, reader, image, pristine=False)


@pytest.mark.parametrize(("short_range", "elements"), [(0, 1 << 19), (1 << 18, 1), (1 << 18, 50)])
def test_slices_are_read_alike_range_by_range_and_by_rows_in_windows_of_any_size(
    monkeypatch: pytest.MonkeyPatch, short_range: int, elements: int
) -> None:
    monkeypatch.setattr(saved_attributes, "_SHORT_RANGE", short_range)
    monkeypatch.setattr(saved_attributes, "EXCHANGE_ELEMENTS", elements)
    monkeypatch.setattr(saved_attributes, "VERIFIED_AT_ONCE", 10 * elements)
    image = saved_on_threads(Spread())
    for number, spread in enumerate(SPREADS[index] for index in (6, 9, 12)):
        run_in_threads(spread.size, lambda comm, s=spread, n=number: loads(comm, s, image, pristine=n % 2 == 0))


@pytest.mark.parametrize("pristine", [True, False])
@pytest.mark.parametrize("share", [0, 1, 2])
def test_what_is_damaged_for_one_tensor_rank_is_refused_by_all_and_changes_nothing(pristine: bool, share: int) -> None:
    """Each rank opens the bytes by itself here, so only those that read the damage find it."""
    model, spread = gpt(), Spread(pipeline=2, tensor=3, strategy="ddp")
    image = bytearray(saved_on_threads(Spread()))
    weight = contents(bytes(image))["parameters/blocks.1.attention.qkv.weight"]
    image[image.index(weight) + len(weight) * (2 * share + 1) // 6] ^= 1

    def body(comm: Any) -> str:
        engine = place(comm, model, spread)
        engine.pristine = pristine
        if not pristine:
            engine.whole.fill(np.arange(engine.whole.parameter_count, dtype=engine.dtype))
        before = engine.whole.vector()
        with checkpoint.from_bytes(image) as reader, pytest.raises((CheckpointError, RemoteError)) as caught:
            state_dict.restore(engine, reader)
        assert np.array_equal(engine.whole.vector(), before)
        finish(engine)
        return str(caught.value)

    errors = run_in_threads(spread.size, body)
    assert all("blocks.1.attention.qkv.weight" in error and "checksum mismatch" in error for error in errors)


def test_a_strict_layout_counts_stages_and_tensor_ranks() -> None:
    split = Spread(pipeline=2, tensor=2, strategy="ddp")
    flat = Spread(data=4, strategy="ddp")
    image = saved_on_threads(split)

    def strict(comm: Any, spread: Spread) -> None:
        engine = place(comm, gpt(), spread)
        with checkpoint.from_bytes(image) as reader:
            state_dict.restore(engine, reader, strict_layout=True)
        finish(engine)

    run_in_threads(4, lambda comm: strict(comm, split))
    with pytest.raises(CheckpointError, match=r"DDP over 4 ranks on 1 node \(pipeline 2, tensor 2\), this model is"):
        run_in_threads(4, lambda comm: strict(comm, flat))


def test_files_that_know_no_stages_were_written_without() -> None:
    def body(comm: Any) -> None:
        engine = place(comm, gpt(), Spread())
        arrays, told = state_dict.local_arrays(engine), state_dict.attributes(engine)
        for axis in ("pipeline", "tensor", "context"):
            assert told["layout"].pop(axis) == 1
        with checkpoint.from_bytes(checkpoint.to_bytes(arrays, {"mpizero": told}, comm)) as reader:
            state_dict.restore(engine, reader, strict_layout=True)
        finish(engine)

    run_in_threads(1, body)


# ---------------------------------------------------------------------- what is refused

ONE = {"a": [ParameterSpec("w", (4, 6), Init("normal", 0.1)), ParameterSpec("b", (6,))]}
W, B = ParameterSpec("a.w", (4, 6), Init("normal", 0.1)), ParameterSpec("a.b", (6,))


def slice_of(spec: ParameterSpec, *ranges: tuple[int, int], axis: int = 1) -> ParameterSpec:
    part = Part(spec.shape, axis, ranges)
    return replace(spec, shape=part_shape(part), part=part)


LEFT, RIGHT = slice_of(W, (0, 3)), slice_of(W, (3, 6))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([LEFT, B], [LEFT, B], "index 0 of axis 1 is held twice"),
        ([LEFT, B], [slice_of(W, (4, 6)), B], "index 3 of axis 1 is held by nobody"),
        ([LEFT, B], [slice_of(W, (3, 5)), B], "index 5 of axis 1 is held by nobody"),
        ([LEFT, B], [slice_of(W, (0, 4), axis=0), B], "slices along one axis"),
        ([B], [W, B], "'a.w' must be held whole"),
        ([LEFT, replace(B, name="a.c")], [RIGHT], "tensor rank 0 holds 'a.c', which is no parameter"),
        ([LEFT, B], [RIGHT, replace(B, shape=(5,))], r"tensor rank 1 holds 'a.b' of shape \(5,\)"),
        ([replace(LEFT, shape=(4, 2)), B], [RIGHT, B], r"declares 'a.w' with shape \(4, 2\)"),
        ([LEFT, B], [RIGHT, B, replace(B, name="z.b", guest="a.b", init=Init("ones"))], "'z.b' with init="),
        ([LEFT, B], [RIGHT, B, replace(B, name="z.b", guest="a.b", decay=False)], "'z.b' with decay=False"),
        ([LEFT, B], [RIGHT, B, replace(B, name="z.b", guest="a.b")], None),
    ],
)
def test_holdings_that_do_not_make_up_the_model_are_refused_by_name(
    first: list[ParameterSpec], second: list[ParameterSpec], message: str | None
) -> None:
    layout = FlatLayout.build(ONE)
    with nullcontext() if message is None else pytest.raises(LayoutError, match=message):
        told = [given_parameters(layout, Coordinates(0, place, 0), held) for place, held in enumerate((first, second))]
        check_cover(layout, told)
