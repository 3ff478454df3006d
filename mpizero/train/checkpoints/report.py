"""Format the output of ``mpizero checkpoint``: text for people, one line of JSON for programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from mpizero import checkpoint
from mpizero._util.text import age, aligned, amount, joined, printable
from mpizero.checkpoint.inspect import (
    BFLOAT16,
    PARAMETERS,
    CheckpointDifference,
    ListedCheckpoint,
    element_types,
    flat,
    matches,
    statistics,
)
from mpizero.errors import ConfigError
from mpizero.train.config.checks import shown
from mpizero.train.events import ByteProgress

#: The most attributes that a comparison prints.
_SHOWN = 20


def describe(reader: checkpoint.Reader, options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts about a checkpoint for its report, by name; arrays are read only for statistics.

    ``options`` are the options of ``mpizero checkpoint inspect``. With one of ``--arrays``, ``--statistics`` and
    ``--pattern``, the entry "table" has one row for each array whose name fits the pattern.
    """
    sizes = {path: prod(shape) * dtype.itemsize for path, (shape, dtype) in reader.arrays.items()}
    manifest, state = (os.stat(os.path.join(reader.name, name)) for name in ("manifest.json", "state.h5"))
    found: dict[str, Any] = {
        "path": reader.name,
        **summary(reader.attributes),
        "attributes": reader.attributes,
        "arrays": len(sizes),
        "bytes": sum(sizes.values()),
        "parameter_arrays": sum(path.startswith(PARAMETERS) for path in sizes),
        "parameter_bytes": sum(size for path, size in sizes.items() if path.startswith(PARAMETERS)),
        "file_bytes": manifest.st_size + state.st_size,
        "written": manifest.st_mtime,
    }
    if options.arrays or options.statistics or options.pattern is not None:
        wanted = [path for path in sizes if matches(path, options.pattern)]
        if not wanted and options.pattern is not None:
            raise ConfigError(f"--pattern {options.pattern}: fits none of the {len(sizes)} arrays of {reader.name}")
        found["table"] = list(_table(reader, wanted, options.statistics))
    return found


