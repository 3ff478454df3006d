"""A checkpoint in another format has the same values, whole or not at all, and needs the memory of a few blocks."""

from __future__ import annotations

import errno
import json
import os
import sys
from importlib.util import find_spec

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero import checkpoint
from mpizero.checkpoint import npz
from mpizero.checkpoint.convert import FORMATS, TensorFile, export
from mpizero.checkpoint.format import BLOCK
from mpizero.checkpoint.inspect import convert, element_types
from mpizero.errors import CheckpointError, ConfigError
from tests.checkpoint.conftest import State
from tests.checkpoint.sealed import first_byte, flip
from tests.traced import traced_peak

needs_library = pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors")
KINDS = [pytest.param(kind, marks=needs_library if kind == "safetensors" else ()) for kind in FORMATS]


def load(path, kind) -> dict[str, np.ndarray]:
    """Read an exported file as its users do."""
    if kind == "npz":
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    if kind == "hdf5":
        found = {}
        with h5py.File(path) as file:
            file.visititems(lambda name, item: found.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
        return found
    numpy = pytest.importorskip("safetensors.numpy")
    return numpy.load_file(path)


@pytest.fixture(scope="module")
def stored(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "c"
    state.save(folder)
    return folder


@pytest.fixture
def opened(stored):
    """A checkpoint of several blocks."""
    with checkpoint.open_checkpoint(stored) as reader:
        yield reader


@pytest.fixture
def opened_small(small, tmp_path):
    small.save(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        yield reader


def bfloat16(values) -> np.ndarray:
    return convert(np.asarray(values, np.float32), "float32", "bfloat16")


@pytest.fixture
def half(tmp_path):
    """A checkpoint with a bfloat16 array beside true 16-bit integers."""
    patterns = np.arange(0, 2**16, 7, dtype=np.uint16)
    arrays = {"parameters/w": patterns, "parameters/i": patterns, "parameters/f": np.float32([1, -2])}
    State(arrays, {"bfloat16": ["parameters/w"]}).save(tmp_path / "half")
    with checkpoint.open_checkpoint(tmp_path / "half") as reader:
        yield reader, patterns


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_comes_out_bit_for_bit(state, opened, tmp_path, kind):
    export(opened, tmp_path / "out", kind, state=True)
    found = load(tmp_path / "out", kind)
    wanted = {path.removeprefix("parameters/"): a for path, a in state.arrays.items()}
    assert found.keys() == wanted.keys()
    for name, whole in wanted.items():
        assert (found[name].shape, found[name].dtype) == (whole.shape, whole.dtype)
        assert found[name].tobytes() == whole.tobytes()


def test_a_safetensors_file_has_the_bytes_that_the_library_writes(small, opened_small, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    export(opened_small, tmp_path / "out", "safetensors", state=True)
    arrays = {path.removeprefix("parameters/"): a for path, a in small.arrays.items()}
    metadata = {"mpizero": '{"layout":[1,2],"note":null,"step":7}'}
    numpy.save_file(arrays, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_the_same_checkpoint_gives_the_same_bytes(opened_small, tmp_path, kind):
    for name in ("one", "two"):
        export(opened_small, tmp_path / name, kind, state=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_no_array_is_held_whole(state, opened, tmp_path, kind):
    """The largest array has more than two blocks."""
    export(opened, tmp_path / "warm", kind, pattern="*.scale")
    assert max(a.nbytes for a in state.arrays.values()) > 2 * BLOCK
    assert traced_peak(lambda: export(opened, tmp_path / "out", kind, replace=True)) < 1.2 * BLOCK


def test_names_are_chosen_by_patterns_with_and_without_their_folder(opened, tmp_path):
    for pattern, count in (("blocks.*", 2), ("parameters/blocks.0.s*", 1), ("*", 4)):
        assert len(export(opened, tmp_path / "out", "npz", pattern=pattern, replace=True)) == count
    items = export(opened, tmp_path / "out", "npz", state=True, pattern="optimizer/exp_avg/*", replace=True)
    assert [item.name for item in items] == ["optimizer/exp_avg/embedding.weight"]
    with pytest.raises(ConfigError, match="none of its parameters fits the pattern 'exp_avg'"):
        export(opened, tmp_path / "none", "npz", pattern="exp_avg")
    assert not (tmp_path / "none").exists()


def test_bfloat16_keeps_its_bits_where_they_are_known_and_its_values_elsewhere(half, tmp_path):
    reader, patterns = half
    assert element_types(reader) == {"parameters/f": "float32", "parameters/i": "uint16", "parameters/w": "bfloat16"}
    wide = (patterns.astype(np.uint32) << 16).view(np.float32)
    for kind in ("npz", "hdf5"):
        export(reader, tmp_path / kind, kind)
        found = load(tmp_path / kind, kind)
        assert found["w"].tobytes() == wide.tobytes()
        assert found["i"].tobytes() == patterns.tobytes()
    pytest.importorskip("safetensors")
    export(reader, tmp_path / "safetensors", "safetensors")
    with TensorFile(tmp_path / "safetensors") as file:
        assert file.tensors["w"].code == "BF16"
        assert file.tensors["i"].code == "U16"
        assert file.values("w").tobytes() == patterns.tobytes()


@pytest.mark.parametrize("tag", [None, "parameters/w", [1, None], ["nothing", "parameters/f"]])
def test_a_strange_list_of_bfloat16_arrays_does_no_harm(tmp_path, tag):
    State({"parameters/f": np.float32([1])}, {"bfloat16": tag}).save(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        assert element_types(reader) == {"parameters/f": "float32"}


@given(st.lists(st.floats(-3.3e38, 3.3e38), max_size=20))
def test_float64_is_rounded_once_to_the_nearest_bfloat16(values):
    wide = np.array(values, np.float64)
    found = convert(convert(wide, "float64", "bfloat16"), "bfloat16", "float64")
    bits = (bfloat16(wide.astype(np.float32)).astype(np.int64) + np.array([[-1], [0], [1]])) & 0xFFFF
    near = convert(bits.astype(np.uint16).ravel(), "bfloat16", "float64").reshape(3, -1)
    near = np.where(np.isfinite(near), near, found)  # below zero lies a NaN
    assert (np.abs(found - wide) <= np.abs(near - wide).min(0)).all()


def test_a_value_above_a_tie_is_not_rounded_twice():
    above = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 2**-8 - 2**-40])
    assert convert(convert(above, "float64", "bfloat16"), "bfloat16", "float64").tolist() == [1 + 2**-7, 1.0, 1.0]


@needs_library
@pytest.mark.parametrize(("dtype", "limit"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_values_too_large_for_a_type_are_an_error_that_leaves_nothing(tmp_path, dtype, limit):
    State({"parameters/x": np.array([1.0, np.inf, limit, np.nan], np.float32)}).save(tmp_path / "c")
    with (
        checkpoint.open_checkpoint(tmp_path / "c") as reader,
        pytest.raises(ConfigError, match=f"array 'parameters/x': 1 values are too large for {dtype}"),
    ):
        export(reader, tmp_path / "out", "safetensors", dtype=dtype)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "zip"}, "format 'zip': must be one of safetensors, npz, hdf5"),
        ({"dtype": "int8"}, "type 'int8': must be one of bfloat16"),
        ({"dtype": "bfloat16"}, "only safetensors files know it"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_what_is_allowed(opened_small, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        export(opened_small, tmp_path / "out", **{"format": "npz", **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_exports_nothing_and_leaves_the_old_file(small, opened_small, tmp_path, kind):
    flip(tmp_path / "c" / "state.h5", first_byte(tmp_path / "c", "parameters/b") + 8)
    (tmp_path / "out").write_text("old")
    with pytest.raises(CheckpointError, match="array 'parameters/b': checksum mismatch"):
        export(opened_small, tmp_path / "out", kind, replace=True)
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["c", "out"]


def test_a_file_that_exists_is_replaced_only_on_demand(opened_small, tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(ConfigError, match="exists; choose another name, or --force to replace it"):
        export(opened_small, tmp_path / "out", "npz")
    assert (tmp_path / "out").read_text() == "old"
    export(opened_small, tmp_path / "out", "npz", replace=True)
    assert "a" in load(tmp_path / "out", "npz")
    with pytest.raises(ConfigError, match="is a folder"):
        export(opened_small, tmp_path / "c", "npz", replace=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_an_error_and_leaves_nothing(opened_small, tmp_path, kind, monkeypatch):
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr("mpizero.checkpoint.atomic_folder.os.pwrite", _full)
    monkeypatch.setattr("mpizero.checkpoint.npz.as_bytes", _full)
    monkeypatch.setattr("mpizero.checkpoint.convert.as_bytes", _full)
    with pytest.raises(OSError, match="No space left on device"):
        export(opened_small, tmp_path / "out", kind)
    assert sorted(os.listdir(tmp_path)) == before


def _full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_attributes_travel_however_many_they_are(small, tmp_path):
    attributes = {"long": ["x" * 1000] * 200, "umlaut": "ä"}
    State(small.arrays, attributes).save(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        export(reader, tmp_path / "out.h5", "hdf5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert json.loads(file.attrs["attributes"]) == attributes


def test_without_the_library_the_error_tells_how_to_get_it(opened_small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"pip install 'mpizero\[safetensors\]'"):
        export(opened_small, tmp_path / "out", "safetensors")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_may_have_the_name_of_something_of_the_format(tmp_path, kind):
    """Every name comes back; or the error says that the format has no room for it, and nothing is written."""
    names = ["a", "file", "args", "allow_pickle", "x.npy", "__metadata__", "attributes"]
    State({f"parameters/{name}": np.arange(3, dtype=np.float32) for name in names}).save(tmp_path / "c")
    out, pattern = tmp_path / f"out.{kind}", "*"
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        if kind == "safetensors":
            with pytest.raises(ConfigError, match="'__metadata__': a safetensors file keeps its metadata under this"):
                export(reader, out, kind)
            assert not out.exists()
            names.remove("__metadata__")
            pattern = "*[!_]"
        export(reader, out, kind, pattern=pattern)
    found = load(out, kind)
    assert {name: value.tolist() for name, value in found.items()} == dict.fromkeys(names, [0, 1, 2])


def test_an_array_is_read_though_another_thread_disturbs_pythons_parser(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.7 and 3.12.0 then raise SystemError, now and then, in ``ast.literal_eval``."""
    calls = []

    def disturbed(member):
        calls.append(member.read(5))
        if len(calls) % 3:
            raise SystemError("AST constructor recursion depth mismatch (before=54, after=47)")
        member.seek(member.tell() - 5)
        return parse(member)

    parse = npz._HEADERS[1, 0]
    np.savez(tmp_path / "a.npz", a=np.arange(6.0))
    monkeypatch.setitem(npz._HEADERS, (1, 0), disturbed)
    assert npz.read_arrays(tmp_path / "a.npz")["a"].tolist() == list(range(6))
    assert len(set(calls)) == 1
