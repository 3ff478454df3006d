"""The batch law: global batch k is a function of seed and k, whoever reads it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero import data
from mpizero.data.batches import full_batch
from mpizero.errors import ConfigError, DataError, MpizeroError, RemoteError
from mpizero.testing import run_in_threads


def global_batches(numbers, ranks, size, micro_batch=None, **arguments):
    """Global batches as lists of ids, put together from the parts of ``size`` ranks; and the state at the end."""

    def run(comm):
        stream = data.batches(numbers, ranks(comm, micro_batch), **arguments)
        parts = [(x.tolist(), y.tolist()) for x, y in stream]
        return parts, stream.consumed

    results = run_in_threads(size, run)
    assert len({consumed for _, consumed in results}) == 1
    steps = zip(*(parts for parts, _ in results), strict=True)
    joined = [[i for x, _ in step for i in x] for step in steps]
    assert all([-i for i in x] == y for parts, _ in results for x, y in parts)
    return joined, results[0][1]


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("micro_batch", [None, 4, 100])
def test_global_batches_do_not_depend_on_ranks_nor_grains(numbers, ranks, size, micro_batch):
    arguments = {"global_batch": 11, "seed": 5, "steps": 9}
    alone, _ = global_batches(numbers(37), ranks, 1, **arguments)
    together, consumed = global_batches(numbers(37), ranks, size, micro_batch, **arguments)
    assert together == alone
    assert consumed == 99
    assert [len(batch) for batch in alone] == [11] * 9


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("length", [1, 36, 64])
def test_every_sample_occurs_once_in_every_epoch_also_where_batches_cross_its_end(numbers, ranks, size, length):
    steps = -(-5 * length // 7)
    joined, _ = global_batches(numbers(length), ranks, size, global_batch=7, steps=steps)
    seen = [i for batch in joined for i in batch]
    epochs = [seen[k * length : (k + 1) * length] for k in range(5)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length > 30:
        assert len({tuple(epoch) for epoch in epochs}) == 5
        assert all(epoch != sorted(epoch) for epoch in epochs)


def test_resuming_8_3_5_ranks_in_mid_epoch_goes_on_with_the_same_batches(numbers, ranks):
    arguments = {"global_batch": 10, "seed": 2}
    whole, _ = global_batches(numbers(73), ranks, 1, steps=20, **arguments)
    pieces, consumed = [], 0
    for size, steps in ((8, 5), (3, 9), (5, 6)):
        part, consumed = global_batches(numbers(73), ranks, size, steps=steps, consumed=consumed, **arguments)
        pieces += part
    assert pieces == whole
    assert consumed == 200


def test_each_rank_holds_whole_grains_dealt_in_order(numbers, ranks):
    def run(comm):
        x, _ = next(data.batches(numbers(1000), ranks(comm, 4), global_batch=18, steps=1))
        return len(x)

    assert run_in_threads(3, run) == [8, 8, 2]
    assert run_in_threads(8, run) == [4, 4, 4, 4, 2, 0, 0, 0]


def test_seeds_give_other_orders(numbers, ranks):
    orders = {tuple(global_batches(numbers(50), ranks, 1, global_batch=50, seed=s, steps=1)[0][0]) for s in range(20)}
    assert len(orders) == 20


@given(st.integers(1, 10**12), st.integers(0, 10**15), st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_any_range_of_the_order_is_found_without_the_rest(length, start, count, seed):
    order = data.sample_order(start, start + count, length, seed)
    assert order.size == count
    assert ((order >= 0) & (order < length)).all()
    if count:
        assert data.sample_order(start + count - 1, start + count, length, seed)[0] == order[-1]


def test_the_order_of_a_seed_never_changes():
    assert data.sample_order(0, 12, 10, 0).tolist() == [8, 7, 4, 9, 6, 5, 0, 1, 2, 3, 7, 8]


def test_every_place_is_equally_likely_for_every_sample():
    counts = np.zeros((8, 8))
    for seed in range(2000):
        counts[np.arange(8), data.sample_order(0, 8, 8, seed)] += 1
    chi_square = ((counts - 250) ** 2 / 250).sum()
    assert chi_square < 95  # 49 degrees of freedom: exceeded by chance once in 10^4


def test_the_stream_ends_after_its_steps_or_never(numbers, ranks):
    assert len(list(data.batches(numbers(5), ranks(), 3, steps=0))) == 0
    assert len(list(data.batches(numbers(5), ranks(), 3, steps=4))) == 4
    endless = data.batches(numbers(5), ranks(), 3)
    for _ in range(50):
        next(endless)
    assert endless.consumed == 150


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"global_batch": 0}, "global_batch=0: expected a whole number >= 1"),
        ({"global_batch": 2.0}, "global_batch=2.0"),
        ({"global_batch": True}, "global_batch=True"),
        ({"global_batch": 4, "seed": -1}, "seed=-1"),
        ({"global_batch": 4, "seed": 2**64}, "expected a whole number from 0 to 2\\*\\*64 - 1"),
        ({"global_batch": 4, "consumed": -8}, "consumed=-8"),
        ({"global_batch": 4, "steps": -1}, "steps=-1"),
    ],
)
def test_numbers_that_make_no_sense_are_errors_before_the_first_batch(numbers, ranks, arguments, text):
    with pytest.raises(ConfigError, match=text):
        data.batches(numbers(5), ranks(), **arguments)


def test_only_sources_with_samples_give_batches(numbers, ranks):
    _, empty = numbers(5).split(0)
    with pytest.raises(DataError, match="no samples"):
        data.batches(empty, ranks(), 4)
    with pytest.raises(DataError, match="expected a source of samples"):
        data.batches([1, 2, 3], ranks(), 4)


def test_ranks_with_other_data_or_arguments_are_told_so(numbers, ranks):
    def other_data(comm):
        with pytest.raises(MpizeroError, match=r"source\['samples'\] of the arguments of batches 5 on ranks 0-1, 6"):
            data.batches(numbers(5 + (comm.rank == 2)), ranks(comm), 4)

    def other_seed(comm):
        with pytest.raises(MpizeroError, match="seed"):
            data.batches(numbers(5), ranks(comm), 4, seed=comm.rank)

    def bad_on_one(comm):
        with pytest.raises(ConfigError if comm.rank == 1 else RemoteError, match="steps=-1"):
            data.batches(numbers(5), ranks(comm), 4, steps=-1 if comm.rank == 1 else 1)

    for check in (other_data, other_seed, bad_on_one):
        run_in_threads(3, check)


def test_a_source_that_cannot_describe_itself_on_one_rank_is_an_error_of_all(ranks):
    class Gone(data.ArraySource):
        def describe(self):
            raise OSError("gone")

    def run(comm):
        x, y = np.zeros((8, 2)), np.zeros(8)
        source = Gone(x, y) if comm.rank == 1 else data.ArraySource(x, y)
        with pytest.raises(OSError if comm.rank == 1 else RemoteError, match="gone"):
            data.batches(source, ranks(comm), global_batch=4, seed=0)

    run_in_threads(2, run)


# ------------------------------------------------------------------------------------------ what reading again gives


class Own(data.Source):
    """Twelve numbers, which ``change`` makes others."""

    def __init__(self, change):
        self.numbers, self.change = np.arange(12.0), change

    def __len__(self):
        return 12

    def read(self, indices):
        return self.change(self, indices), -self.numbers[indices]

    def describe(self):
        return {}


def drawn(self, indices, random=np.random.default_rng(0)):  # noqa: B008 - one generator for all calls is the fault
    return self.numbers[indices] + random.normal(size=indices.size)


def changed_in_place(self, indices):
    self.numbers[indices] *= 0.5
    return self.numbers[indices]


class Counting:
    calls = 0

    def __call__(self, x, y, random):
        self.calls += random is not None  # in training alone
        return x + self.calls, y


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda numbers: Own(drawn), "Own.read gives other numbers in x"),
        (lambda numbers: Own(changed_in_place), "Own.read gives other numbers in x"),
        (lambda numbers: Own(drawn).split(0.25)[0], "Own.read gives other numbers in x"),
        (lambda numbers: data.TransformedSource(numbers(12), Counting()), "Counting gives other numbers in x"),
    ],
)
def test_a_source_whose_samples_depend_on_earlier_calls_is_refused(numbers, ranks, source, said, prefetch):
    def run(comm):
        with pytest.raises(DataError, match=f"{said} of sample \\d+ when it is called again.*run.seed"):
            next(data.batches(source(numbers), ranks(comm), 6, prefetch=prefetch))

    run_in_threads(2, run)


def test_nor_are_all_of_its_samples_read_for_one_step(ranks):
    def run(comm):
        with pytest.raises(DataError, match="Own.read gives other numbers in x"):
            full_batch(Own(drawn), ranks(comm))

    run_in_threads(2, run)


def test_a_source_that_gives_the_same_again_is_read_twice_for_the_first_batch_only(ranks):
    asked = []

    def same(self, indices):
        asked.append(indices.tolist())
        return np.where(indices == 3, np.nan, self.numbers[indices])

    stream = data.batches(Own(same), ranks(), 6, steps=3)
    given = [next(stream)[1].tolist() for _ in range(3)]
    assert [[-i for i in batch] for batch in given] == asked[1:]
    assert asked[0] == asked[1]


def epochs(loop, capsys):
    """What is printed when a model is trained by the streams that ``loop`` makes of a source."""
    import mpizero as mz

    x = np.random.default_rng(0).normal(size=(12, 3))
    source = data.ArraySource(x, x[:, :1])
    network = mz.nn.MLP(3, (), 1, task="regression", dtype="float64")
    with mz.distribute(network, mz.SGD(0.01), "ddp", mesh=mz.Mesh("self")) as model:
        loop(source, model)
    return capsys.readouterr().err


def again(source, model, continued=False, train=True, rewound=False):
    consumed = 0
    for _ in range(3):
        if rewound:
            model.optimizer.reset()
        for x, y in (stream := data.batches(source, model, 4, steps=3, consumed=consumed)):
            (model.train if train else model.evaluate)(x, y)
        consumed = stream.consumed if continued else 0


def test_a_loop_that_trains_by_the_same_batches_in_each_epoch_is_told_so(capsys):
    told = epochs(again, capsys)
    assert told.count("trained again by the same samples in the same order") == 1
    assert "steps=epochs * len(source) // global_batch" in told


@pytest.mark.parametrize("how", [{"continued": True}, {"train": False}, {"rewound": True}])
def test_batches_that_go_on_evaluate_or_begin_a_training_anew_are_no_mistake(how, capsys):
    assert "trained again" not in epochs(lambda source, model: again(source, model, **how), capsys)
