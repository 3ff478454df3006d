"""Files that somebody made up: a clear error, little time and memory, and no other file opened.

Every case is crafted under matching checksums where it has any, as by somebody who knows the format, and met in a
forked child by everything that reads: loading, the search for the newest one, the full check, and loading from bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest

from mpizero import checkpoint, errors
from mpizero._util.numbers import crc32
from mpizero.checkpoint import format
from mpizero.checkpoint.format import ARRAY_LIMIT, Manifest, StoredArray
from mpizero.errors import CheckpointError
from tests.checkpoint.sealed import seal

#: Seconds of processor time after which a reader is killed (one takes milliseconds), and the most memory of one.
SECONDS, MEGABYTES = 30, 100


class Met(NamedTuple):
    """What a reader did with a case, measured in a child process."""

    error: str
    message: str
    megabytes: float


class Watch:
    """Tells whether any process has opened a file of a folder, through any library (inotify)."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None)
        self._queue = self._libc.inotify_init1(os.O_NONBLOCK)
        opened = 0x20
        assert self._libc.inotify_add_watch(self._queue, os.fsencode(folder), opened) >= 0

    def opened(self) -> list[str]:
        try:
            events = os.read(self._queue, 65536)
        except BlockingIOError:
            return []
        names, place = [], 0
        while place < len(events):
            _, _, _, length = struct.unpack_from("iIII", events, place)
            names.append(events[place + 16 : place + 16 + length].rstrip(b"\0").decode())
            place += 16 + length
        return names

    def close(self) -> None:
        os.close(self._queue)


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def meet(*actions) -> list[Met]:
    """Run ``actions`` in a forked child: the error of each, and the growth of its peak memory since the fork.

    A fork of a process that has run tests costs more than most of what is read.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = peak()
        for action in actions:
            error = message = ""
            try:
                action()
            except BaseException as caught:
                error, message = type(caught).__name__, str(caught)
            os.write(write, json.dumps([error, message[:5000], peak() - before]).encode() + b"\n")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the process died in action {len(told)}: {status}"
    return [Met(*json.loads(line)) for line in told]


def load(small, folder):
    with checkpoint.open_checkpoint(folder) as reader:
        reader.read(small.pieces(0, 1, fill=False))
        for path in reader.arrays:
            reader.read_whole(path)


def load_bytes(small, image):
    with checkpoint.from_bytes(image) as reader:
        reader.read(small.pieces(0, 1, fill=False))


def image_of(folder):
    """The bytes that would hold the same checkpoint."""
    manifest = (folder / "manifest.json").read_bytes()
    return (folder / "state.h5").read_bytes() + manifest + len(manifest).to_bytes(8, "little") + b"mpizero1"


def search(small, folder):
    passed: list[str] = []
    assert checkpoint.latest(folder.parent, report=passed.append) is None
    raise CheckpointError(passed[0])


@pytest.fixture
def folder(small, tmp_path):
    small.save(tmp_path / "run" / "step_00000001")
    return tmp_path / "run" / "step_00000001"


@pytest.fixture
def outside(tmp_path):
    """A folder of files that nobody may open."""
    secrets = tmp_path / "outside"
    secrets.mkdir()
    (secrets / "raw").write_bytes(bytes(160))
    with h5py.File(secrets / "other.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((5, 8), np.float32), maxshape=(None, 8))
    watch = Watch(secrets)
    yield secrets
    assert watch.opened() == []
    watch.close()


def met_by(small, folder, readers):
    """What each reader does with a checkpoint, or with the bytes that would hold it."""
    image = image_of(folder) if load_bytes in readers else b""
    return zip(
        readers, meet(*(lambda r=read: r(small, image if r is load_bytes else folder) for read in readers)), strict=True
    )


def require_refused(read, met, match=""):
    """Check that a reader refuses it, and says ``match``; of bytes nobody can say which file they are."""
    assert issubclass(getattr(errors, met.error, Exception), CheckpointError), (read, met)
    assert met.megabytes < MEGABYTES, met
    assert len(met.message) < 700, (read, met)
    assert met.message.isprintable(), (read, met)
    assert match in met.message or read is load_bytes, (read, met)


def refused(small, folder, readers, match=""):
    for read, met in met_by(small, folder, readers):
        require_refused(read, met, match)


def check(small, folder):
    checkpoint.verify(folder)


READERS = (load, search, check)


def seal_structure(folder: Path) -> None:
    """Make the manifest's checksums those of a changed state file."""
    data = (folder / "state.h5").read_bytes()

    def change(body):
        arrays = {
            name: StoredArray(tuple(e["shape"]), np.dtype(e["dtype"]), e["offset"], ())
            for name, e in body["arrays"].items()
        }
        ranges = Manifest({}, arrays, len(data), 0).structure_ranges
        structure = b"".join(data[start : start + length] for start, length in ranges)
        body["state"].update(bytes=len(data), structure_crc32=f"{crc32(structure):08x}")
        for entry in body["arrays"].values():
            size = int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize
            entry["crc32"] = f"{crc32(data[entry['offset'] : entry['offset'] + size]):08x}"

    seal(folder, change)


