"""Execute ``mpizero checkpoint``: inspect, verify, compare, export and import checkpoints.

:func:`run` executes a subcommand, whose options ``cli/options.py`` defines. Functions such as :func:`description` and
:func:`as_json` format the results as text for people, or as one line of JSON for programs. A :data:`Template` says what
an imported checkpoint must contain; it is made from another checkpoint or from a configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpizero import checkpoint, nn
from mpizero._util.checks import number
from mpizero._util.settings import check_option, shown
from mpizero._util.text import age, aligned, amount, joined, printable, show
from mpizero.checkpoint.convert import Expected, ImportRules, TensorFile, export, export_bytes, write_imported
from mpizero.checkpoint.format import PARAMETERS
from mpizero.checkpoint.inspect import (
    BFLOAT16,
    CheckpointDifference,
    ListedCheckpoint,
    compare,
    element_types,
    find_checkpoint,
    find_folder,
    flat,
    is_checkpoint,
    listing,
    matches,
    statistics,
)
from mpizero.cli.options import EXPORTS, Run
from mpizero.errors import CheckpointDamagedError, CheckpointError, ConfigError, DataError
from mpizero.train.config.build import build_model, build_source
from mpizero.train.config.schema import RunConfig
from mpizero.train.config.sections import GptSection
from mpizero.train.config.toml import ConfigDocument, parse_config, read_config
from mpizero.train.data_identity import data_fingerprint
from mpizero.train.events import byte_progress, plain
from mpizero.train.run_folder import TRAINING


def run(options: argparse.Namespace) -> int | None:
    """Execute the subcommand that ``options.tool`` names, and return the exit status; None is success."""
    return _TOOLS[options.tool](options)


def _inspect(options: argparse.Namespace) -> None:
    path = Path(options.path)
    if is_checkpoint(path):
        with checkpoint.open_checkpoint(path, "self") as reader:
            facts = describe(reader, options)
        show(as_json(facts) if options.json else description(facts))
        return
    checkpoints = listing(find_folder(path))
    if options.arrays or options.statistics or options.pattern is not None:
        raise ConfigError(f"{path}: arrays are those of one checkpoint; give one, as {checkpoints[-1].path}")
    show(listing_json(checkpoints) if options.json else listing_text(checkpoints))


def _verify(options: argparse.Namespace) -> None:
    path = Path(options.path)
    if is_checkpoint(path):
        _verify_one(str(path))
        return
    entries = listing(find_folder(path))
    damaged: list[str] = []
    for listed in entries if options.all else entries[-1:]:
        _verify_listed(listed, damaged)
    if damaged:
        raise CheckpointError(f"{len(damaged)} of {len(entries) if options.all else 1} not sound: {'; '.join(damaged)}")


def _verify_listed(listed: ListedCheckpoint, damaged: list[str]) -> None:
    try:
        _verify_one(listed.path)
    except CheckpointError as error:
        show(f"{listed.path}: {'damaged' if isinstance(error, CheckpointDamagedError) else 'unreadable'}")
        damaged.append(str(error))


def _verify_one(path: str) -> None:
    with checkpoint.open_checkpoint(path, "self") as reader:
        count, name = len(reader.arrays), reader.name
        total = sum(dtype.itemsize * prod(shape) for shape, dtype in reader.arrays.values())
    started = time.perf_counter()
    with byte_progress(total, "verify") as progress:
        nbytes = checkpoint.verify(name, progress.update)
    seconds = time.perf_counter() - started
    speed = f"{amount(nbytes)}B in {seconds:.3g} s, {nbytes / seconds / 1e9:.2f} GB/s"
    show(f"{path}: sound: {count} arrays, {speed}")


def _diff(options: argparse.Namespace) -> int:
    check_option("--tolerance", options.tolerance, number())
    names = [str(find_checkpoint(Path(path))) for path in (options.a, options.b)]
    with ExitStack() as stack:
        a, b = (stack.enter_context(checkpoint.open_checkpoint(name, "self")) for name in names)
        sizes = (prod(s) * t.itemsize for path, (s, t) in a.arrays.items() if matches(path, options.pattern))
        progress = stack.enter_context(byte_progress(sum(sizes), "diff"))
        difference = compare(a, b, options.tolerance, options.pattern, progress.update)
    if options.arrays_only:
        difference = replace(difference, attributes={})
    show(difference_json(names, difference) if options.json else difference_text(names, difference))
    return int(not difference.equal)


def _format_of(out: str) -> str:
    """Return the export format ("safetensors", "npz" or "hdf5") that belongs to the ending of a file's name."""
    result = next((form for form, endings in EXPORTS.items() if out.lower().endswith(endings)), None)
    if result is None:
        known = ", ".join(ending for endings in EXPORTS.values() for ending in endings)
        raise ConfigError(
            f"{out}: the name tells no format: end it with one of {known}, or give --format {'|'.join(EXPORTS)}"
        )
    return result


