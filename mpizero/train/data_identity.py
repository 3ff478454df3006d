"""Check that a resumed run has the same data: compare values of some samples, checksums of arrays, sizes of files."""

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
#: Most samples that are compared at a resume; most bytes that are read for them (whole blocks of a file), and seconds,
#: after which the number of samples is not doubled again.
COMPARED_SAMPLES, COMPARED_BYTES, COMPARED_SECONDS = 1024, 8 << 20, 2.0


def data_fingerprint(source: Source) -> str:
    """Return a hash of a source's length and of :data:`FINGERPRINT_SAMPLES` samples, evenly spaced in it.

    Not collective.

    Raises
    ------
    DataError
        If samples contain values other than arrays.
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
    """Return :func:`contents` of the training and of the validation data, by "training" and "validation".

    Collective over ``comm``. Only rank 0 reads samples. An :class:`~mpizero.data.OnlineSource` and missing or empty
    data have no entry.
    """
    parts = {"training": source, "validation": validation}

    def read() -> dict[str, Any]:
        return {name: contents(part) for name, part in parts.items() if isinstance(part, Source) and len(part)}

    return from_rank_0(comm, read, "data")


def contents(source: Source) -> dict[str, Any]:
    """Return JSON values by which a resumed run recognizes a source: hashes of samples, of arrays, of files' sizes.

    Not collective.

    [Note: compared samples] 64 samples are read in any case. The number of samples is then doubled as long as reading
    is likely to take less than :data:`COMPARED_SECONDS`, up to all samples if there are few. A hash is stored for each
    number of samples, because another machine may read more or fewer. The positions of samples, as fractions of the
    source's length, are multiples of the golden ratio modulo 1: any number of them is spread over the whole source, and
    they do not coincide with a period of the data.
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
    """Add the samples at ``positions`` to a hash; return their number of bytes."""
    tree = SampleTree.of(**dict(zip("xy", source.samples(positions), strict=True)))
    for leaf in tree.leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return sum(leaf.nbytes for leaf in tree.leaves)


def _of_files(files: Any) -> dict[str, Any]:
    """Return a dict of number, total size and last change of ``files``, and of hashes of all sizes and all times.

    ``files`` has the name, the size and the time of change in nanoseconds of each file. If it is empty, so is the dict.
    """
    if not files:
        return {}
    names, sizes, times = zip(*files, strict=True)
    latest = max(times)
    summary = {"files": len(files), "bytes": sum(sizes), "newest": latest // 10**9}
    return {**summary, "sizes": _hash([names, sizes]), "times": _hash([names, times])}


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def check_data(what: str, alike: bool, saved: Any, now: Any, refused: str, elsewhere: str) -> None:
    """Raise ConfigError if the data named ``what``, "training" or "validation", differ from those of the saved run.

    Not collective. ``saved`` and ``now`` are the results of :func:`shared_contents` in the saved run and in this one,
    ``alike`` tells whether the results of :func:`data_fingerprint` are equal, ``refused`` and ``elsewhere`` are parts
    of the error message.
    """
    why = difference(saved.get(what, {}), now.get(what, {}))
    if why or not alike:
        hint = f": {why}" if why else ""
        raise ConfigError(
            f"{refused}: data: the {what} samples are not those of the saved run{hint}; give the same data, {elsewhere}"
        )


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first difference between two results of :func:`contents` (hashes of data); "" if there is none.

    Not collective.
    """
    for count in _counts(saved, now):
        if saved["samples"][count] != now["samples"][count]:
            return f"{count} of {now['of']} samples were compared, and some have other values"
    if "arrays" in saved and saved["arrays"] != now.get("arrays", saved["arrays"]):
        return "the arrays have other checksums"
    if "sizes" in saved and saved["sizes"] != now.get("sizes", saved["sizes"]):
        return f"the files have other names or sizes, {now['bytes']} bytes together, {saved['bytes']} then"
    return ""


def touched(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a message if files that are otherwise equal have other modification times, else "". Not collective."""
    if "times" not in saved or saved["times"] == now.get("times", saved["times"]):
        return ""
    then, latest = (f"{datetime.fromtimestamp(one['newest']):%Y-%m-%d %H:%M:%S}" for one in (saved, now))
    count = max(map(int, _counts(saved, now)), default=0)
    return (
        f"their files were changed at other times than those of the saved run (the newest at {latest}, then {then}); "
        f"sizes and {count} of {now['of']} samples, spread over all, are the same"
    )


def _counts(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return each n for which two results of :func:`contents` both have a hash of n samples.

    ``saved`` and ``now`` are these results, of the saved run and of this one. The list is empty if the sources have
    different lengths.
    """
    same = saved.get("of") == now.get("of") and "samples" in saved and "samples" in now
    return [count for count in now["samples"] if count in saved["samples"]] if same else []