def entry(body):
    return body["arrays"]["parameters/a"]


def rename(body, name):
    body["arrays"][name] = {**body["arrays"].pop("parameters/a"), "dataset": name}


def empty(name):
    return {"dataset": name, "shape": [0], "dtype": "<f4", "offset": 0, "crc32": ""}


def many(body, count, name="a{}"):
    body["arrays"].update({name.format(i): empty(name.format(i)) for i in range(count)})


def nested(depth, inner=b"1"):
    return b"[" * depth + inner + b"]" * depth


def with_attributes(text):
    """A whole manifest whose attributes are the given JSON."""
    return lambda b: json.dumps(b | {"attributes": 0}).encode().replace(b'"attributes": 0', b'"attributes": ' + text)


MANIFESTS = {
    "a petabyte": lambda b: entry(b).update(shape=[2**48]),
    "huge beside zero": lambda b: entry(b).update(shape=[0, 2**62, 2**62]),
    "sizes of thousands of digits": lambda b: entry(b).update(shape=[10**4000] * 20),
    "negative size": lambda b: entry(b).update(shape=[-5, 8]),
    "true as size": lambda b: entry(b).update(shape=[True, 40]),
    "thousands of axes": lambda b: entry(b).update(shape=[1] * 5000),
    "objects": lambda b: entry(b).update(dtype="|O"),
    "records": lambda b: entry(b).update(dtype=[["x", "<f4"]]),
    "a type of a million letters": lambda b: entry(b).update(dtype="f" * 1_000_000),
    "negative offset": lambda b: entry(b).update(offset=-1),
    "overlap": lambda b: entry(b).update(offset=b["arrays"]["optimizer/exp_avg/a"]["offset"] + 4),
    "too few checksums": lambda b: entry(b).update(crc32=""),
    "checksum of letters": lambda b: entry(b).update(crc32="zzzzzzzz"),
    "one more key": lambda b: entry(b).update(code="import os"),
    "another dataset": lambda b: entry(b).update(dataset="parameters/b"),
    "upwards": lambda b: rename(b, "parameters/../../x"),
    "control characters": lambda b: rename(b, "parameters/a\n\x1b[2J"),
    "a name of a million letters": lambda b: rename(b, "a" * 1_000_000),
    "array and group": lambda b: rename(b, "parameters"),
    "another file": lambda b: b["state"].update(file="../../etc/passwd"),
    "other state size": lambda b: b["state"].update(bytes=2**50),
    "another format": lambda b: b.update(format="pickle"),
    "newer version": lambda b: b.update(version=2),
    "version 1.0": lambda b: b.update(version=1.0),
    "blocks as a fraction": lambda b: b.update(block_bytes=float(b["block_bytes"])),
    "a key more": lambda b: b.update(code="import os"),
    "no checksum of the file": lambda b: b["state"].pop("structure_crc32") and None,
    "a version of lists": lambda b: json.dumps(b).encode().replace(b'"version": 1', b'"version": ' + nested(900)),
    "arrays as a list": lambda b: b.update(arrays=[]),
    "attributes as text": lambda b: b.update(attributes="x"),
    "deep": lambda b: b'{"format":' + nested(100_000) + b"}",
    "deep attributes": with_attributes(b'{"x":' + nested(200) + b"}"),
    "an infinite number": with_attributes(b'{"x":1e999}'),
    "not a number": with_attributes(b'{"x":NaN}'),
    "a number that no float holds": with_attributes(b'{"x":1' + b"0" * 400 + b"}"),
    "UTF-16": lambda b: json.dumps(b).encode("utf-16-le"),
    "a surrogate as bytes": with_attributes(b'{"x":"\xed\xa0\x80"}'),
    "long number": with_attributes(b'{"x":' + b"9" * 100_000 + b"}"),
    "one key twice": with_attributes(b'{"x":1,"x":2}'),
    "no object": lambda b: b"[1]",
    "no JSON": lambda b: b"import os",
    "millions of lists": with_attributes(b'{"x":[' + b"[]," * 2_000_000 + b"[]]}"),
    "millions of words": with_attributes(b'{"x":[' + b'"ab",' * 2_000_000 + b'"ab"]}'),
    "names of hundreds of parts": lambda b: many(b, 5_000, "/".join(["{0}", *"a" * 250])) or rename(b, "parameters"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_made_up_manifest_is_refused(small, folder, outside, case):
    seal(folder, MANIFESTS[case])
    refused(small, folder, (load, search, load_bytes))


@pytest.mark.slow
def test_as_many_arrays_as_are_allowed_take_bounded_memory_and_more_are_refused(small, folder, monkeypatch):
    """The largest manifest that is not refused for its size, of arrays without elements; here a quarter of that."""
    limit = ARRAY_LIMIT // 4
    monkeypatch.setattr(format, "ARRAY_LIMIT", limit)
    seal(folder, lambda b: many(b, limit - len(small.arrays), "parameters/blocks.{:06}.weight"))
    (met,) = meet(lambda: checkpoint.open_checkpoint(folder).close())
    assert met.error == "" or "memory" in met.message
    assert met.megabytes < MEGABYTES / 4
    seal(folder, lambda b: many(b, 1, "one.more"))
    refused(small, folder, [load], "arrays")


class Counted(dict):
    """Attributes that count how often somebody looks for the element types."""

    looked = 0

    def get(self, key, default=None):
        self.looked += key == "bfloat16"
        return super().get(key, default)


def test_looking_at_many_arrays_takes_time_in_proportion_to_their_number(small, folder):
    """What has to be known of all arrays is found out once for all, and not again for each of them."""
    from argparse import Namespace

    from mpizero.checkpoint.inspect import compare
    from mpizero.cli.checkpoint import describe

    seal(folder, lambda b: many(b, 50, "parameters/e.{}"))
    with checkpoint.open_checkpoint(folder) as reader:
        reader.attributes = attributes = Counted(reader.attributes)
        found = describe(reader, Namespace(arrays=True, statistics=True, pattern=None))
        assert len(found["table"]) == 53
        assert attributes.looked <= 2
        attributes.looked = 0
        assert compare(reader, reader).compared == 53
        assert attributes.looked <= 4


def make_foreign(path, outside):
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(3)


def make_socket(path, outside):
    import socket

    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)


OTHERS = {
    "text": lambda path, outside: path.write_bytes(b"import os; os.system('true')\n" * 100),
    "another HDF5 file": make_foreign,
    "link": lambda path, outside: path.symlink_to(outside / "raw"),
    "link to itself": lambda path, outside: path.symlink_to(path),
    "folder": lambda path, outside: path.mkdir(),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": make_socket,
    "empty file": lambda path, outside: path.touch(),
    "nothing": lambda path, outside: None,
    "a terabyte of nothing": lambda path, outside: path.touch() or os.truncate(path, 2**40),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("name", ["manifest.json", "state.h5"])
def test_something_else_in_place_of_a_file_is_refused(small, folder, outside, name, case):
    (folder / name).unlink()
    OTHERS[case](folder / name, outside)
    refused(small, folder, READERS, name)


@pytest.mark.parametrize("case", ["text", "pipe", "socket", "link to itself"])
def test_something_else_in_place_of_the_folder_is_refused(small, folder, outside, case):
    shutil.rmtree(folder)
    OTHERS[case](folder, outside)
    refused(small, folder, READERS, folder.name)


def test_a_link_in_the_place_of_a_replaced_checkpoint_is_refused(small, folder):
    """A reader that finds nothing looks for what a killed replacement has set aside, which is never a link."""
    elsewhere = folder.parent / "elsewhere"
    folder.rename(elsewhere)
    aside = folder.parent / f".old-{folder.name}"
    elsewhere.rename(aside)
    load(small, folder)
    aside.rename(elsewhere)
    aside.symlink_to(elsewhere)
    refused(small, folder, [load], "is a link")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["manifest.json", "state.h5", "."])
def test_an_unreadable_file_is_refused(small, folder, name):
    (folder / name).chmod(0)
    refused(small, folder, READERS)


def test_a_huge_state_file_that_is_mostly_no_array_is_not_read(small, folder):
    os.truncate(folder / "state.h5", 10**12)
    seal(folder, lambda b: b["state"].update(bytes=10**12))
    refused(small, folder, READERS, "belong to no array")


def test_an_array_of_terabytes_in_a_file_of_holes_is_refused_before_memory_is_taken(small, folder):
    size = 2**41
    os.truncate(folder / "state.h5", 2**13 + size)

    def change(body):
        body["state"].update(bytes=2**13 + size, structure_crc32=f"{structure:08x}")
        body["arrays"] = {"parameters/a": entry(body) | {"shape": [size], "dtype": "|u1", "offset": 2**13}}
        body["arrays"]["parameters/a"]["crc32"] = "00000000" * (size // 2**22)

    with (folder / "state.h5").open("rb") as file:
        structure = crc32(file.read(2**13))
    seal(folder, change)
    with checkpoint.open_checkpoint(folder) as reader:
        assert reader.arrays["parameters/a"][0] == (size,)
    refused(small, folder, [load])  # what the model wants has another shape

    def everything(small, folder):
        with checkpoint.open_checkpoint(folder) as reader:
            reader.read_whole("parameters/a")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**40, limits[1]))
    try:
        refused(small, folder, [everything], "no memory")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def external_storage(file, outside):
    file.create_dataset("parameters/a", (5, 8), "<f4", external=[(str(outside / "raw"), 0, 160)])


