"""Online training: every accepted sample is trained on once, in an order that no timing changes, and nobody hangs."""

from __future__ import annotations

import io
import json
import os
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, MpizeroError, StateError
from mpizero.testing import run_in_threads

LIKE = (np.zeros(2, np.float32), np.zeros(1, np.float32))


def sample(producer, number):
    return np.array([producer, number], np.float32), np.array([number], np.float32)


def batches_of(world, trainers, produce, *, steps=None, **options):
    """Samples of every global batch, as lists of (producer, number); and what the producers have returned."""

    def run(comm):
        with mz.data.OnlineJob(comm, trainers=trainers, like=LIKE, window=3) as job:
            if not job.trains:
                return produce(comm.rank - trainers, job)
            config = mz.ShardingConfig(comm=job.group, micro_batch=1)
            with job.source(**options) as source:
                found = []
                for x, y in mz.data.batches(source, config, 4, steps=steps):
                    assert (x[:, 1:] == y).all()
                    found.append([tuple(row) for row in x.astype(int).tolist()])
            return found

    results = run_in_threads(world, run)
    joined = [sum(parts, []) for parts in zip(*results[:trainers], strict=True)]
    return joined, results[trainers:]


def gives(counts, before=lambda k, number: None):
    """A producer that gives ``counts[k]`` samples, after ``before(k, number)``; it returns how many were accepted."""

    def produce(k, job):
        with job.producer() as producer:
            for number in range(counts[k]):
                before(k, number)
                if not producer.put(*sample(k, number)):
                    return number
        return counts[k]

    return produce


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_producers_take_turns_whatever_the_trainers_and_the_last_batch_is_short(trainers):
    found, accepted = batches_of(trainers + 2, trainers, gives([5, 2]))
    assert found == [[(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 2), (0, 3), (0, 4)]]
    assert accepted == [5, 2]


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_producer_keeps_its_turns(late, monkeypatch):
    """It gives its first sample when trainers have looked three times at a window of the other one's samples."""
    full, looked, poll = threading.Event(), threading.Semaphore(0), mz.data.online.MessageReceiver.poll

    def look(self, wanted):
        if full.is_set():
            looked.release()
        return poll(self, wanted)

    def before(k, number):
        if k != late and number == 3:
            full.set()
        if k == late and number == 0:
            assert all(looked.acquire(timeout=60) for _ in range(4))  # the fourth look begins when the third has ended

    monkeypatch.setattr(mz.data.online.MessageReceiver, "poll", look)
    found, accepted = batches_of(4, 2, gives([4, 4], before))
    assert found == [[(k, number) for number in numbers for k in (0, 1)] for numbers in ((0, 1), (2, 3))]
    assert accepted == [4, 4]


def test_a_producer_waits_while_its_window_is_full():
    accepted = [threading.Event() for _ in range(5)]

    def run(comm):
        with mz.data.OnlineJob(comm, trainers=1, like=LIKE, window=3) as job:
            if not job.trains:
                with job.producer() as producer:
                    for number in range(5):
                        producer.put(*sample(0, number))
                        accepted[number].set()
                return None
            assert accepted[2].wait(60)
            assert not accepted[3].wait(0.1)
            with job.source() as source:
                return len(source.next_batch(5))

    assert run_in_threads(2, run)[0] == 5


def test_trainers_that_end_first_tell_the_producers():
    found, accepted = batches_of(4, 2, gives([1000, 1000]), steps=2)
    assert [len(batch) for batch in found] == [4, 4]
    assert all(4 <= count <= 4 + 3 for count in accepted)


def test_on_end_stop_ends_the_run_at_the_first_producer_without_samples():
    found, _ = batches_of(3, 1, gives([2, 9]), on_end="stop")
    assert found == [[(0, 0), (1, 0), (0, 1), (1, 1)]]


def failing(k, job):
    with job.producer() as producer:
        for number in range(4):
            producer.put(*sample(k, number))
            if k == 1 and number == 1:
                raise FloatingPointError("the solver has diverged")


def drained(ended=None, **options):
    """Let the second of two producers fail while a trainer asks for a batch; return its samples or its error."""
    found, ended = [], ended or threading.Event()

    def run(comm):
        with mz.data.OnlineJob(comm, trainers=1, like=LIKE) as job:
            if not job.trains:
                try:
                    return failing(comm.rank - 1, job)
                except FloatingPointError:
                    ended.set()
                    raise
            with job.source(**options) as source:
                try:
                    found.append(len(source.next_batch(100)))
                except DataError as error:
                    found.append(str(error))
                    raise
            return None

    with pytest.raises((FloatingPointError, DataError)):
        run_in_threads(3, run)
    return found


