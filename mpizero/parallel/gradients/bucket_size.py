"""The option ``bucket_mb``: how much of a gradient travels at once; see [Note: buckets] in ``bucket_tuner.py``."""

from __future__ import annotations

from mpizero.errors import ConfigError

#: ``bucket_mb`` is to be tuned.
AUTO = "auto"


def elements_of(mebibytes: float, itemsize: int) -> int:
    """Return how many elements of ``itemsize`` bytes a bucket has, at least one. Not collective."""
    return max(1, int(mebibytes * 2**20) // itemsize)


def check_bucket(bucket_mb: object, compression: str | None) -> None:
    """Raise :class:`ConfigError` unless ``bucket_mb`` is None, "auto" or a size. Not collective."""
    if bucket_mb is None:
        return
    if bucket_mb != AUTO and (
        isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not 0 < bucket_mb <= 4096
    ):
        raise ConfigError(f"bucket_mb={bucket_mb!r}: expected None, 'auto' or MiB of more than 0 and at most 4096")
    if compression is not None:
        raise ConfigError(
            f"bucket_mb={bucket_mb!r} with gradient_compression={compression!r}: what a compressed message leaves out "
            "depends on where it is cut, so its size is fixed; leave one of them out"
        )
