"""``mpizero bench machine``: what it measures and stores, and what becomes of missing, foreign and damaged files."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from mpizero._util.numbers import Measurement
from mpizero.errors import DataError
from mpizero.kernels import memory
from mpizero.sharding import ShardingConfig
from mpizero.testing import run_in_threads
from mpizero.tools.bench import machine as machine_report
from mpizero.tools.bench.machine import MachineRequest, ProductShapes, measure_machine, sizes
from mpizero.tools.plan.time import NEEDED, Machine, read_machine, write_machine
from mpizero.train.config.toml import ConfigDocument, parse_config

SMALL = ProductShapes(dim=8, heads=2, sequence=4, batch=2)
FORMS = {"forward", "input", "weights"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Machine, str, list[str]]:
    """A machine of three ranks, its file, and what was told."""
    folder = tmp_path_factory.mktemp("machine")
    output, lines = str(folder / "machine.json"), []
    request = MachineRequest(SMALL, 1000, 200, 10_000, str(folder), output, repeat=2)
    machine = run_in_threads(3, lambda comm: measure_machine(request, comm, lines.append))[0]
    assert os.listdir(folder) == ["machine.json"]
    return machine, output, lines


def test_everything_is_measured_in_every_repetition(measured):
    machine, _, lines = measured
    assert lines == ["warm-up", *(f"repetition {n} of 2" for n in (1, 2))]
    assert (machine.ranks, machine.nodes, machine.ranks_per_node, machine.threads) == (3, 1, 3, 1)
    assert {s.name for s in machine.streams} == {*NEEDED, "norm"}
    linear = [p for p in machine.products if p.linear]
    assert {(p.name, p.form) for p in linear} == {
        (name, form) for name in ("qkv", "projection", "expand", "contract") for form in FORMS
    }
    assert sum(p.operations for p in linear) == 3 * 2 * 8 * 8 * 8 * (3 + 1 + 4 + 4)
    assert {(m.operation, m.nbytes) for m in machine.messages if m.where == "all ranks"} == {
        ("barrier", 0),
        *((operation, size) for operation in ("exchange", "gather", "allreduce") for size in (8, 128, 200)),
    }
    assert {m.where for m in machine.messages} == {"all ranks", "inside a node"}
    assert [f.operation for f in machine.files] == ["write with fsync", "read", "read from memory"]
    spreads = [s for stream in machine.streams for s in (stream.one, stream.every, stream.own_one, stream.own_every)]
    assert all(0 < s.least <= s.median <= s.most for s in spreads)


def test_what_is_stored_is_what_is_read_and_printed(measured, tmp_path):
    machine, path, _ = measured
    assert read_machine(path) == machine
    write_machine(str(tmp_path / "again.json"), machine)
    assert (tmp_path / "again.json").read_bytes() == Path(path).read_bytes()
    assert json.loads(machine_report.as_json(machine))["benchmark"] == "machine"
    text = machine_report.report(machine)
    assert all(f"\n{name} " in text for name in (*NEEDED, "qkv", "exchange", "write with fsync"))


def drop(*keys):
    return lambda document: lookup(document, keys[:-1]).pop(keys[-1])


def put(value, *keys):
    return lambda document: lookup(document, keys[:-1]).__setitem__(keys[-1], value)


def lookup(document, keys):
    return reduce(lambda part, key: part[key], keys, document)


MOST = ("products", 0, "every", "most")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("format"), 'no machine file: expected a JSON object with "format": "mpizero-machine"'),
        (put(2, "version"), "a machine file of version 2; this mpizero reads version 1"),
        (put(True, "version"), "a machine file of version True"),
        (drop("host"), "damaged machine file: host: missing"),
        (put("x", "colour"), "damaged machine file: colour: unknown"),
        (put(1, "\x1b[2J"), "\\u001b[2J: unknown"),
        (put(True, "ranks"), "ranks: expected a whole number >= 0, found True"),
        (put(0, "ranks"), "ranks: expected at least 1, found 0"),
        (put({}, "streams"), "streams: expected a list"),
        (put([], "streams"), "streams: ['AdamW', 'copy', 'read', 'sum + AdamW', 'sum of 2', 'sum of 4'] missing"),
        (put([], "products"), "products: none of them is linear"),
        (drop("streams", 1, "one", "median"), "streams[1].one.median: missing"),
        (put(-1.0, *MOST), "products[0].every.most: expected a finite number > 0, found -1.0"),
        (put(math.nan, *MOST), "NaN is not a number"),
        (put(10**308 * 9, *MOST), "a number is too large"),
        (put(3, "libraries", "numpy"), "libraries.numpy: expected a text of printable characters, found 3"),
        (put("a\nb\x1b[2J", "host"), "host: expected a text of printable characters, found 'a\\nb\\x1b[2J'"),
    ],
)
def test_a_foreign_or_damaged_file_is_an_error_that_names_the_place(measured, tmp_path, change, said):
    path, document = tmp_path / "changed.json", json.loads(Path(measured[1]).read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DataError) as caught:
        read_machine(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
    assert "mpizero bench machine" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_what_is_no_document_is_no_machine_file(tmp_path, data):
    (tmp_path / "machine.json").write_bytes(data)
    with pytest.raises(DataError, match="no machine file"):
        read_machine(str(tmp_path / "machine.json"))


def test_a_file_without_end_or_none_at_all_is_named_with_the_way_to_make_one(tmp_path):
    (tmp_path / "machine.json").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="no machine file: more than 1048576 bytes"):
        read_machine(str(tmp_path / "machine.json"))
    with pytest.raises(DataError, match=r"none\.json: cannot be read: No such file.*bench machine"):
        read_machine(str(tmp_path / "none.json"))


def test_ranks_share_what_all_had_and_none_is_faster_than_one_alone(measured):
    def fixed(seconds):
        return Measurement(seconds, seconds, seconds)

    machine = measured[0]
    (copy,) = (s for s in machine.streams if s.name == "copy")
    machine = replace(machine, streams=(replace(copy, one=fixed(1.0), every=fixed(2.0)),))
    found = [machine.bandwidth("copy", ranks) / copy.nbytes for ranks in (1, 2, 3, 6)]
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.25])  # three ranks have 1.5 copies a second together
    assert machine.rate(3) <= machine.rate(1)


def test_a_pass_takes_the_time_of_the_measured_one_with_the_nearest_share_of_writes(measured):
    machine = measured[0]
    times = {s.name: s.every.least / s.nbytes for s in machine.streams}
    for read, written, name in ((8, 0, "read"), (8, 8, "copy"), (9, 5, "sum + AdamW"), (9, 2, "sum of 4")):
        expected = max(times[name], 1 / machine.bandwidth(name, 1)) * (read + written)
        assert machine.pass_seconds(read, written, 3) == pytest.approx(expected)
    assert machine.pass_seconds(0, 0, 3) == 0.0


def test_messages_between_measured_sizes_take_times_between(measured):
    machine = measured[0]
    known = {m.sent: m.seconds.least for m in machine.messages if m.operation == "exchange"}
    assert list(known) == [5, 85, 133]  # of 8, 128 and 200 bytes in three parts
    assert machine.seconds("exchange", 85) == pytest.approx(known[85])
    middle = machine.seconds("exchange", 45)
    assert middle == pytest.approx((known[5] + known[85]) / 2)
    assert machine.seconds("exchange", 1) == pytest.approx(known[5])
    assert machine.seconds("exchange", 399) == pytest.approx(3 * known[133])
    assert machine.seconds("one to one", 8, "between nodes") == 0.0


def test_sizes_end_with_the_largest():
    assert sizes(8) == (8,)
    assert sizes(128) == (8, 128)
    assert sizes(1000) == (8, 128, 1000)


def test_plain_passes_read_and_write_what_they_say():
    a, b, c, d, w, m, v = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    before = [x.copy() for x in (w, m, v)]
    memory.add_and_update(a, b, w, m, v)
    assert np.array_equal([w, m, v], [before[0] + a, before[1] + b, before[2] + a])
    memory.update(a, w, m, v)
    memory.add_four(a, b, c, d, w)
    assert np.array_equal(w, a + b + c + d)
    memory.add_two(a, b, m)
    assert np.array_equal(m, a + b)
    memory.copy(a, v)
    assert np.array_equal(v, a)
    assert memory.read(np.array([1, 2, 4])) == 7


def test_the_command_takes_shapes_from_a_configuration_and_stores_the_file(on_threads):
    outcome = on_threads(
        2, "bench", "machine", "tiny.toml", "--set", "train.micro_batch=3", "--elements", "1e3", "--largest", "100",
        "--file-bytes", "0", "--repeat", "1", "--json",
    )  # fmt: skip
    assert outcome.result["benchmark"] == "machine"
    assert (outcome.result["ranks"], outcome.result["files"]) == (2, [])
    stored = read_machine(str(on_threads.folder / "machine.json"))
    assert {(p.rows, p.inner) for p in stored.products if (p.name, p.form) == ("qkv", "forward")} == {(3 * 16, 16)}


def test_products_have_the_rows_of_a_micro_batch():
    """What is computed at once, whatever makes a grain: ``bench machine CONFIG`` and training agree on it."""
    text = '[model]\nname = "gpt"\n[data]\ntext = "stdlib"\n[train]\nglobal_batch = 64\naccumulate = 4\n'
    shapes = ProductShapes.of(parse_config(ConfigDocument("c.toml", text, ())))
    assert shapes.batch * 4 == ShardingConfig(accumulate=4).grain_size(64) == 4
