"""Check settings: a check returns the value to use, or raises a ValueError whose message says what is allowed.

Find out by what samples are recognized when a run goes on: values of some, checksums of arrays, sizes of files.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

import numpy as np

from mpizero._util.checks import Check, Unexpected, positive
from mpizero._util.names import nearest
from mpizero._util.pytree import SampleTree
from mpizero._util.text import printable
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.data import Source
from mpizero.errors import ConfigError, DataError


class SettingError(ConfigError):
    """Report a wrong setting; ``key`` is its name, such as ``train.steps``, for finding its line in the file."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
        self.message = message


def rejected(key: str, value: object, allowed: str) -> SettingError:
    """Return the error about a wrong setting; its message has the key, the value and what is allowed."""
    return SettingError(key, f"{key} = {shown(value)}: {allowed}")


def shown(value: object) -> str:
    """Format a value as in a TOML file."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + printable(value.replace("\\", "\\\\").replace('"', '\\"')) + '"'
        case list() | tuple():
            return "[" + ", ".join(map(shown, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
        case None:
            return "(not given)"
        case _:
            return str(value)


def allowed(error: ValueError) -> str:
    """Return what the error of a check says about allowed values, such as "must be true or false"."""
    return f"must be {error}" if isinstance(error, Unexpected) else str(error)


def check_option(option: str, value: object, check: Check) -> None:
    """Check the value of a command line option.

    Raises
    ------
    ConfigError
        If the check fails. The message names the option, its value and what is allowed.
    """
    try:
        check(value)
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {allowed(error)}") from None


@dataclass(frozen=True)
class ConfigSection:
    """Serve as base class of all sections: the constructor checks every field by the check declared with it."""

    @classmethod
    def title(cls) -> str:
        """Return the section's name in the file."""
        return cls.__name__.removesuffix("Section").lower()

    def __post_init__(self) -> None:
        """Call every field's check, store the value that it returns, and then call :meth:`check_combination`."""
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, item.metadata["check"](value))
            except ValueError as error:
                raise rejected(f"{self.title()}.{item.name}", value, allowed(error)) from None
        self.check_combination()

    def check_combination(self) -> None:
        """Raise an error for settings that do not fit together; subclasses override this."""

    def to_dict(self) -> dict[str, Any]:
        """Return every setting, defaults included, as JSON values by key."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def reject(self, key: str, allowed: str) -> SettingError:
        """Return the error about the wrong setting ``key`` of this section; ``allowed`` says what is allowed."""
        return rejected(f"{self.title()}.{key}", getattr(self, key), allowed)


def setting(default: Any, check: Check) -> Any:
    """Declare a field of a section with its default and its check."""
    return field(default=default, metadata={"check": check})


def required(check: Check) -> Any:
    """Declare a field of a section without a default, and its check."""
    return field(metadata={"check": check})


def optional(check: Check) -> Check:
    """Return a check that allows None, and uses ``check`` for other values."""
    return lambda value: None if value is None else check(value)


def clock_seconds(value: str) -> float:
    """Convert a batch system's duration "MM:SS", "HH:MM:SS" or "D-HH:MM:SS" to seconds.

    Raises
    ------
    ValueError
        If the text has another form.
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", value)
    if found is None:
        raise ValueError(f"not a time: {value}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def duration(value: Any) -> float:
    """Check a duration and return it in seconds: a number > 0, a text such as "HH:MM:SS", or a TOML time."""
    if isinstance(value, dt.time):
        value = value.strftime("%H:%M:%S")
    try:
        if isinstance(value, str) and value.count(":") == 2:
            value = clock_seconds(value)
        seconds = positive(value)
    except ValueError:
        raise ValueError('must be seconds > 0, "HH:MM:SS" or "D-HH:MM:SS"') from None
    return seconds


def flag(value: Any) -> bool:
    """Check that a value is true or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(value: Any) -> str:
    """Check that a value is a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a string that is not empty")
    if "\0" in value:
        raise ValueError("must be a string without NUL characters")
    return value


def choice(*words: str) -> Check:
    """Return a check that allows only the given words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError("must be one of " + ", ".join(map(shown, words)) + nearest(value, words))
        return value

    return check


def many(check: Check, *, least: int = 0, count: int | None = None) -> Check:
    """Return a check for lists, which returns a tuple of what ``check`` returns for each item.

    There must be ``count`` items or, without it, at least ``least`` items.
    """
    size = f"a list of {count} values" if count is not None else f"a list of at least {least} values"

    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be {size}")
        if len(value) < least or (count is not None and len(value) != count):
            raise ValueError(f"must be {size}, got {len(value)}")
        try:
            return tuple(map(check, value))
        except ValueError as error:
            raise ValueError(f"each value {allowed(error)}") from None

    return check_all


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
    found: dict[str, Any] = {}
    with all_ranks(comm, "data"):
        if comm.rank == 0:
            parts = {"training": source, "validation": validation}
            found = {name: contents(part) for name, part in parts.items() if isinstance(part, Source) and len(part)}
    told: dict[str, Any] = comm.broadcast_object(found, tag="data")
    return told


def contents(source: Source) -> dict[str, Any]:
    """Return what identifies the contents of a source, as JSON values. Not collective.

    [Note: compared samples] The first 64 are read in any case, then twice as many as before while that is likely to
    take no more than :data:`COMPARED_SECONDS`, and in the end all, if there are few. A hash is kept at each number,
    because another machine may read more or fewer of them. Places follow the golden ratio: any number of them is
    spread over all samples, and no period in the data meets them.
    """
    started, length = time.perf_counter(), len(source)
    digest, hashes, done, most = hashlib.sha256(), dict[str, str](), 0, min(length, COMPARED_SAMPLES)
    while True:
        count = min(most, max(FINGERPRINT_SAMPLES, 2 * done))
        places = np.arange(count) if count == length else np.arange(done, count) * 0.6180339887498949 % 1.0 * length
        nbytes = _add(digest, source, places.astype(np.int64)) * source.block_samples
        hashes[str(count)], done = digest.hexdigest(), count
        if count == most or nbytes > COMPARED_BYTES or time.perf_counter() - started > COMPARED_SECONDS / 2:
            break
    found: dict[str, Any] = {"of": length, "samples": hashes}
    for name, told in source.contents().items():
        found |= _of_files(told) if name == "files" else {name: _hash(told)}
    return found


def _add(digest: Any, source: Source, places: Any) -> int:
    """Add samples to a digest; return their number of bytes."""
    tree = SampleTree.of(**dict(zip("xy", source.samples(places), strict=True)))
    for leaf in tree.leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return sum(leaf.nbytes for leaf in tree.leaves)


def _of_files(files: Any) -> dict[str, Any]:
    """Return number, size and newest change of files, and hashes of the size and of the time of each."""
    if not files:
        return {}
    names, sizes, times = zip(*files, strict=True)
    newest = max(times)
    told = {"files": len(files), "bytes": sum(sizes), "newest": newest // 10**9}
    return {**told, "sizes": _hash([names, sizes]), "times": _hash([names, times])}


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


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
    then, newest = (f"{datetime.fromtimestamp(one['newest']):%Y-%m-%d %H:%M:%S}" for one in (saved, now))
    count = max(map(int, _counts(saved, now)), default=0)
    return (
        f"their files were changed at other times than those of the saved run (the newest at {newest}, then {then}); "
        f"sizes and {count} of {now['of']} samples, spread over all, are the same"
    )


def _counts(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the numbers of samples at which both have a hash."""
    same = saved.get("of") == now.get("of") and "samples" in saved and "samples" in now
    return [count for count in now["samples"] if count in saved["samples"]] if same else []