def virtual(file, outside):
    layout = h5py.VirtualLayout((5, 8), "<f4")
    layout[...] = h5py.VirtualSource(str(outside / "other.h5"), "x", (5, 8))
    file.create_virtual_dataset("parameters/a", layout)


def unlimited_virtual(file, outside):
    """A virtual dataset whose sources HDF5 opens to learn its shape."""
    layout = h5py.VirtualLayout((5, 8), "<f4", maxshape=(None, 8))
    source = h5py.VirtualSource(str(outside / "other.h5"), "x", (5, 8), maxshape=(None, 8))
    layout[0 : h5py.h5s.UNLIMITED, :] = source[0 : h5py.h5s.UNLIMITED, :]
    file.create_virtual_dataset("parameters/a", layout)


def cycle_for_a_group(file, outside):
    del file["optimizer/exp_avg"]
    file["optimizer/exp_avg"] = file["optimizer"]
    file["parameters/a"] = np.zeros((5, 8), np.float32)


def placed(make):
    """Put what ``make`` returns in the place of an array."""

    def craft(file, outside):
        file["parameters/a"] = make(file, outside)

    return craft


def created(*given, **named):
    return lambda file, outside: file.create_dataset("parameters/a", *given, **named)


def one_more(file, outside):
    file.create_dataset("parameters/a", data=np.zeros((5, 8), np.float32))
    file.create_dataset("parameters/more", data=np.zeros(1))