def _export(options: argparse.Namespace) -> None:
    form = options.format or _format_of(options.out)
    path = find_checkpoint(Path(options.path))
    selection = {"state": options.state, "ema": options.ema, "dtype": options.dtype, "pattern": options.pattern}
    with checkpoint.open_checkpoint(path, "self") as reader:
        total = export_bytes(reader, state=options.state, pattern=options.pattern)
        with byte_progress(total, "export") as progress:
            written = {"tied": options.tied, "replace": options.force, "report": progress.update}
            items = export(reader, options.out, form, **selection, **written)
    size = sum(item.nbytes for item in items)
    show(f"{options.out}: {len(items)} arrays, {amount(size)}B, from {path}")


def _import(options: argparse.Namespace) -> None:
    names = [(old, new) for old, _, new in (mapping.partition("=") for mapping in options.map)]
    rules = ImportRules(names=names, drop=options.drop, transpose=options.transpose, dtype=options.dtype)
    with TensorFile(options.file) as source:
        if options.like is not None:
            attributes, expected = like(options.like)
        elif options.config is not None:
            attributes, expected = described(options.config)
        else:
            attributes, expected = source.attributes, None
        arrays = write_imported(source, options.out, attributes, rules, expected=expected, replace=options.force)
    show(f"{options.out}: {len(arrays)} arrays, from {options.file}")


#: The function of each subcommand.
_TOOLS: dict[str, Run] = {"inspect": _inspect, "verify": _verify, "diff": _diff, "export": _export, "import": _import}

#: The most attributes that a comparison prints.
_LISTED = 20