def summary(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return step, loss, layout and so on from a checkpoint's attributes, by name; None if a value was not saved."""
    training, own = _object(attributes.get("training")), _object(attributes.get("mpizero"))
    configuration = _object(training.get("config"))
    return {
        "step": training.get("step", own.get("step_number")),
        "loss": training.get("loss"),
        "samples": training.get("samples", _samples(training, configuration)),
        "seed": training.get("seed"),
        "optimizer": own.get("optimizer"),
        "layout": own.get("layout"),
        "tiles": own.get("tiles"),
        "versions": training.get("versions", own.get("versions")),
        "configuration": configuration or None,
    }


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _samples(training: Mapping[str, Any], configuration: Mapping[str, Any]) -> int | None:
    """Return the number of consumed samples for runs that did not save it: steps times global batch size.

    Return None if the attributes ``training`` or its ``configuration`` lack one of these numbers.
    """
    step, batch = training.get("step"), _object(configuration.get("train")).get("global_batch")
    return step * batch if isinstance(step, int) and isinstance(batch, int) else None


def _table(reader: checkpoint.Reader, paths: Sequence[str], with_statistics: bool) -> Iterator[dict[str, Any]]:
    elements = element_types(reader)
    total = sum(prod(reader.arrays[path][0]) * reader.arrays[path][1].itemsize for path in paths)
    with ByteProgress(total if with_statistics else 0, "statistics") as progress:
        for path in paths:
            shape, dtype = reader.arrays[path]
            row = {"name": path, "shape": list(shape), "dtype": elements[path], "bytes": prod(shape) * dtype.itemsize}
            figures = asdict(statistics(reader, path, progress, elements[path])) if with_statistics else {}
            yield {**row, **figures}


def as_json(found: Any) -> str:
    """Format ``found`` as one line of JSON in printable ASCII; NaN and infinite numbers become null."""
    return printable(json.dumps(_finite(found), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------ one checkpoint


def description(found: Mapping[str, Any]) -> str:
    """Format the result of :func:`describe` as text for people."""
    known = [("written", f"{_date(found['written'])}, {age(time.time() - found['written'])}")]
    known += [(name, str(found[name])) for name in ("step", "loss", "samples", "seed") if found[name] is not None]
    known += [(name, _words(found[name])) for name in ("optimizer", "layout", "tiles", "versions") if found[name]]
    known += [(name, _words(settings)) for name, settings in (found["configuration"] or {}).items()]
    others = {"training", "mpizero", BFLOAT16}
    known += [(name, _value(value)) for name, value in found["attributes"].items() if name not in others]
    state = found["arrays"] - found["parameter_arrays"]
    known.append(("parameters", f"{found['parameter_arrays']} arrays, {amount(found['parameter_bytes'])}B"))
    known.append(("state", f"{state} arrays, {amount(found['bytes'] - found['parameter_bytes'])}B"))
    known.append(("files", f"{found['file_bytes']:,} bytes"))
    width = max(len(name) for name, _ in known)
    lines = [found["path"], *(f"  {name:{width}}  {value}" for name, value in known)]
    return joined([*lines, *_table_lines(found.get("table"))])


def _table_lines(table: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if table is None:
        return []
    figures = ["minimum", "maximum", "mean", "norm"]
    with_statistics = any("norm" in row for row in table)
    head = ["name", "type", "shape", "bytes", *(figures if with_statistics else [])]
    rows = [head + (["not finite"] if with_statistics else [])]
    for row in table:
        cells = [row["name"], row["dtype"], " x ".join(map(str, row["shape"])) or "scalar", f"{row['bytes']:,}"]
        if with_statistics:
            cells += ["-" if row[name] is None else f"{row[name]:.5g}" for name in figures] + [str(row["not_finite"])]
        rows.append(cells)
    return ["", *aligned(rows, left=(0, 1, 2))]


def _words(settings: Any) -> str:
    """Format a dict of settings on one line, without settings that are None; format any other object as one value."""
    if not isinstance(settings, dict):
        return _value(settings)
    return ", ".join(f"{name} {_value(value)}" for name, value in flat(settings).items() if value is not None)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return f"{seconds:.0f} seconds after 1970"  # a file may bear any date, also of years that no calendar has


# ------------------------------------------------------------------ a folder of checkpoints


def listing_json(found: Sequence[ListedCheckpoint]) -> str:
    """Format the list of a run's checkpoints as one line of JSON."""
    now = time.time()
    listed = [
        {
            "path": one.path,
            "step": one.step,
            "bytes": one.nbytes,
            "sound": one.problem is None,
            "damaged": one.damaged,
            "problem": one.problem,
            "age_seconds": None if one.written is None else round(now - one.written, 3),
            **({} if one.problem else {name: summary(one.attributes)[name] for name in ("loss", "samples", "layout")}),
        }
        for one in found
    ]
    return as_json({"checkpoints": listed})


def listing_text(found: Sequence[ListedCheckpoint]) -> str:
    """Format the list of a run's checkpoints as text for people."""
    rows = [["step", "loss", "size", "age", "", "checkpoint"]]
    for one in found:
        loss = summary(one.attributes)["loss"]
        told = "" if loss is None else f"{loss:.6g}" if isinstance(loss, float) else str(loss)
        old = "" if one.written is None else age(time.time() - one.written)
        rows.append([str(one.step), told, f"{amount(one.nbytes)}B", old, one.state, one.path])
    return joined([*aligned(rows, left=(4, 5)), *(f"{one.state}: {one.problem}" for one in found if one.problem)])


# ------------------------------------------------------------------ two checkpoints


def difference_json(names: Sequence[str], found: CheckpointDifference) -> str:
    """Format the differences of two checkpoints, whose paths are ``names``, as one line of JSON."""
    return as_json({"a": names[0], "b": names[1], "equal": found.equal, **asdict(found)})


def difference_text(names: Sequence[str], found: CheckpointDifference) -> str:
    """Format the differences of two checkpoints, whose paths are ``names``, as text for people."""
    lines = [*_named("only in A", found.missing), *_named("only in B", found.extra)]
    lines += [f"{path}: {a} in A, {b} in B" for path, (a, b) in found.reshaped.items()]
    for one in found.arrays:
        index, (u, v) = list(one.first), (f"{value:.9g}" for value in one.values)
        if u == v:
            u, v = map(repr, one.values)
        lost = f"; {one.not_finite} are NaN or infinite in one of them" if one.not_finite else ""
        lines.append(
            f"{one.path}: {one.differing:,} of {one.size:,} elements differ, by at most {one.largest_absolute:.3g} "
            f"absolute, {one.largest_relative:.3g} relative; first at {index}: {u} in A, {v} in B{lost}"
        )
    for name, (a, b) in list(found.attributes.items())[:_SHOWN]:
        lines.append(f"attribute {name}: {shown(a)} in A, {shown(b)} in B")
    if (rest := len(found.attributes) - _SHOWN) > 0:
        lines.append(f"and {rest} attributes more; --json lists all")
    verdict = ", ".join(
        f"{len(what)} {name}"
        for what, name in (
            (found.missing + found.extra, "missing in one"),
            (found.reshaped, "of other shape or type"),
            (found.arrays, "of other values"),
            (found.attributes, "other attributes"),
        )
        if what
    )
    lines.append(f"{found.compared} arrays of {amount(found.nbytes)}B compared: {verdict or 'equal'}")
    return joined([f"A: {names[0]}", f"B: {names[1]}", *lines])


def _named(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what}: {name}" for name in names]
