"""Slices, copies and shards of a model are one model: its vector, its hash, its checkpoint are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError, LayoutError, MpizeroError, RemoteError
from mpizero.layout import Coordinates
from mpizero.layout.flat import FlatLayout
from mpizero.layout.tensor_parts import part_shape
from mpizero.nn import initial_parameters
from mpizero.sharding import saved_attributes, state_dict
from mpizero.sharding.full_params import check_cover, sent_parameters
from mpizero.testing import run_in_threads
from mpizero.types import Array, Init, ParameterSpec, Part
from tests.parallel.models import PRIVATE
from tests.parallel.parallel_layouts import Case, Way, placed, selected


class Spread(NamedTuple):
    """So many ranks, how a model is spread over them, and settings of memory and tiles."""

    size: int = 1
    way: Way = Way()  # noqa: RUF009
    memory: Mapping[str, Any] = {}


SPREADS = [
    Spread(),
    Spread(4, Way(zero=3), PRIVATE),
    Spread(2, Way(2, zero=0, schedule="interleaved")),
    Spread(3, Way(tensor=3, zero=0), PRIVATE),
    Spread(2, Way(context=2)),
    Spread(4, Way(2, zero=3), {**PRIVATE, "minimum_parameter_group_size": 700}),
    Spread(4, Way(tensor=2, zero=2), PRIVATE),
    Spread(4, Way(tensor=2, context=2, zero=3), PRIVATE),
    Spread(8, Way(2, 2, zero=3), PRIVATE),
    Spread(8, Way(2, 2, context=2)),
    Spread(1, Way(), {"tiles": {"tensor": 4}}),
    Spread(2, Way(2, zero=3), {**PRIVATE, "tiles": {"tensor": 2}}),
    Spread(4, Way(tensor=2, zero=3), {**PRIVATE, "tiles": {"tensor": 4}}),
]


def gpt(dtype: str = "float32", **changes: Any) -> mz.nn.GPT:
    settings: dict[str, Any] = {"dim": 12, "layers": 3, "heads": 12, "sequence": 5, "vocabulary": 31, "seed": 7}
    return mz.nn.GPT(dtype=dtype, **{**settings, **changes})


class Given:
    """A GPT that begins with values of its own but for its norms, which keep those of their layer."""

    def __init__(self) -> None:
        whole = gpt(layers=2)
        self.blocks, self.loss, self.dtype, self.seed = whole.blocks, whole.loss, whole.dtype, whole.seed
        rng = np.random.default_rng(1)
        start = initial_parameters(whole)
        self.start_values = {n: rng.normal(size=a.shape).astype(a.dtype) for n, a in start.items() if "norm" not in n}
        self.expected = start | self.start_values


MODELS = (gpt(), gpt("float64", tied=False), mz.nn.MLP(5, [7, 6, 4], 3), Given())


def on(spread: Spread, body: Callable[[Any], Any], model: Any = MODELS[0]) -> list[Any]:
    """What ``body`` makes of the engine of a placed model on each rank."""

    def run(comm: Any) -> Any:
        with placed(Case(lambda: model), comm, spread.way, **spread.memory) as sharded:
            return body(sharded._engine)

    return run_in_threads(spread.size, run)


def start_vector(model: Any) -> Array:
    return np.concatenate([values.reshape(-1) for values in initial_parameters(model).values()])


def held_of(engine: Any, values: Array) -> Array:
    """What a rank holds of a vector."""
    entries = [(entry, engine.global_view.home(entry.spec)) for entry in engine.layout.parameters]
    wholes = [values[home.span.start : home.span.stop].reshape(home.spec.shape) for _, home in entries]
    return np.concatenate([selected(entry.spec, whole) for (entry, _), whole in zip(entries, wholes, strict=True)])


@pytest.mark.parametrize("number", range(len(SPREADS)))
def test_however_it_is_spread_a_model_starts_with_the_values_of_one_process(number: int) -> None:
    """Two of the models in turn; the MLP has no sequences that could be cut."""
    spread = SPREADS[number]
    for model in MODELS[:2] if spread.way.context > 1 else (MODELS[number % 2], MODELS[2 + number // 2 % 2]):
        expected = getattr(model, "expected", None) or initial_parameters(model)

        def body(engine: Any, expected: Any = expected) -> None:
            whole, vector = engine.global_view, np.concatenate([values.reshape(-1) for values in expected.values()])
            assert whole.parameter_count == vector.size
            assert whole.vector().tobytes() == vector.tobytes()
            assert np.concatenate(list(whole.units())).tobytes() == vector.tobytes()
            named = whole.named(whole.vector())
            assert list(named) == list(expected)
            assert all(np.array_equal(named[name], expected[name]) for name in expected)

        on(spread, body, model)


@pytest.mark.parametrize("spread", [SPREADS[0], Spread(3, Way(zero=0), PRIVATE), SPREADS[4], SPREADS[10]], ids=str)
def test_a_model_that_is_not_split_sends_nothing_to_be_seen_whole(spread: Spread) -> None:
    def body(engine: Any) -> None:
        sent = engine.grid.bytes_sent
        assert engine.global_view.layout is engine.layout
        assert not engine.global_view.gathers
        engine.global_view.vector()
        assert len(list(engine.global_view.units())) == len(engine.layout.units)
        assert engine.grid.bytes_sent == sent
        engine.grid.world.barrier()

    on(spread, body)


@pytest.mark.parametrize("spread", [Spread(2, Way(tensor=2)), Spread(2, Way(2)), Spread(4, Way(2, 2))], ids=str)
def test_a_vector_costs_each_element_one_message_to_each_other_rank(spread: Spread) -> None:
    def sent(engine: Any) -> int:
        before = engine.grid.bytes_sent
        engine.global_view.vector()
        return int(engine.grid.bytes_sent - before)

    assert sum(on(spread, sent)) == start_vector(gpt()).nbytes * (spread.size - 1)


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


@cache
def saved(number: int) -> bytes:
    """The checkpoint that a layout writes, the same bytes on every rank; each holds its part of what was set."""

    def body(engine: Any) -> bytes:
        values = start_vector(gpt())[::-1].copy()
        engine.global_view.fill(values)
        held = np.concatenate([values[:0], *(engine.store.gathered(unit) for unit in engine.layout.units)])
        assert np.array_equal(held, held_of(engine, values)), "slices, replicas and copies"
        assert np.array_equal(engine.global_view.assemble(held), values)
        give_state(engine, state_of(gpt()))
        engine.updater.step_count = engine.step_number = 3
        arrays = state_dict.local_arrays(engine)
        return checkpoint.to_bytes(arrays, {"mpizero": state_dict.attributes(engine)}, engine.grid.world)

    (image,) = set(on(SPREADS[number], body))
    return image


def contents(image: bytes) -> dict[str, bytes]:
    with checkpoint.from_bytes(image) as reader:
        return {path: reader.read_whole(path).tobytes() for path in reader.arrays}


def loads(number: int, writer: int, pristine: bool) -> None:
    """A layout reads what another has written: parameters and state of every slice, replica and copy, and steps."""
    image = saved(writer)

    def body(engine: Any) -> None:
        if not pristine:
            engine.global_view.fill(np.zeros(engine.global_view.parameter_count, engine.dtype))
        with checkpoint.from_bytes(image) as reader:
            state_dict.restore(engine, reader)
        expected = start_vector(gpt())[::-1]
        assert np.array_equal(engine.global_view.vector(), expected)
        kept = {slot: values.copy() for slot, values in engine.updater.state.items()}
        give_state(engine, state_of(gpt()))
        assert all(np.array_equal(kept[slot], values) for slot, values in engine.updater.state.items())
        assert (engine.updater.step_count, engine.step_number) == (3, 3)
        held = np.concatenate([engine.store.gathered(unit) for unit in engine.layout.units])
        assert np.array_equal(held, held_of(engine, expected)), "replicas and copies"

    on(SPREADS[number], body)


@pytest.mark.parametrize("number", range(len(SPREADS)))
def test_every_layout_holds_and_writes_the_arrays_of_the_whole_model_and_reads_those_of_another(number: int) -> None:
    found = contents(saved(number))
    values = b"".join(found.pop(f"parameters/{name}") for name in initial_parameters(gpt()))
    assert values == start_vector(gpt())[::-1].tobytes()
    assert found == {path: array.tobytes() for path, array in state_of(gpt()).items()}
    loads(number, (5 * number + 9) % len(SPREADS), pristine=number % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("short_range", "elements"), [(0, 1 << 19), (1 << 18, 1), (1 << 18, 50)])
def test_slices_are_read_alike_range_by_range_and_by_rows_in_windows_of_any_size(
    monkeypatch: pytest.MonkeyPatch, short_range: int, elements: int
) -> None:
    monkeypatch.setattr(saved_attributes, "_SHORT_RANGE", short_range)
    monkeypatch.setattr(saved_attributes, "EXCHANGE_ELEMENTS", elements)
    monkeypatch.setattr(saved_attributes, "VERIFIED_AT_ONCE", 10 * elements)
    for turn, number in enumerate((3, 6, 8)):
        loads(number, 0, pristine=turn % 2 == 0)


@pytest.mark.parametrize(("pristine", "share"), [(True, 0), (False, 1), (True, 2), (False, 2)])
def test_what_is_damaged_for_one_tensor_rank_is_refused_by_all_and_changes_nothing(pristine: bool, share: int) -> None:
    """Each rank opens the bytes by itself here, so only those that read the damage find it."""
    image = bytearray(saved(0))
    weight = contents(bytes(image))["parameters/blocks.1.attention.qkv.weight"]
    image[image.index(weight) + len(weight) * (2 * share + 1) // 6] ^= 1

    def body(engine: Any) -> str:
        if not pristine:
            engine.global_view.fill(np.arange(engine.global_view.parameter_count, dtype=engine.dtype))
        before = engine.global_view.vector()
        with checkpoint.from_bytes(image) as reader, pytest.raises((CheckpointError, RemoteError)) as caught:
            state_dict.restore(engine, reader)
        assert np.array_equal(engine.global_view.vector(), before)
        return str(caught.value)

    errors = on(Spread(6, Way(2, 3, zero=0)), body)
    assert all("blocks.1.attention.qkv.weight" in error and "checksum mismatch" in error for error in errors)


@pytest.mark.slow
def test_files_that_know_no_stages_nor_tensor_ranks_have_the_layout_of_a_model_without() -> None:
    def older(engine: Any) -> None:
        arrays, told = state_dict.local_arrays(engine), state_dict.attributes(engine)
        for axis in ("pipeline", "tensor", "context"):
            assert told["layout"].pop(axis) == 1
        image = checkpoint.to_bytes(arrays, {"mpizero": told}, engine.grid.world)
        with checkpoint.from_bytes(image) as reader:
            state_dict.restore(engine, reader, strict_layout=True)

    on(Spread(), older)


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
        told = [sent_parameters(layout, Coordinates(0, place, 0), held) for place, held in enumerate((first, second))]
        check_cover(layout, told)
