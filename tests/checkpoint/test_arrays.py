"""What may be saved: names, shapes, types, and pieces that make up the whole exactly once."""

from __future__ import annotations

import os

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray
from mpizero.errors import CheckpointError, ConfigError
from mpizero.testing import run_in_threads

F4 = np.dtype("f4")


def array(path="parameters/w", shape=(4,), dtype=F4, pieces=None):
    return LocalArray(path, shape, dtype, ((0, np.zeros(4, F4)),) if pieces is None else pieces)


REFUSED = {
    "no name": ([array(path="")], "not allowed"),
    "upwards": ([array(path="a/../b")], "not allowed"),
    "absolute": ([array(path="/a")], "not allowed"),
    "a space at an end": ([array(path="a /b")], "space at an end"),
    "dot": ([array(path="a/./b")], "the part '.'"),
    "array and group": ([array(path="a"), array(path="a/b")], "cannot also be the group"),
    "objects": ([array(dtype=np.dtype(object))], "element type"),
    "bool": ([array(dtype=np.dtype(bool))], "element type"),
    "big-endian": ([array(dtype=np.dtype(">f4"))], "element type"),
    "negative shape": ([array(shape=(-4,))], "shape"),
    "huge shape": ([array(shape=(2**62,))], "larger than"),
    "other values": ([array(pieces=((0, np.zeros(4, "f8")),))], "values are <f8"),
    "not flat": ([array(pieces=((0, np.zeros((2, 2), F4)),))], "one-dimensional"),
    "strided": ([array(pieces=((0, np.zeros(8, F4)[::2]),))], "contiguous"),
    "too long": ([array(pieces=((1, np.zeros(4, F4)),))], "do not fit"),
    "before the start": ([array(pieces=((-1, np.zeros(4, F4)),))], "do not fit"),
    "gap": ([array(pieces=((0, np.zeros(1, F4)), (2, np.zeros(2, F4))))], "elements 1 to 1 are written by no rank"),
    "short": ([array(pieces=((0, np.zeros(3, F4)),))], "elements 3 to 3 are written by no rank"),
    "twice": ([array(), array()], "element 0 is written by rank 0 and by rank 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_make_no_whole_are_refused_by_name_without_a_trace(case, tmp_path):
    arrays, reason = REFUSED[case]
    with pytest.raises(CheckpointError, match=reason.replace("(", r"\(")) as caught:
        checkpoint.write(tmp_path / "c", arrays, {})
    assert "array" in str(caught.value)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.to_bytes(arrays, {})


@pytest.mark.parametrize(
    "attributes", [{"x": float("nan")}, {"x": object()}, {1: 2}, {"x": np.float32(1)}, {"x": b"y"}, [1]]
)
def test_attributes_that_json_would_change_are_refused(attributes, tmp_path):
    with pytest.raises(CheckpointError, match="attributes"):
        checkpoint.write(tmp_path / "c", [array()], attributes)
    assert os.listdir(tmp_path) == []


def test_attributes_come_back_as_they_were(tmp_path):
    attributes = {"text": "ä\n\u2028", "big": 2**60, "float": 0.1, "deep": {"a": [None, True, {"b": []}]}}
    checkpoint.write(tmp_path / "c", [array()], attributes)
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        assert reader.attributes == attributes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rank: (array(shape=(4 + rank,), pieces=()), {}), "rank 0 has shape (4,) of <f4, rank 1 has (5,)"),
        (lambda rank: (array(), {}), "element 0 is written by rank 0 and by rank 1"),
        (lambda rank: (array(pieces=()), {}), "elements 0 to 3 are written by no rank"),
        (lambda rank: (array(pieces=() if rank else None), {"x": rank}), "attributes of rank 1 differ"),
        (lambda rank: (array(path="/" if rank else "a", pieces=()), {}), "[rank 1] array name '/'"),
    ],
)
def test_ranks_that_contradict_each_other_get_the_same_error(change, reason, tmp_path):
    def save(comm):
        declared, attributes = change(comm.rank)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.write(tmp_path / "c", [declared], attributes, comm)
        return str(caught.value)

    texts = set(run_in_threads(2, save))
    assert len(texts) == 1
    assert reason in texts.pop()
    assert os.listdir(tmp_path) == []


def test_a_rank_need_not_list_arrays_it_has_no_part_of(tmp_path):
    def save(comm):
        checkpoint.write(tmp_path / "c", [array(path=f"parameters/{comm.rank}")] if comm.rank < 2 else [], {}, comm)
        with checkpoint.open_checkpoint(tmp_path / "c", comm) as reader:
            return sorted(reader.arrays)

    assert run_in_threads(3, save) == [["parameters/0", "parameters/1"]] * 3


def test_values_to_read_into_must_be_writable(tmp_path):
    checkpoint.write(tmp_path / "c", [array()], {})
    values = np.zeros(4, F4)
    values.flags.writeable = False
    with checkpoint.open_checkpoint(tmp_path / "c") as reader, pytest.raises(CheckpointError, match="writable"):
        reader.read([array(pieces=((0, values),))])


def test_back_ends_are_chosen_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"backend must be one of \['direct', 'mpio'\], got 'zarr'"):
        checkpoint.write(tmp_path / "c", [array()], {}, backend="zarr")
    with pytest.raises(ConfigError, match='use backend="direct"'):
        checkpoint.write(tmp_path / "c", [array()], {}, backend="mpio")
    assert os.listdir(tmp_path) == []


def test_every_type_keeps_every_bit(tmp_path):
    bits = np.random.default_rng(0).integers(0, 256, 56, np.uint8)
    kinds = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
    arrays = [LocalArray(f"parameters/{k}", (56 // int(k[1]),), np.dtype(k), ((0, bits.view(k)),)) for k in kinds]
    checkpoint.write(tmp_path / "c", arrays, {})
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        assert all(reader.read_whole(f"parameters/{k}").tobytes() == bits.tobytes() for k in kinds)