def test_an_exception_of_a_producer_is_raised_by_the_trainers_and_by_itself(monkeypatch):
    def stop(self):
        tell_producers(self)
        assert ended.wait(60)

    ended, tell_producers = threading.Event(), mz.data.online.MessageReceiver.stop
    monkeypatch.setattr(mz.data.online.MessageReceiver, "stop", stop)
    assert "the producer rank 2 has failed: FloatingPointError: the solver has diverged" in drained(ended)[0]


def test_on_error_drain_trains_on_all_that_was_accepted_before_the_exception_leaves_the_producer():
    assert drained(on_error="drain") == [6]


def test_a_wrong_sample_names_rank_and_number():
    def produce(k, job):
        with job.producer() as producer:
            producer.put(np.zeros(3, np.float32), LIKE[1])

    with pytest.raises(DataError, match=r"sample 0 of the producer on rank 1: x is float32 of shape \(3,\)|has failed"):
        batches_of(2, 1, produce)


def test_silence_is_an_error_that_names_who_has_not_ended():
    told = threading.Event()

    def run(comm):
        job = mz.data.OnlineJob(comm, trainers=1, like=LIKE)
        if job.trains:
            source = job.source(timeout=0.1)
            with pytest.raises(DataError, match="no sample has arrived for .* not ended: rank 1"):
                source.next_batch(1)
            told.set()
        else:
            with job.producer():
                assert told.wait(60)

    run_in_threads(2, run)


def test_wrong_arguments_are_refused():
    def run(comm):
        with pytest.raises(ConfigError, match="trainers=2: the job has 2 ranks"):
            mz.data.OnlineJob(comm, trainers=2, like=LIKE)
        with pytest.raises(MpizeroError, match="expected one sample"):  # on both ranks, though one alone is wrong
            mz.data.OnlineJob(comm, trainers=1, like=LIKE if comm.rank else np.zeros(3))
        with mz.data.OnlineJob(comm, trainers=1, like=LIKE) as job, pytest.raises(StateError):
            job.producer() if job.trains else job.source()

    run_in_threads(2, run)


# ---------------------------------------------------------------------- spool


