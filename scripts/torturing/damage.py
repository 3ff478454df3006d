"""Damage files of checkpoints: flip bits, truncate, overwrite the end with zeros, change manifests."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpizero import checkpoint
from mpizero.errors import CheckpointError
from torturing.cases import Torture
from torturing.training import STEPS, Reference, checkpoints_of, result_of

FILES = ("state.h5", "manifest.json")


def damage_files(torture: Torture, reference: Reference, flips: int, cuts: int) -> None:
    """Check that loading and verifying a damaged checkpoint report the file, and for a changed byte also the array.

    There are ``flips`` cases with one changed byte, ``cuts`` with a truncated file, and ``cuts`` with zeros at the end.
    """
    good = Path(checkpoint.step_folder(reference.checkpoints, STEPS))
    for title, count, change in (
        ("one byte flipped anywhere", flips, _flip),
        ("truncated anywhere", cuts, _truncate),
        ("zeros in place of the end", cuts, _zeros),
    ):
        row, draw = torture.table.row(title), torture.random
        with torture.case() as folder:
            for case, problem, outcome in in_child(partial(_judge, good, folder, change, count, draw)):
                row.add(problem, outcome, case)


def in_child(work: Callable[[], Iterator[tuple[str, str, str]]]) -> Iterator[tuple[str, str, str]]:
    """Run ``work`` in a forked process, and yield what it yields: case, problem and outcome.

    If the process dies, yield that as a problem.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(write, "w") as pipe:
            for told in work():
                pipe.write(json.dumps(told) + "\n")
            pipe.flush()
        os._exit(0)
    os.close(write)
    last = "the first"
    with os.fdopen(read) as pipe:
        for line in pipe:
            case, problem, outcome = json.loads(line)
            last = case
            yield case, problem, outcome
    if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        yield f"after {last}", f"the process died with {status}", ""


def _flip(data: bytearray, draw: random.Random) -> int:
    position = draw.randrange(len(data))
    data[position] ^= 1 << draw.randrange(8) if draw.random() < 0.5 else draw.randrange(1, 256)
    return position


def _truncate(data: bytearray, draw: random.Random) -> int:
    length = draw.randrange(len(data))
    del data[length:]
    return length


def _zeros(data: bytearray, draw: random.Random) -> int:
    start = draw.randrange(len(data))
    data[start:] = bytes(len(data) - start)
    return start


def _judge(
    good: Path, folder: Path, change: Callable[[bytearray, random.Random], int], count: int, draw: random.Random
) -> Iterator[tuple[str, str, str]]:
    target = folder / good.name
    shutil.copytree(good, target)
    places = {}
    for name, entry in json.loads((good / FILES[1]).read_bytes().splitlines()[0])["arrays"].items():
        size = np.dtype(entry["dtype"]).itemsize * math.prod(entry["shape"])
        places[name] = range(entry["offset"], entry["offset"] + size)
    sizes = [(good / name).stat().st_size for name in FILES]
    for number in range(count):
        # One case in four damages the small manifest, the others a file chosen by size.
        name = FILES[1] if number % 4 == 0 else draw.choices(FILES, sizes)[0]
        whole = (good / name).read_bytes()
        data = bytearray(whole)
        position = change(data, draw)
        (target / name).write_bytes(data)
        hit = next((f"array {array!r}" for array, place in places.items() if position in place), "HDF5 structure")
        expected = [name, *([hit] if change is _flip and name == FILES[0] else [])]
        yield f"{name}, byte {position}", *_told(target, expected, bytes(data) == whole)
        (target / name).write_bytes(whole)


def _told(target: Path, expected: list[str], harmless: bool) -> tuple[str, str]:
    """Load and verify a damaged checkpoint, and return a problem and an outcome.

    The problem is "" if the error names all texts in ``expected``; the outcome then says what kind of damage was
    reported. ``harmless`` says that the file is unchanged by chance, so that no error is expected.
    """
    told = ""
    for what, read in (("load", _load), ("verify", checkpoint.verify)):
        try:
            read(target)
        except CheckpointError as error:
            told = str(error)
        except Exception as error:
            return f"{what}: {type(error).__name__}: {error}", ""
        else:
            return ("", "touches no byte") if harmless else (f"{what}: not noticed", "")
        if missing := [part for part in expected if part not in told]:
            return f"{what}: does not name {missing}: {told}", ""
    places = ("array", "HDF5 structure", "truncated", FILES[1])
    return "", f"reported: {next((place for place in places if place in told), told)}"


