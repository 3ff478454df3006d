"""Find out by what samples are recognized when a run goes on: values of some, checksums of arrays, sizes of files."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np

from mpizero._util.pytree import SampleTree
from mpizero.comm import Communicator
from mpizero.comm.agreement import from_rank_0
from mpizero.data import Source
from mpizero.errors import ConfigError, DataError

#: Number of samples in the hash by which a resumed run recognizes its training data.
FINGERPRINT_SAMPLES = 64
#: Most samples that are compared at a resume; most bytes of them, with the blocks that are stored together with them,
#: and seconds of reading, at which their number is doubled no more.
COMPARED_SAMPLES, COMPARED_BYTES, COMPARED_SECONDS = 1024, 8 << 20, 2.0


def data_fingerprint(source: Source) -> str:
    """Return a hash of a source's length and of :data:`FINGERPRINT_SAMPLES` samples, evenly spaced in it.

    Not collective.

    Raises
    ------
    DataError
        If samples are not made of arrays.
    """
    count = min(FINGERPRINT_SAMPLES, len(source))
    x, y = source.samples(np.arange(count, dtype=np.int64) * len(source) // max(count, 1))
    tree = SampleTree.of(x=x, y=y)
    if tree.uncut:
        raise DataError(f"{type(source).__name__}: its samples are not arrays: {tree.uncut}")
    names = [] if tree.paths == ("x", "y") else [tree.form]  # runs saved before there were trees have no form
    kinds = " ".join(f"{leaf.dtype} {leaf.shape}" for leaf in tree.leaves)
    digest = hashlib.sha256(" ".join([str(len(source)), kinds, *names]).encode())
    for leaf in tree.leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def shared_contents(comm: Communicator, source: Any, validation: Any) -> dict[str, Any]:
    """Return what identifies the contents of the training and of the validation data, as rank 0 finds it.

    Collective over ``comm``. Only rank 0 reads, some samples spread over all; samples that arrive while the model is
    trained, and data that are not there, have no entry.
    """
    parts = {"training": source, "validation": validation}

    def read() -> dict[str, Any]:
        return {name: contents(part) for name, part in parts.items() if isinstance(part, Source) and len(part)}

    return from_rank_0(comm, read, "data")


def contents(source: Source) -> dict[str, Any]:
    """Return what identifies the contents of a source, as JSON values. Not collective.

    [Note: compared samples] The first 64 are read in any case, then twice as many as before while that is likely to
    take no more than :data:`COMPARED_SECONDS`, and in the end all, if there are few. A hash is kept at each number,
    because another machine may read more or fewer of them. Positions follow the golden ratio: any number of them is
    spread over all samples, and no period in the data meets them.
    """
    started, length = time.perf_counter(), len(source)
    digest, hashes, done, most = hashlib.sha256(), dict[str, str](), 0, min(length, COMPARED_SAMPLES)
    while True:
        count = min(most, max(FINGERPRINT_SAMPLES, 2 * done))
        positions = np.arange(count) if count == length else np.arange(done, count) * 0.6180339887498949 % 1.0 * length
        nbytes = _add(digest, source, positions.astype(np.int64)) * source.block_samples
        hashes[str(count)], done = digest.hexdigest(), count
        if count == most or nbytes > COMPARED_BYTES or time.perf_counter() - started > COMPARED_SECONDS / 2:
            break
    identity: dict[str, Any] = {"of": length, "samples": hashes}
    for name, value in source.contents().items():
        identity |= _of_files(value) if name == "files" else {name: _hash(value)}
    return identity


def _add(digest: Any, source: Source, positions: Any) -> int:
    """Add samples to a digest; return their number of bytes."""
    tree = SampleTree.of(**dict(zip("xy", source.samples(positions), strict=True)))
    for leaf in tree.leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return sum(leaf.nbytes for leaf in tree.leaves)


def _of_files(files: Any) -> dict[str, Any]:
    """Return number, size and newest change of files, and hashes of the size and of the time of each."""
    if not files:
        return {}
    names, sizes, times = zip(*files, strict=True)
    latest = max(times)
    summary = {"files": len(files), "bytes": sum(sizes), "newest": latest // 10**9}
    return {**summary, "sizes": _hash([names, sizes]), "times": _hash([names, times])}


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def check_data(what: str, alike: bool, saved: Any, now: Any, refused: str, elsewhere: str) -> None:
    """Raise ConfigError if the data named ``what`` are not those of the saved run. Not collective."""
    why = difference(saved.get(what, {}), now.get(what, {}))
    if why or not alike:
        hint = f": {why}" if why else ""
        raise ConfigError(
            f"{refused}: data: the {what} samples are not those of the saved run{hint}; give the same data, {elsewhere}"
        )


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what shows that data are not the saved ones; "" if nothing does. Not collective."""
    for count in _counts(saved, now):
        if saved["samples"][count] != now["samples"][count]:
            return f"{count} of {now['of']} samples were compared, and some have other values"
    if "arrays" in saved and saved["arrays"] != now.get("arrays", saved["arrays"]):
        return "the arrays have other checksums"
    if "sizes" in saved and saved["sizes"] != now.get("sizes", saved["sizes"]):
        return f"the files have other names or sizes, {now['bytes']} bytes together, {saved['bytes']} then"
    return ""


def touched(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a text if files that are equal otherwise were changed at other times; else "". Not collective."""
    if "times" not in saved or saved["times"] == now.get("times", saved["times"]):
        return ""
    then, latest = (f"{datetime.fromtimestamp(one['newest']):%Y-%m-%d %H:%M:%S}" for one in (saved, now))
    count = max(map(int, _counts(saved, now)), default=0)
    return (
        f"their files were changed at other times than those of the saved run (the newest at {latest}, then {then}); "
        f"sizes and {count} of {now['of']} samples, spread over all, are the same"
    )


def _counts(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the numbers of samples at which both have a hash."""
    same = saved.get("of") == now.get("of") and "samples" in saved and "samples" in now
    return [count for count in now["samples"] if count in saved["samples"]] if same else []