def spooled(folder, ranks, **options):
    """Train on a spool folder by ``ranks`` threads; return the samples of all batches."""

    def run(comm):
        config = mz.ShardingConfig(comm=comm, micro_batch=1)
        with mz.data.spool_source(comm, folder, like=LIKE, **options) as source:
            stream = mz.data.batches(source, config, 4)
            return [[tuple(row) for row in x.astype(int).tolist()] for x, _ in stream]

    return [sum(parts, []) for parts in zip(*run_in_threads(ranks, run), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_spool_gives_every_sample_once_removes_the_files_and_keeps_a_journal(tmp_path, ranks):
    with mz.data.SpoolProducer(tmp_path / "spool", "a", like=LIKE) as producer:
        for number in range(6):
            assert producer.put(*sample(0, number))
    found = spooled(tmp_path / "spool", ranks, producers=1, journal=tmp_path / "journal.jsonl")
    assert found == [[(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 4), (0, 5)]]
    assert not list((tmp_path / "spool").glob("*.npz"))
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [len(line["samples"]) for line in lines] == [4, 2]
    with mz.data.SpoolProducer(tmp_path / "spool", "a", like=LIKE) as late:
        assert not late.put(*sample(0, 9))


def test_files_stay_until_the_next_batch_is_asked_for(tmp_path):
    with mz.data.SpoolProducer(tmp_path, "a", like=LIKE) as producer:
        for number in range(3):
            producer.put(*sample(0, number))

    def run(comm):
        source = mz.data.spool_source(comm, tmp_path, like=LIKE, producers=1)
        assert len(source.next_batch(2)) == 2
        assert len(list(tmp_path.glob("*.npz"))) == 3
        assert len(source.next_batch(2)) == 1
        assert len(list(tmp_path.glob("*.npz"))) == 1

    run_in_threads(1, run)


def test_a_spool_tells_errors_and_unreadable_samples(tmp_path):
    def fail():
        with mz.data.SpoolProducer(tmp_path, "b", like=LIKE) as producer:
            producer.put(*sample(0, 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(MpizeroError, match="the producer b has failed: ZeroDivisionError"):
        spooled(tmp_path, 2, producers=1)
    assert spooled(tmp_path, 2, producers=1, on_error="drain") == [[(0, 0)]]


def npz(save=np.savez, **arrays):
    save(file := io.BytesIO(), **arrays)
    return file.getvalue()


def liar(path):
    """An array whose header declares what no machine has."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 60,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue())


def cut(path):
    """An archive whose directory points before its start."""
    whole = npz(x=LIKE[0], y=LIKE[1])
    path.write_bytes(whole[:-6] + (0xFFFFFF00).to_bytes(4, "little") + whole[-2:])


#: What anybody may have put into a spool, and what is said of it.
SPOILT = {
    "a pipe": (os.mkfifo, "not a regular file"),
    "a link": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "half": (lambda path: path.write_bytes(b"half"), "not a sound .npz file"),
    "a bomb": (
        lambda path: path.write_bytes(npz(np.savez_compressed, x=np.zeros(1 << 22), y=LIKE[1])),
        "declares .* bytes of arrays, at most 12 are plausible",
    ),
    "a liar": (liar, "it has 0 bytes"),
    "pickled": (lambda path: path.write_bytes(npz(x=np.array([{}], object), y=LIKE[1])), "not an array of numbers"),
    "nameless": (lambda path: path.write_bytes(npz(x=LIKE[0])), "it has no array 'y'"),
    "cut": (cut, "not a sound .npz file"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_anybody_may_have_put_into_the_spool_is_an_error_at_once(tmp_path, case):
    write, told = SPOILT[case]
    write(tmp_path / f"b-{7:020d}.npz")
    tracemalloc.start()
    with pytest.raises(MpizeroError, match=rf"b-0+7\.npz: not a readable sample or end: {told}|{told}"):
        spooled(tmp_path, 2, producers=1)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("case", ["a pipe", "a link"])
def test_the_end_of_a_producer_is_read_as_carefully(tmp_path, case):
    write, told = SPOILT[case]
    write(tmp_path / "b.end")
    with pytest.raises(MpizeroError, match=rf"b\.end: not a readable sample or end: {told}"):
        spooled(tmp_path, 1, producers=1)


def test_the_trainer_ends_with_the_samples_and_its_bits_do_not_depend_on_the_trainers(tmp_path):
    def run(comm):
        trainers = comm.size - 2
        with mz.data.OnlineJob(comm, trainers=trainers, like=LIKE) as job:
            if not job.trains:
                return gives([13, 9])(comm.rank - trainers, job)
            config = mz.ShardingConfig(comm=job.group, micro_batch=1)
            model = mz.nn.MLP(2, (4,), 1, task="regression")
            folder, optimizer = tmp_path / str(trainers), mz.AdamW(1e-2)
            settings = {"optimizer": optimizer, "steps": 100, "global_batch": 4, "run": folder, "progress": False}
            with job.source() as source, mz.Trainer(model, source, config, **settings) as trainer:
                return trainer.fit()

    results = [run_in_threads(size, run)[0] for size in (3, 4)]
    assert [(one.steps, one.stopped) for one in results] == [(6, "the producers have ended")] * 2
    assert results[0].parameters_sha256 == results[1].parameters_sha256


def test_samples_that_come_by_messages_are_not_read_ahead():
    def run(comm):
        with mz.data.OnlineJob(comm, trainers=1, like=LIKE) as job:
            if not job.trains:
                with job.producer():
                    return
            config = mz.ShardingConfig(comm=job.group)
            with job.source() as source, pytest.raises(ConfigError, match="prefetch=2: samples of an OnlineSource"):
                mz.data.batches(source, config, 4, prefetch=2)

    run_in_threads(2, run)


def test_trainers_that_are_asked_to_stop_tell_the_producers():
    def run(comm):
        with mz.data.OnlineJob(comm, trainers=2, like=LIKE, window=2) as job:
            if not job.trains:
                return gives([1000])(0, job)
            with job.source() as source:
                source.next_batch(3)
                raise mz.Preempted("asked to stop")

    def caught(comm):
        try:
            return run(comm)
        except mz.Preempted:
            return "stopped"

    *trainers, accepted = run_in_threads(3, caught)
    assert trainers == ["stopped", "stopped"]
    assert 3 <= accepted <= 5
