"""Tensors of other programs become a checkpoint with the same bits, or are refused before anything is allocated."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint.convert import ImportRules, TensorFile, export, write_imported
from mpizero.checkpoint.inspect import element_types
from mpizero.errors import CheckpointError, ConfigError

numpy = pytest.importorskip("safetensors.numpy")

W = np.arange(6, dtype=np.float32).reshape(2, 3)
PLAIN = {"w": W, "layer.b": np.array([1, 2], np.float32)}


def become(folder: Path, tensors=None, expected=None, attributes=None, **rules) -> Path:
    """Save tensors as another program would, and import them."""
    numpy.save_file(PLAIN if tensors is None else tensors, folder / "f.safetensors")
    with TensorFile(folder / "f.safetensors") as source:
        write_imported(source, folder / "c", attributes or {}, ImportRules(**rules), expected=expected)
    return folder / "c"


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with checkpoint.open_checkpoint(path) as reader:
        return {name: reader.read_whole(name) for name in reader.arrays}


def test_a_round_trip_changes_nothing(state, tmp_path):
    state.save(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        export(reader, tmp_path / "f", "safetensors", state=True)
    with TensorFile(tmp_path / "f") as source:
        write_imported(source, tmp_path / "back", source.attributes, ImportRules())
    for name in ("manifest.json", "state.h5"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_a_round_trip_through_bfloat16_keeps_its_bits_and_its_type(small, tmp_path):
    small.save(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        export(reader, tmp_path / "f", "safetensors", dtype="bfloat16")
    with TensorFile(tmp_path / "f") as source:
        write_imported(source, tmp_path / "half", source.attributes, ImportRules())
        write_imported(source, tmp_path / "wide", source.attributes, ImportRules(dtype="float32"))
    with checkpoint.open_checkpoint(tmp_path / "half") as reader:
        assert set(element_types(reader).values()) == {"bfloat16"}
        export(reader, tmp_path / "g", "safetensors")
        assert TensorFile(tmp_path / "g").values("a").tobytes() == reader.read_whole("parameters/a").tobytes()
    found = arrays_of(tmp_path / "wide")
    assert found["parameters/a"].tolist() == small.arrays["parameters/a"].tolist()  # small numbers fit


def test_names_get_their_folder_and_rules_rename_drop_and_turn(tmp_path):
    tensors = {**PLAIN, "h.0.x": W, "h.1.x": W + 1, "mask": np.zeros(2, bool), "optimizer/exp_avg/w": -W}
    names = [("h.*.x", "blocks.*.y"), ("w", "parameters/head")]
    found = arrays_of(become(tmp_path, tensors, names=names, drop=["m*"], transpose=["head"]))
    assert set(found) == {
        "parameters/head",
        "parameters/layer.b",
        "parameters/blocks.0.y",
        "parameters/blocks.1.y",
        "optimizer/exp_avg/w",
    }
    assert found["parameters/head"].tolist() == W.T.tolist()
    assert found["parameters/blocks.1.y"].tolist() == (W + 1).tolist()


def test_every_element_type_that_a_checkpoint_holds_arrives(tmp_path):
    types = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
    tensors = {kind: np.arange(3).astype(kind) for kind in types} | {"none": np.zeros((0, 2), "f4")}
    found = arrays_of(become(tmp_path, tensors))
    assert {path.removeprefix("parameters/"): (a.dtype, a.tolist()) for path, a in found.items()} == {
        name: (a.dtype, a.tolist()) for name, a in tensors.items()
    }


EXPECTED = {"parameters/w": ((2, 3), "float32"), "parameters/layer.b": ((2,), "float32")}


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"parameters/v": ((2, 3), "float32")}, r"missing: v; .*--map.*; unexpected: layer.b, w; .*--drop"),
        (EXPECTED | {"parameters/w": ((3, 2), "float32")}, r"w is float32 \[2, 3\], .*\[3, 2\] \(--transpose w"),
        (EXPECTED | {"parameters/w": ((2, 3), "float64")}, r"expected float64 \[2, 3\] \(--dtype float64 converts"),
        (EXPECTED | {"parameters/w": ((7,), "float32")}, r"w is float32 \[2, 3\], expected float32 \[7\]$"),
    ],
)
def test_tensors_of_another_model_are_refused_with_the_way_out(tmp_path, expected, message):
    with pytest.raises(CheckpointError, match=message):
        become(tmp_path, expected=expected)
    assert os.listdir(tmp_path) == ["f.safetensors"]


def test_optimizer_arrays_may_be_missing_but_only_all_of_them(tmp_path):
    expected = EXPECTED | {"optimizer/m/w": ((2, 3), "float32"), "optimizer/v/w": ((2, 3), "float32")}
    with pytest.raises(CheckpointError, match="missing: optimizer/v/w"):
        become(tmp_path, {**PLAIN, "optimizer/m/w": W}, expected)
    saved = {"mpizero": {"optimizer": {"name": "AdamW"}, "step_number": 3}, "bfloat16": ["parameters/w"]}
    with checkpoint.open_checkpoint(become(tmp_path, expected=expected, attributes=saved)) as reader:
        assert reader.attributes == {"mpizero": {"optimizer": None, "step_number": 3}}


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"names": [("a", "b")]}, ConfigError, "map a: no tensor of .* has such a name"),
        ({"names": [("w*", "b")]}, ConfigError, r"must be OLD=NEW, with one \* in both or none"),
        ({"names": [("w", "")]}, ConfigError, "must be OLD=NEW"),
        ({"transpose": ["q"]}, ConfigError, "transpose q: no array has such a name"),
        ({"drop": ["m*", "extra"]}, ConfigError, "drop [m*]{2}: no tensor of .* has such a name"),
        ({"dtype": "int8"}, ConfigError, "type 'int8'"),
        ({"names": [("w", "layer.b")]}, CheckpointError, "both become 'parameters/layer.b'"),
        ({"names": [("w", "../w")]}, CheckpointError, "is not allowed"),
    ],
)
def test_rules_that_mean_nothing_are_refused(tmp_path, rules, error, message):
    with pytest.raises(error, match=message):
        become(tmp_path, **rules)


def test_an_element_type_without_a_place_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="tensor 'z' has elements of type BOOL.*--drop"):
        become(tmp_path, {"z": np.zeros(3, bool)})


def test_what_exists_is_replaced_only_on_demand(tmp_path):
    become(tmp_path)
    with pytest.raises(ConfigError, match="exists; choose another name, or --force"):
        become(tmp_path)


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape=(2,), dtype="F32", offsets=(0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DATA = bytes(8)
HOSTILE = {
    "empty": b"",
    "not safetensors": b"PK\x03\x04" + bytes(100),
    "header beyond the end": raw(b"{}", length=10**6),
    "header not JSON": raw(b"{]"),
    "header not UTF-8": raw(b'{"\xff":1}'),
    "deep nesting": raw(b"[" * 100_000),
    "a petabyte": raw({"a": entry((2**50,), offsets=(0, 2**52))}, DATA),
    "shape of other size": raw({"a": entry((3,))}, DATA),
    "negative shape": raw({"a": entry((-2,))}, DATA),
    "partial overlap": raw({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "gap": raw({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "backwards": raw({"a": entry(offsets=(8, 0))}, DATA),
    "truncated": raw({"a": entry()}, DATA[:5]),
    "bytes behind": raw({"a": entry()}, DATA + b"x"),
    "unknown type": raw({"a": entry(dtype="F99")}, DATA),
    "a name twice": raw(b'{"a":%s,"a":%s}' % (json.dumps(entry()).encode(), json.dumps({}).encode()), DATA),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [2]}}, DATA),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_is_allocated(tmp_path, name):
    path = tmp_path / "f.safetensors"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="f.safetensors: "):
            TensorFile(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_huge_header_is_not_even_read(tmp_path):
    path = tmp_path / "f.safetensors"
    with path.open("wb") as file:
        file.write((50_000_000).to_bytes(8, "little"))
        file.truncate(60_000_000)
    with pytest.raises(CheckpointError, match="a header of 50000000 bytes, at most 16777216"):
        TensorFile(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing"])
def test_what_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "f"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file|no such file"):
        TensorFile(path)


@pytest.mark.parametrize("name", ["a//b", "a\nb", "x" * 600, "e\u0301"])
def test_names_that_a_checkpoint_cannot_have_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="is not allowed"):
        become(tmp_path, {name: W})


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_strange_metadata_are_ignored(tmp_path, text):
    numpy.save_file(PLAIN, tmp_path / "f", metadata={"mpizero": text})
    assert TensorFile(tmp_path / "f").attributes == {}
