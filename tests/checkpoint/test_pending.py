"""Saving beside training: the values are those of the call, the files those of any save, and nobody fails alone."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from copy import deepcopy

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import CheckpointIOError, LocalArray, SnapshotBuffer, atomic_folder
from mpizero.errors import CheckpointError, RemoteError
from mpizero.testing import run_in_threads
from tests.checkpoint.sealed import digest

WRITER = " writes "


@pytest.fixture
def gate(monkeypatch):
    """Keeps every writing thread waiting before its first byte until it is set."""
    opened = threading.Event()
    original = atomic_folder.write_at

    def waiting(file, data, offset, path):
        if WRITER in threading.current_thread().name:
            opened.wait(60)
        original(file, data, offset, path)

    monkeypatch.setattr(atomic_folder, "write_at", waiting)
    yield opened
    opened.set()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_files_are_those_of_a_save_that_waits_and_the_same_arrays_again_take_one_exchange(
    state, small, tmp_path, ranks
):
    """Where one rank has other arrays than in the last save through a buffer, all agree anew."""

    def save(comm):
        buffer = SnapshotBuffer()
        for number, which in enumerate((state, state, small, small)):
            before = comm.trace.started
            pending = which.begin(tmp_path / str(number), comm, buffer=buffer)
            assert (comm.trace.started - before == 1) == (number in (1, 3))
            pending.commit()
        if comm.size > 1:
            arrays = small.pieces(comm.rank, comm.size) if comm.rank else []
            with pytest.raises(CheckpointError, match="are written by no rank"):
                checkpoint.begin(tmp_path / "holes", arrays, small.attributes, comm, buffer=buffer)
        small.begin(tmp_path / "wide", comm, buffer=buffer, alignment=4096).commit()

    run_in_threads(ranks, save)
    for which, numbers in ((state, "01"), (small, "23")):
        which.save(tmp_path / f"waited {numbers}")
        for number in numbers:
            assert digest(tmp_path / number) == digest(tmp_path / f"waited {numbers}")
    assert small.loads(tmp_path / "wide")


def test_values_and_attributes_are_those_at_the_call_whatever_happens_to_them_afterwards(small, tmp_path, gate):
    def save(comm):
        arrays, attributes = small.pieces(comm.rank, comm.size), deepcopy(small.attributes)
        pending = checkpoint.begin(tmp_path / "c", arrays, attributes, comm)
        for array in arrays:
            for _, values in array.pieces:
                values[:] = -1
        attributes["step"] = 8
        attributes["layout"].append(5)
        written = any(values.size for array in arrays for _, values in array.pieces)
        assert pending.finished is False or not written
        assert not (tmp_path / "c").exists()
        comm.barrier()
        gate.set()
        pending.commit()
        assert pending.finished

    run_in_threads(3, save)
    assert small.loads(tmp_path / "c")


@pytest.mark.parametrize(
    ("call", "victim", "waits"),
    [
        ("pwrite", 0, True),  # the file itself, which rank 0 makes
        ("pwrite", 2, True),
        ("fsync", 0, True),
        ("open", 2, True),
        ("pwrite", 2, False),
        ("fsync", 0, False),
        ("open", 2, False),
    ],
)
def test_what_fails_in_the_writing_on_one_rank_is_the_same_error_on_all_ranks_and_leaves_nothing(
    small, tmp_path, call, victim, waits, monkeypatch
):
    small.save(tmp_path / "before")
    original = getattr(os, call)
    thread = f"rank {victim}" if waits or call == "open" else f"rank {victim}{WRITER}"

    def failing(target, *rest, **named):
        name = target if isinstance(target, str) else os.readlink(f"/proc/self/fd/{target}")
        if threading.current_thread().name.startswith(thread) and name.endswith("state.h5"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return original(target, *rest, **named)

    def save(comm):
        pending = None if waits else small.begin(tmp_path / "c", comm)
        with pytest.raises(CheckpointIOError, match="Input/output error") as caught:
            pending.commit() if pending else small.save(tmp_path / "c", comm)
        assert caught.value.errno == errno.EIO
        if pending:
            assert pending.ended
            with pytest.raises(RuntimeError, match="has failed"):
                pending.commit()
        return str(caught.value)

    monkeypatch.setattr(os, call, failing)
    (text,) = set(run_in_threads(3, save))
    monkeypatch.undo()
    assert f"[rank {victim}]" in text
    assert os.listdir(tmp_path) == ["before"]
    assert small.loads(tmp_path / "before")


@pytest.mark.parametrize("waits", [True, False])
def test_a_bug_keeps_its_own_error_on_its_rank(small, tmp_path, monkeypatch, waits):
    original = atomic_folder.cut

    def failing(start, stop):
        if threading.current_thread().name.startswith("rank 1"):
            raise ZeroDivisionError("a bug")
        return original(start, stop)

    def save(comm):
        with pytest.raises((ZeroDivisionError, RemoteError)) as caught:
            small.save(tmp_path / "c", comm, waits)
        return type(caught.value)

    monkeypatch.setattr(atomic_folder, "cut", failing)
    assert run_in_threads(3, save) == [RemoteError, ZeroDivisionError, RemoteError]
    assert os.listdir(tmp_path) == []


def test_the_next_save_into_the_same_buffer_waits_for_the_one_before(small, tmp_path, gate):
    other = small.plus_one()

    def save(comm):
        buffer = SnapshotBuffer()
        first = small.begin(tmp_path / "first", comm, buffer=buffer)
        if comm.rank == 0:
            threading.Timer(0.05, gate.set).start()
        second = other.begin(tmp_path / "second", comm, buffer=buffer)
        assert gate.is_set()
        assert first.finished
        second.commit()
        first.commit()

    run_in_threads(3, save)
    assert small.loads(tmp_path / "first")
    assert other.loads(tmp_path / "second")


def test_a_buffer_is_used_again_and_grows_once(small, state, tmp_path):
    given: list[int] = []

    def allocate(nbytes):
        given.append(nbytes)
        return np.empty(nbytes, np.uint8)

    buffer = SnapshotBuffer(allocate)
    buffer.reserve(state.whole())
    for number, which in enumerate([small, state, small, state]):
        checkpoint.begin(tmp_path / str(number), which.whole(), which.attributes, buffer=buffer).commit()
        assert which.loads(tmp_path / str(number))
    size = sum(array.nbytes for array in state.arrays.values())
    assert len(given) == 1
    assert size <= given[0] == buffer.nbytes <= size + 64 * (len(state.arrays) + 1)


@pytest.mark.parametrize("how", ["discarded", "dropped"])
def test_a_save_that_is_given_up_leaves_nothing_and_nobody_waits(small, tmp_path, gate, how):
    def save(comm):
        pending = small.begin(tmp_path / "c", comm)
        if how == "discarded":
            pending.discard()
            pending.discard()
            with pytest.raises(RuntimeError, match="was discarded"):
                pending.commit()
        del pending

    run_in_threads(3, save)
    gc.collect()
    assert os.listdir(tmp_path) == []
    gate.set()


def test_a_second_save_to_the_same_place_is_refused_while_one_is_pending(small, tmp_path):
    pending = small.begin(tmp_path / "c")
    with pytest.raises(CheckpointError, match="is writing it at this moment"):
        small.begin(tmp_path / "c")
    pending.commit()
    pending.commit()
    with pytest.raises(CheckpointError, match="never overwritten"):
        small.begin(tmp_path / "c")
    small.begin(tmp_path / "c", replace=True).commit()
    assert small.loads(tmp_path / "c")


def test_what_goes_wrong_ahead_of_the_agreement_is_the_same_error_on_all_ranks_and_leaves_nothing(
    small, tmp_path, monkeypatch
):
    last, copy = 2, SnapshotBuffer.copy
    broken = threading.Event()

    def failing(buffer, arrays):
        if broken.is_set() and buffer.number == last:
            raise CheckpointError("no room for a copy")
        return copy(buffer, arrays)

    def save(comm):
        buffer = SnapshotBuffer()
        buffer.number = comm.rank
        small.begin(tmp_path / "first", comm, buffer=buffer).commit()
        with pytest.raises(CheckpointError, match="never overwritten"):
            small.begin(tmp_path / "first", comm, buffer=buffer)
        arrays = small.pieces(comm.rank, comm.size)
        with pytest.raises(CheckpointError, match=f"attributes of rank {last} differ"):
            checkpoint.begin(tmp_path / "c", arrays, {"last": comm.rank == last}, comm, buffer=buffer)
        comm.barrier()
        broken.set()
        with pytest.raises(CheckpointError, match="no room for a copy"):
            small.begin(tmp_path / "c", comm, buffer=buffer)
        comm.barrier()
        assert os.listdir(tmp_path) == ["first"]
        broken.clear()
        comm.barrier()
        small.begin(tmp_path / "second", comm, buffer=buffer).commit()

    monkeypatch.setattr(SnapshotBuffer, "copy", failing)
    run_in_threads(3, save)
    assert digest(tmp_path / "second") == digest(tmp_path / "first")


def test_a_rank_that_saves_other_arrays_makes_all_agree_anew_after_others_have_begun(small, tmp_path, monkeypatch):
    copies, copy = [], SnapshotBuffer.copy
    monkeypatch.setattr(SnapshotBuffer, "copy", lambda *arguments: (copies.append(1), copy(*arguments))[1])
    more = LocalArray("one/more", (3,), np.dtype("i4"), ((0, np.arange(3, dtype="i4")),))

    def arrays(comm, last):
        return small.pieces(comm.rank, comm.size) + ([more] if last and comm.rank == comm.size - 1 else [])

    def save(comm):
        buffer = SnapshotBuffer()
        for number in range(3):
            folder, held = tmp_path / str(number), arrays(comm, last=number == 1)
            checkpoint.begin(folder, held, small.attributes, comm, buffer=buffer).commit()
        checkpoint.write(tmp_path / "waited", arrays(comm, last=True), small.attributes, comm)

    run_in_threads(3, save)
    assert len(copies) == 9
    assert digest(tmp_path / "1") == digest(tmp_path / "waited")
    assert digest(tmp_path / "0") == digest(tmp_path / "2")
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "waited"]


def test_saves_of_other_ranks_through_the_same_buffers_are_not_taken_for_the_last_one(small, tmp_path):
    def save(comm):
        buffer, group = SnapshotBuffer(), comm.split(comm.rank // 2)
        arrays = small.pieces(group.rank, group.size)
        checkpoint.begin(tmp_path / f"of {comm.rank // 2}", arrays, {}, group, buffer=buffer).commit()
        with pytest.raises(CheckpointError, match=r"is written by rank [01] and by rank [23]"):
            checkpoint.begin(tmp_path / "twice", arrays, {}, comm, buffer=buffer)
        group.close()

    run_in_threads(4, save)
    assert sorted(os.listdir(tmp_path)) == ["of 0", "of 1"]


def test_a_save_that_is_given_up_never_writes_to_the_file_of_the_next(small, tmp_path, gate):
    first = small.begin(tmp_path / "c")  # its thread waits before its first byte
    first.discard()
    other = small.plus_one()
    second = other.begin(tmp_path / "c")
    gate.set()
    first._writing.join()
    second.commit()
    assert other.loads(tmp_path / "c")


def test_no_rank_writes_before_all_have_copied(small, tmp_path, monkeypatch):
    copied, early = [], []
    copy, write = SnapshotBuffer.copy, atomic_folder.write_pieces

    def copying(buffer, arrays):
        result = copy(buffer, arrays)
        copied.append(threading.current_thread().name)
        return result

    def writing(*arguments):
        early.append(3 - len(copied))
        return write(*arguments)

    monkeypatch.setattr(SnapshotBuffer, "copy", copying)
    monkeypatch.setattr("mpizero.checkpoint.asynchronous.write_pieces", writing)
    run_in_threads(3, lambda comm: small.begin(tmp_path / "c", comm).commit())
    assert early == [0] * 3


def test_a_thread_that_the_system_refuses_is_told_to_all_ranks_at_the_commit(small, tmp_path, monkeypatch):
    start = threading.Thread.start

    def refusing(thread):
        if thread.name.startswith(f"rank 0{WRITER}"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def save(comm):
        with pytest.raises((RuntimeError, RemoteError), match="can't start new thread"):
            small.begin(tmp_path / "c", comm).commit()

    monkeypatch.setattr(threading.Thread, "start", refusing)
    run_in_threads(3, save)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="one priority a process")
def test_the_writing_thread_stands_back_and_no_other_does(small, tmp_path, monkeypatch):
    seen, write = [], atomic_folder.write_pieces

    def writing(*arguments):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write(*arguments)

    monkeypatch.setattr("mpizero.checkpoint.asynchronous.write_pieces", writing)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    small.begin(tmp_path / "c").commit()
    assert seen[0] > before
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
