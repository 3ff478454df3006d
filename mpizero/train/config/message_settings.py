"""Check settings of messages between ranks: how gradients are compressed, and how many bytes are sent at once."""

from __future__ import annotations

from typing import Any

from mpizero.comm.reduce import codec_of
from mpizero.errors import ConfigError
from mpizero.sharding.config import check_bucket


def compression(value: Any) -> str | None:
    """Check ``train.gradient_compression``; return None for "none"."""
    if value == "none":
        return None
    try:
        codec_of(value)
    except ConfigError:
        raise ValueError(
            'must be "none", "bf16", "fp16", "int8", or "topk:SHARE" with the share of the values that is sent, more '
            'than 0 and less than 0.5, such as "topk:0.01"'
        ) from None
    return str(value)


def bucket(value: Any) -> float | str:
    """Check ``parallel.bucket_mb``: it must be "auto" or a number of MiB."""
    try:
        check_bucket(value, None)
    except ConfigError:
        raise ValueError('must be "auto", or MiB of more than 0 and at most 4096') from None
    return value if isinstance(value, str) else float(value)
