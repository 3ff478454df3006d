from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import CheckpointMissingError
from mpizero.errors import CheckpointError
from mpizero.testing import run_in_threads


@pytest.fixture
def folder(small, tmp_path):
    small.save(tmp_path / "c")
    return tmp_path / "c"


def reseal(folder: Path, change) -> None:
    """Change the manifest as an attacker would: with a matching checksum."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes().splitlines()[0])
    line = change(body)
    if not isinstance(line, bytes):
        line = json.dumps(body).encode()
    line += b"\n"
    path.write_bytes(line + f'{{"sha256":"{hashlib.sha256(line).hexdigest()}"}}\n'.encode())


def flip(path: Path, position: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize("name", ["state.h5", "manifest.json"])
def test_one_flipped_bit_in_any_byte_is_found(small, folder, name):
    path = folder / name
    places = {}
    with h5py.File(folder / "state.h5") as file:
        for array, whole in small.arrays.items():
            offset = file[array].id.get_offset()
            places.update(dict.fromkeys(range(offset, offset + whole.nbytes), array))
    for position in range(path.stat().st_size):
        flip(path, position, position % 8)
        with pytest.raises(CheckpointError) as caught:
            small.loads(folder)
        if name == "state.h5":
            expected = f"array '{places[position]}'" if position in places else "HDF5 structure"
            assert expected in str(caught.value)
            assert "checksum mismatch" in str(caught.value)
        else:
            assert "manifest.json" in str(caught.value)
        flip(path, position, position % 8)
    assert small.loads(folder)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_flipped_bit_is_found_whoever_reads_its_block_in_parts(state, tmp_path, ranks):
    state.save(tmp_path / "c")
    path, victim = tmp_path / "c" / "state.h5", "optimizer/exp_avg/embedding.weight"
    with h5py.File(path) as file:
        offset = file[victim].id.get_offset()
    for inside in (0, 4 * 1024 * 1024 - 1, 5_000_000, state.arrays[victim].nbytes - 1):
        flip(path, offset + inside)

        def load(comm):
            with pytest.raises(CheckpointError, match=f"array '{victim}': checksum mismatch") as caught:
                state.loads(tmp_path / "c", comm)
            return str(caught.value)

        assert len(set(run_in_threads(ranks, load))) == 1
        flip(path, offset + inside)
    assert all(run_in_threads(ranks, lambda comm: state.loads(tmp_path / "c", comm)))


@pytest.mark.parametrize("name", ["state.h5", "manifest.json"])
def test_truncation_at_any_length_is_found(small, folder, name):
    path = folder / name
    whole = path.read_bytes()
    lengths = range(0, len(whole), 3 if name == "manifest.json" else 29)
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=name):
            small.loads(folder)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=name):
        small.loads(folder)


def test_a_tail_of_zeros_is_found(small, folder):
    path = folder / "state.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    with pytest.raises(CheckpointError):
        small.loads(folder)


def test_bytes_of_another_step_are_found(small, folder, tmp_path):
    other = type(small)({path: whole + 1 for path, whole in small.arrays.items()})
    other.save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "state.h5", folder / "state.h5")
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        small.loads(folder)


@pytest.mark.parametrize("missing", ["c", "c/manifest.json", "c/state.h5"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_missing_is_a_file_not_found_error_on_every_rank(small, folder, missing, ranks):
    path = folder.parent / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def load(comm):
        with pytest.raises(FileNotFoundError, match=path.name) as caught:
            small.loads(folder, comm)
        assert isinstance(caught.value, CheckpointMissingError)
        return "\n" not in str(caught.value)

    assert all(run_in_threads(ranks, load))


def make_file(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")
    (path.parent / "elsewhere").write_bytes(b"secret")


@pytest.mark.parametrize("make", [make_file, make_link, Path.mkdir, os.mkfifo, Path.touch])
@pytest.mark.parametrize("name", ["manifest.json", "state.h5"])
def test_something_else_in_place_of_a_file_is_refused_at_once(small, folder, name, make):
    (folder / name).unlink()
    make(folder / name)
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=name):
        small.loads(folder)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("make", [make_file, os.mkfifo])
def test_a_file_in_place_of_the_folder_is_refused(small, tmp_path, make):
    make(tmp_path / "c")
    with pytest.raises(CheckpointError, match="not an mpizero checkpoint"):
        small.loads(tmp_path / "c")


def entry(body):
    return body["arrays"]["parameters/a"]


def rename(body, name):
    body["arrays"][name] = {**body["arrays"].pop("parameters/a"), "dataset": name}


HOSTILE = {
    "8 TiB from nothing": lambda b: entry(b).update(shape=[2**43]),
    "more than any address": lambda b: entry(b).update(shape=[2**40, 2**40, 2**40]),
    "huge beside zero": lambda b: entry(b).update(shape=[0, 2**62, 2**62]),
    "negative size": lambda b: entry(b).update(shape=[-5, 8]),
    "fractional size": lambda b: entry(b).update(shape=[5.0, 8]),
    "true as size": lambda b: entry(b).update(shape=[True, 40]),
    "thousands of axes": lambda b: entry(b).update(shape=[1] * 5000),
    "objects": lambda b: entry(b).update(dtype="|O"),
    "big-endian": lambda b: entry(b).update(dtype=">f4"),
    "offset behind the end": lambda b: entry(b).update(offset=10**9),
    "negative offset": lambda b: entry(b).update(offset=-1),
    "overlap": lambda b: entry(b).update(offset=b["arrays"]["optimizer/exp_avg/a"]["offset"] + 4),
    "too few checksums": lambda b: entry(b).update(crc32=""),
    "checksum of letters": lambda b: entry(b).update(crc32="zzzzzzzz"),
    "one more key": lambda b: entry(b).update(code="import os"),
    "another dataset": lambda b: entry(b).update(dataset="parameters/b"),
    "upwards": lambda b: rename(b, "parameters/../../x"),
    "absolute": lambda b: rename(b, "/etc/passwd"),
    "empty part": lambda b: rename(b, "parameters//a"),
    "dot": lambda b: rename(b, "./a"),
    "control characters": lambda b: rename(b, "parameters/a\n"),
    "long": lambda b: rename(b, "a" * 513),
    "array and group": lambda b: rename(b, "parameters"),
    "another file": lambda b: b["state"].update(file="../../etc/passwd"),
    "other state size": lambda b: b["state"].update(bytes=2**50),
    "another format": lambda b: b.update(format="pickle"),
    "newer version": lambda b: b.update(version=2),
    "other blocks": lambda b: b.update(block_bytes=1),
    "arrays as a list": lambda b: b.update(arrays=[]),
    "attributes as text": lambda b: b.update(attributes="x"),
    "no arrays key": lambda b: b.pop("arrays") and None,
    "deep": lambda b: b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": lambda b: b'{"format":' + b"9" * 100_000 + b"}",
    "not a number": lambda b: b'{"format":"mpizero-checkpoint","version":NaN}',
    "twice": lambda b: b'{"format":1,"format":"mpizero-checkpoint"}',
    "no object": lambda b: b"[1]",
    "no JSON": lambda b: b"import os",
    "not text": lambda b: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_with_a_good_seal_are_refused_within_a_second(small, folder, case):
    reseal(folder, HOSTILE[case])
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        small.loads(folder)
    assert time.monotonic() - started < 1
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_huge_manifest_is_not_read_to_its_end(small, folder):
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(10**12)
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="larger than"):
        small.loads(folder)
    assert time.monotonic() - started < 5


def test_a_huge_state_file_that_is_mostly_no_array_is_not_read(small, folder):
    with (folder / "state.h5").open("r+b") as file:
        file.truncate(10**12)
    reseal(folder, lambda b: b["state"].update(bytes=10**12))
    with pytest.raises(CheckpointError, match="belong to no array"):
        small.loads(folder)


def external_link(file):
    file["parameters/a"] = h5py.ExternalLink("/etc/passwd", "/x")


def external_storage(file):
    file.create_dataset("parameters/a", (5, 8), "<f4", external=[("/etc/passwd", 0, 160)])


def virtual(file):
    layout = h5py.VirtualLayout((5, 8), "<f4")
    layout[...] = h5py.VirtualSource("/tmp/other.h5", "x", (5, 8))
    file.create_virtual_dataset("parameters/a", layout)


def soft_link(file):
    file["parameters/a"] = h5py.SoftLink("/parameters/b")


@pytest.mark.parametrize("craft", [external_link, external_storage, virtual, soft_link])
def test_crafted_hdf5_structure_is_refused_before_hdf5_parses_it(small, folder, craft, monkeypatch):
    with h5py.File(folder / "state.h5", "r+") as file:
        del file["parameters/a"]
        craft(file)
    monkeypatch.setattr(h5py, "File", None)
    with pytest.raises(CheckpointError, match=r"state\.h5"):
        small.loads(folder)


@pytest.mark.parametrize("craft", [external_link, external_storage, virtual, soft_link])
def test_the_full_check_refuses_crafted_structure_under_a_good_seal(folder, craft):
    path = folder / "state.h5"
    with h5py.File(path, "r+") as file:
        del file["parameters/a"]
        craft(file)
    data = path.read_bytes()

    def seal(body):
        from mpizero.checkpoint.manifest import Manifest, StoredArray

        body["state"]["bytes"] = len(data)
        arrays = {
            name: StoredArray(tuple(e["shape"]), np.dtype(e["dtype"]), e["offset"], ())
            for name, e in body["arrays"].items()
        }
        ranges = Manifest({}, arrays, len(data), 0).structure_ranges
        import zlib

        structure = b"".join(data[start : start + length] for start, length in ranges)
        body["state"]["structure_crc32"] = f"{zlib.crc32(structure):08x}"

    reseal(folder, seal)
    with pytest.raises(CheckpointError, match="link|outside the file|virtual"):
        checkpoint.verify(folder)


def test_the_full_check_finds_a_manifest_that_names_arrays_wrongly(folder):
    def swap(body):
        arrays = body["arrays"]
        arrays["parameters/a"]["shape"] = [8, 5]

    reseal(folder, swap)
    with pytest.raises(CheckpointError, match=r"\(5, 8\) <f4 in the file, \(8, 5\)"):
        checkpoint.verify(folder)


def test_the_full_check_finds_damage_in_any_array(folder):
    with h5py.File(folder / "state.h5") as file:
        offset = file["parameters/b"].id.get_offset()
    flip(folder / "state.h5", offset)
    with pytest.raises(CheckpointError, match="array 'parameters/b': checksum mismatch"):
        checkpoint.verify(folder)


def test_damaged_bytes_are_refused(small):
    image = checkpoint.to_bytes(small.whole(), {"x": 1})
    step = 5
    for position in range(0, len(image), step):
        damaged = bytearray(image)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            checkpoint.from_bytes(damaged).read(small.pieces(0, 1, fill=False))
    for length in range(0, len(image), step):
        with pytest.raises(CheckpointError):
            checkpoint.from_bytes(image[:length])
    with pytest.raises(CheckpointError, match="truncated or foreign"):
        checkpoint.from_bytes(b"")
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpoint.from_bytes(b"\xff" * 8 + b"mpizero1")