def references(file, outside):
    file.create_dataset(
        "parameters/a", data=np.array([file.ref] * 40, h5py.ref_dtype).reshape(5, 8), dtype=h5py.ref_dtype
    )


CRAFTED = {
    "external link": placed(lambda file, outside: h5py.ExternalLink(str(outside / "other.h5"), "/x")),
    "external storage": external_storage,
    "virtual": virtual,
    "virtual without limit": unlimited_virtual,
    "soft link": placed(lambda file, outside: h5py.SoftLink("/parameters/b")),
    "cycle of the right count": placed(lambda file, outside: file["parameters"]),
    "cycle for a group": cycle_for_a_group,
    "record": created((5, 8), np.dtype([("x", "<f4"), ("y", "<f4")])),
    "variable length": created((5, 8), h5py.vlen_dtype(np.int32)),
    "references": references,
    "compressed": created(data=np.zeros((5, 8), np.float32), compression="gzip"),
    "a gigabyte from nothing": created((2**28,), "<f4", compression="gzip", chunks=(2**22,), fillvalue=1),
    "group for an array": lambda file, outside: file.create_group("parameters/a"),
    "named type": placed(lambda file, outside: np.dtype("<f4")),
    "one more array": one_more,
    "one array less": lambda file, outside: None,
    "one array twice": placed(lambda file, outside: file["optimizer/exp_avg/a"]),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_hdf5_is_refused_before_hdf5_parses_it_and_under_a_good_seal_by_the_full_check(
    small, folder, outside, case
):
    with h5py.File(folder / "state.h5", "r+") as file:
        del file["parameters/a"]
        CRAFTED[case](file, outside)
    if case == "external link":
        refused(small, folder, (*READERS, load_bytes), "state.h5")
    seal_structure(folder)
    # Reading goes by the manifest's offsets: it finds old values or the crafted bytes, never those of other files.
    *reads, checked = met_by(small, folder, (load, load_bytes, check))
    for _, met in reads:
        assert met.error in {"", "CheckpointError"}
        assert met.megabytes < MEGABYTES, met
    require_refused(*checked, "state.h5")


def test_groups_without_end_are_refused_by_their_size(small, folder, outside):
    with h5py.File(folder / "state.h5", "r+") as file:
        for number in range(3_000):
            file.create_group(f"g/{number}")
    seal_structure(folder)
    refused(small, folder, READERS, "belong to no array")


@pytest.mark.slow
def test_links_without_end_are_counted_before_they_are_listed(small, folder, outside):
    with h5py.File(folder / "state.h5", "r+") as file:
        for number in range(2_000):
            file[f"parameters/{number}"] = file["optimizer"]
    seal_structure(folder)
    refused(small, folder, [check], "members")


JUNK = (None, True, -1, 0, 2**31, 2**62, 2**64, 10**40, 0.5, 1e308, "", "../../x", "\x00", "\ud800", [], {}, [[]], "|O")
TEXTS = (b"", b"0", b'"', b"[", b"}", b",", b"e9", b"\xff")


def with_other_text(line, draw):
    start = draw.randrange(len(line))
    return line[:start] + draw.choice(TEXTS) + line[start + draw.randrange(3) :]


def with_other_value(line, draw):
    body = value = json.loads(line)
    while isinstance(value, (dict, list)) and value and (value is body or draw.random() < 0.8):
        holder, key = value, draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[key]
    holder[key] = draw.choice(JUNK)
    return json.dumps(body).encode()


@pytest.mark.slow
@pytest.mark.parametrize("change", [with_other_text, with_other_value])
def test_a_manifest_changed_at_random_under_a_good_seal_loads_or_is_refused(small, folder, change):
    draw, path = random.Random(5), folder / "manifest.json"
    line = path.read_bytes().splitlines()[0]
    refusals = []
    for _ in range(50):
        seal(folder, lambda _: change(line, draw).replace(b"\n", b" "))
        try:
            load(small, folder)  # where only attributes differ: what is loaded was verified
        except CheckpointError as error:
            refusals.append(str(error))
        path.write_bytes(line + b"\n")
    assert len(refusals) > 25
    assert all(told.isprintable() and len(told) < 700 for told in refusals)