def describe(reader: checkpoint.Reader, options: argparse.Namespace) -> dict[str, Any]:
    """Return a dict with step, sizes, attributes and so on of a checkpoint; arrays are read only for statistics.

    ``options`` are the options of ``mpizero checkpoint inspect``. With one of ``--arrays``, ``--statistics`` and
    ``--pattern``, the entry "table" has one row for each array whose name matches the pattern.
    """
    sizes = {path: prod(shape) * dtype.itemsize for path, (shape, dtype) in reader.arrays.items()}
    manifest, state = (os.stat(os.path.join(reader.name, name)) for name in ("manifest.json", "state.h5"))
    facts: dict[str, Any] = {
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
        facts["table"] = list(_table(reader, wanted, options.statistics))
    return facts


def summary(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return step, loss, layout and so on from a checkpoint's attributes as a dict; a value not saved is None."""
    training, state = _object(attributes.get("training")), _object(attributes.get("mpizero"))
    configuration = _object(training.get("config"))
    return {
        "step": training.get("step", state.get("step_number")),
        "loss": training.get("loss"),
        "samples": training.get("samples"),
        "seed": training.get("seed"),
        "optimizer": state.get("optimizer"),
        "layout": state.get("layout"),
        "tiles": state.get("tiles"),
        "versions": training.get("versions", state.get("versions")),
        "configuration": configuration or None,
    }


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _table(reader: checkpoint.Reader, paths: Sequence[str], with_statistics: bool) -> Iterator[dict[str, Any]]:
    elements = element_types(reader)
    total = sum(prod(reader.arrays[path][0]) * reader.arrays[path][1].itemsize for path in paths)
    with byte_progress(total if with_statistics else 0, "statistics") as progress:
        for path in paths:
            shape, dtype = reader.arrays[path]
            row = {"name": path, "shape": list(shape), "dtype": elements[path], "bytes": prod(shape) * dtype.itemsize}
            numbers = asdict(statistics(reader, path, progress.update, elements[path])) if with_statistics else {}
            yield {**row, **numbers}


def as_json(document: Any) -> str:
    """Format ``document`` as one line of JSON in printable ASCII; NaN and infinite numbers become null."""
    return printable(json.dumps(plain(document, lambda value: None), allow_nan=False))


def description(facts: Mapping[str, Any]) -> str:
    """Format the result of :func:`describe` as text for people."""
    known = [("written", f"{_date(facts['written'])}, {age(time.time() - facts['written'])}")]
    known += [(name, str(facts[name])) for name in ("step", "loss", "samples", "seed") if facts[name] is not None]
    known += [(name, _words(facts[name])) for name in ("optimizer", "layout", "tiles", "versions") if facts[name]]
    known += [(name, _words(settings)) for name, settings in (facts["configuration"] or {}).items()]
    others = {"training", "mpizero", BFLOAT16}
    known += [(name, _value(value)) for name, value in facts["attributes"].items() if name not in others]
    state = facts["arrays"] - facts["parameter_arrays"]
    known.append(("parameters", f"{facts['parameter_arrays']} arrays, {amount(facts['parameter_bytes'])}B"))
    known.append(("state", f"{state} arrays, {amount(facts['bytes'] - facts['parameter_bytes'])}B"))
    known.append(("files", f"{facts['file_bytes']:,} bytes"))
    width = max(len(name) for name, _ in known)
    lines = [facts["path"], *(f"  {name:{width}}  {value}" for name, value in known)]
    return joined([*lines, *_table_lines(facts.get("table"))])


def _table_lines(table: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if table is None:
        return []
    columns = ["minimum", "maximum", "mean", "norm"]
    with_statistics = any("norm" in row for row in table)
    head = ["name", "type", "shape", "bytes", *(columns if with_statistics else [])]
    rows = [head + (["not finite"] if with_statistics else [])]
    for row in table:
        cells = [row["name"], row["dtype"], " x ".join(map(str, row["shape"])) or "scalar", f"{row['bytes']:,}"]
        if with_statistics:
            cells += ["-" if row[name] is None else f"{row[name]:.5g}" for name in columns] + [str(row["not_finite"])]
        rows.append(cells)
    return ["", *aligned(rows, left=(0, 1, 2))]


def _words(settings: Any) -> str:
    """Format a dict of settings on one line, leaving out those that are None; format any other object as one value."""
    if not isinstance(settings, dict):
        return _value(settings)
    return ", ".join(f"{name} {_value(value)}" for name, value in flat(settings).items() if value is not None)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return f"{seconds:.0f} seconds after 1970"  # the file's date is outside the range of strftime


def listing_json(checkpoints: Sequence[ListedCheckpoint]) -> str:
    """Format a list of checkpoints as one line of JSON."""
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
        for one in checkpoints
    ]
    return as_json({"checkpoints": listed})


def listing_text(checkpoints: Sequence[ListedCheckpoint]) -> str:
    """Format a list of checkpoints as a table of text."""
    rows = [["step", "loss", "size", "age", "", "checkpoint"]]
    for one in checkpoints:
        loss = summary(one.attributes)["loss"]
        loss_text = "" if loss is None else f"{loss:.6g}" if isinstance(loss, float) else str(loss)
        old = "" if one.written is None else age(time.time() - one.written)
        rows.append([str(one.step), loss_text, f"{amount(one.nbytes)}B", old, one.state, one.path])
    return joined([*aligned(rows, left=(4, 5)), *(f"{one.state}: {one.problem}" for one in checkpoints if one.problem)])


def difference_json(names: Sequence[str], difference: CheckpointDifference) -> str:
    """Format the differences of two checkpoints, whose paths are ``names``, as one line of JSON."""
    return as_json({"a": names[0], "b": names[1], "equal": difference.equal, **asdict(difference)})


def difference_text(names: Sequence[str], difference: CheckpointDifference) -> str:
    """Format the differences of two checkpoints, whose paths are ``names``, as text for people."""
    lines = [f"only in A: {name}" for name in difference.missing] + [f"only in B: {name}" for name in difference.extra]
    lines += [f"{path}: {a} in A, {b} in B" for path, (a, b) in difference.reshaped.items()]
    for one in difference.arrays:
        index, (u, v) = list(one.first), (f"{value:.9g}" for value in one.values)
        if u == v:
            u, v = map(repr, one.values)
        lost = f"; {one.not_finite} are NaN or infinite in one of them" if one.not_finite else ""
        lines.append(
            f"{one.path}: {one.differing:,} of {one.size:,} elements differ, by at most {one.largest_absolute:.3g} "
            f"absolute, {one.largest_relative:.3g} relative; first at {index}: {u} in A, {v} in B{lost}"
        )
    for name, (a, b) in list(difference.attributes.items())[:_LISTED]:
        lines.append(f"attribute {name}: {shown(a)} in A, {shown(b)} in B")
    if (rest := len(difference.attributes) - _LISTED) > 0:
        lines.append(f"and {rest} attributes more; --json lists all")
    verdict = ", ".join(
        f"{len(what)} {name}"
        for what, name in (
            (difference.missing + difference.extra, "missing in one"),
            (difference.reshaped, "of other shape or type"),
            (difference.arrays, "of other values"),
            (difference.attributes, "other attributes"),
        )
        if what
    )
    lines.append(f"{difference.compared} arrays of {amount(difference.nbytes)}B compared: {verdict or 'equal'}")
    return joined([f"A: {names[0]}", f"B: {names[1]}", *lines])


#: What an imported checkpoint must have: its attributes (JSON values such as step and configuration), which are saved
#: with the arrays, and shape and element type of every array, by its path in the file; None allows any arrays.
Template = tuple[Mapping[str, Any], Expected | None]


def like(path: str) -> Template:
    """Return attributes, array names, shapes and types of a checkpoint; an imported one must have the same."""
    with checkpoint.open_checkpoint(find_checkpoint(Path(path)), "self") as reader:
        elements = element_types(reader)
        return reader.attributes, {path: (reader.arrays[path][0], elements[path]) for path in elements}


def described(name: str) -> Template:
    """Return what an imported checkpoint must contain at step 0 of the training that the file ``name`` configures.

    This template has the model's parameters, and no optimizer state. If the model is a GPT and its training data are
    missing, the imported checkpoint can be used to generate text, but not to resume training.
    """
    document = ConfigDocument(name, read_config(name))
    config = parse_config(document)
    with document.located():
        model, fingerprint = _build(config)
    specs = [spec for spec in nn.model_specs(model) if spec.tied is None]
    training = {
        "step": 0,
        "samples": 0,
        "seed": config.train.seed,
        "loss": None,
        "config": config.to_dict(),
        "data": fingerprint,
    }
    element = np.dtype(model.dtype).name
    return {TRAINING: training}, {f"parameters/{spec.name}": (spec.shape, element) for spec in specs}


def _build(config: RunConfig) -> tuple[Any, str]:
    try:
        source, validation = build_source(config)
    except DataError:
        if not isinstance(config.model, GptSection):
            raise
        return build_model(config), ""
    return build_model(config, source, validation), data_fingerprint(source)