def _load(folder: Path) -> None:
    with checkpoint.open_checkpoint(folder) as reader:
        for name in reader.arrays:
            reader.read_whole(name)


def resume_past_damage(torture: Torture, reference: Reference, count: int) -> None:
    """Damage the newest checkpoint of a training and resume it, ``count`` times.

    The training must report the damage, resume from the previous checkpoint, and end with the result of ``reference``.
    """
    row, draw = torture.table.row("resumed past a damaged newest checkpoint"), torture.random
    for number in range(count):
        with torture.case() as folder:
            checkpoints = checkpoints_of(folder)
            for step in (STEPS - 1, STEPS):
                path = Path(checkpoint.step_folder(reference.checkpoints, step))
                shutil.copytree(path, checkpoints / path.name)
            file = Path(checkpoint.step_folder(checkpoints, STEPS)) / FILES[number % 2]
            data = bytearray(file.read_bytes())
            (_flip, _truncate, _zeros)[number // 2 % 3](data, draw)
            file.write_bytes(data)
            ended = reference.run(folder)
            problem = "" if result_of(ended) == reference.result else f"another result: {ended.out} {ended.err[-300:]}"
            if not problem and not (file.parent.name in ended.err and file.name in ended.err):
                problem = f"nothing said of {file}: {ended.err[-300:]}"
            row.add(problem or reference.problem_of(checkpoints, STEPS), "went on, with a notice", str(file))


def fuzz_manifests(torture: Torture, reference: Reference, count: int) -> None:
    """Change manifests at random and give them a matching checksum, ``count`` times.

    Loading must succeed or raise CheckpointError with a clear message.
    """
    row, draw = torture.table.row("manifests changed at random under a good seal"), torture.random
    good = Path(checkpoint.step_folder(reference.checkpoints, STEPS))
    with torture.case() as folder:
        for case, problem, outcome in in_child(partial(_fuzz, good, folder, count, draw)):
            row.add(problem, outcome, case)


#: Values that are put in place of a manifest's values.
JUNK = (None, True, -1, 0, 1, 2**31, 2**53, 2**62, 2**64, 10**40, 0.5, -0.0, 1e308, "", "x", "../../x", "/etc/passwd")
MORE_JUNK = ("\x00", "\ud800", "é" * 300, [], {}, [[]], [1] * 40, {"a": {"b": [1, {}]}}, "<f8", "|O", "00000000")


def _fuzz(good: Path, folder: Path, count: int, draw: random.Random) -> Iterator[tuple[str, str, str]]:
    target = folder / good.name
    shutil.copytree(good, target)
    line = (good / FILES[1]).read_bytes().splitlines()[0]
    for number in range(count):
        changed = _changed_text(line, draw) if number % 2 else _changed_values(json.loads(line), draw)
        changed += b"\n"
        seal = f'{{"sha256":"{hashlib.sha256(changed).hexdigest()}"}}\n'
        (target / FILES[1]).write_bytes(changed + seal.encode())
        try:
            _load(target)
        except CheckpointError as error:
            told = str(error)
            yield f"mutation {number}", "" if len(told) < 1000 and told.isprintable() else f"unclear: {told}", "refused"
        except Exception as error:
            yield f"mutation {number}", f"{type(error).__name__}: {error}", ""
        else:
            yield f"mutation {number}", "", "loaded: only attributes or names differ"


def _changed_text(line: bytes, draw: random.Random) -> bytes:
    data = bytearray(line)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(data))
        kind = draw.randrange(4)
        if kind == 0:
            data[place] = draw.randrange(256)
        elif kind == 1:
            del data[place : place + draw.choice((1, 4, 100))]
        elif kind == 2:
            data[place:place] = draw.choice((b"0", b"9", b'"', b"[", b"{", b"}", b",", b":", b"e9", b"NaN", b"\\u0000"))
        else:
            data[place:place] = data[place : place + draw.choice((10, 200))]
    return bytes(data).replace(b"\n", b" ") or b" "


def _changed_values(body: Any, draw: random.Random) -> bytes:
    holder, key = None, None
    value = body
    while isinstance(value, (dict, list)) and value and (holder is None or draw.random() < 0.8):
        holder, key = value, draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[key]
    if holder is None:
        return b"{}"
    if isinstance(holder, dict) and draw.random() < 0.2:
        holder[draw.choice((*[k for k in JUNK if isinstance(k, str)], "offset"))] = holder.pop(key)
    elif type(value) is int and draw.random() < 0.5:
        holder[key] = value + draw.choice((-64, -1, 1, 8, 64))
    else:
        holder[key] = draw.choice(JUNK + MORE_JUNK)
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
