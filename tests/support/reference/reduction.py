"""Sum in the order of a binary tree, and draw random numbers, in NumPy, as a reference for the kernels.

The tree is summed level by level. Random numbers are counter-based (Philox 4x32-10).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpizero.types import Array


def _tree(values: Array) -> float:
    """Return the sum of ``values`` in the order of the binary tree, level by level; 0 if there are none.

    node(level, i) = node(level - 1, 2 i) + node(level - 1, 2 i + 1); a missing right child passes the left one through.
    """
    if values.size == 0:
        return 0.0
    while values.size > 1:
        level = values[: values.size // 2 * 2].reshape(-1, 2).sum(axis=1)
        values = np.append(level, values[-1]) if values.size % 2 else level
    return float(values[0])


def tree_square_sums(x: Array, starts: Array, stops: Array, out: Array) -> None:
    tree_dots(x, x, starts, stops, out)


def tree_dots(x: Array, y: Array, starts: Array, stops: Array, out: Array) -> None:
    products = x.astype(np.float64) * y.astype(np.float64)
    out[:] = [_tree(products[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def all_finite(x: Array) -> bool:
    return bool(np.isfinite(x).all())


def first_nonfinite(x: Array) -> int:
    found = np.flatnonzero(~np.isfinite(x))
    return int(found[0]) if found.size else -1


def _add(terms: Sequence[Array], start: int, out: Array) -> None:
    """Write the sum of the terms, a power of two, to ``out``: neighbours first, then neighbouring sums."""
    sums = [term[:, start : start + out.shape[1]] for term in terms]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    out[...] = sums[0]


def add_two(a: Array, b: Array, start: int, out: Array) -> None:
    _add((a, b), start, out)


def add_four(a: Array, b: Array, c: Array, d: Array, start: int, out: Array) -> None:
    _add((a, b, c, d), start, out)


def add_eight(
    a: Array, b: Array, c: Array, d: Array, e: Array, f: Array, g: Array, h: Array, start: int, out: Array
) -> None:
    _add((a, b, c, d, e, f, g, h), start, out)


_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_DROPOUT, _PERMUTATION = 0xD809, 0x9E12


def _philox(counter: Array, key: tuple[int, int]) -> Array:
    """Return an array (n, 4) of the random words of n counters, (n, 4), all under one key of two words."""
    c = np.asarray(counter, np.uint64).reshape(-1, 4)
    k = list(key)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[:, 0], np.uint64(0xCD9E8D57) * c[:, 2]
        c = np.stack(
            [(b >> _32) ^ c[:, 1] ^ np.uint64(k[0]), b & _LOW, (a >> _32) ^ c[:, 3] ^ np.uint64(k[1]), a & _LOW], axis=1
        )
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def _words(value: int) -> tuple[int, int]:
    return value % 2**32, (value >> 32) % 2**32


def philox(counter: Array, key: Array, out: Array) -> None:
    out[:] = _philox(counter, (int(key[0]), int(key[1])))[0]


def _element_words(key0: int, key1: int, site: int, elements: Array, per: int) -> Array:
    """Return an array (elements, 4): for each element, the four random words of the Philox block it belongs to.

    Element i belongs to block i // per.
    """
    blocks = (elements // per).astype(np.uint64)
    counter = np.empty((elements.size, 4), np.uint64)
    counter[:, 0], counter[:, 1] = blocks & _LOW, blocks >> _32
    counter[:, 2], counter[:, 3] = _words(site)
    return _philox(counter, (key0 % 2**32, key1 % 2**32))


def _unit64(words: Array) -> Array:
    """Return an array (blocks, 2): two uniform numbers on [0, 1) of 53 bits from the four words of each block."""
    high, low = words[:, 0::2] >> np.uint64(5), words[:, 1::2] >> np.uint64(6)
    return np.asarray((high * np.uint64(2**26) + low) / 2.0**53)


def fill_uniform(key0: int, key1: int, site: int, start: int, out: Array, low1: Array, high1: Array) -> None:
    single = out.dtype == np.float32
    per = 4 if single else 2
    words = _element_words(key0, key1, site, np.arange(start, start + out.size), per)
    lanes = np.arange(start, start + out.size) % per
    units = (words >> np.uint64(8)) / 2.0**24 if single else _unit64(words)
    unit = units[np.arange(out.size), lanes].astype(out.dtype)
    value = low1[0] + (high1[0] - low1[0]) * unit
    out[:] = np.where(value < high1[0], value, low1[0])


def fill_normal(key0: int, key1: int, site: int, start: int, out: Array, scale1: Array) -> None:
    single = out.dtype == np.float32
    per = 4 if single else 2
    words = _element_words(key0, key1, site, np.arange(start, start + out.size), per)
    lanes = np.arange(start, start + out.size) % per
    if single:
        a, b = words[:, 0::2] / 2.0**32 + 2.0**-33, (words[:, 1::2] >> np.uint64(8)) / 2.0**24
    else:
        a, b = _unit64(words)[:, :1] + 2.0**-54, _unit64(words)[:, 1:]
    radius, angle = np.sqrt(-2 * np.log(a)), 2 * np.pi * b
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2).reshape(out.size, per)
    out[:] = pairs[np.arange(out.size), lanes] * scale1[0]


def _derived_key(seed: int, purpose: int, first: int, second: int) -> Array:
    key = (_words(seed)[0], _words(seed)[1] ^ purpose)
    return np.asarray(_philox(np.array([*_words(first), *_words(second)], np.uint64), key)[0])


def dropout(
    x: Array, y: Array, rate1: Array, seed: int, site: int, step: int, first_sample: int, per_sample: int,
    offset: int, width: int, rows: int, row_step: int, plane_step: int,
) -> None:  # fmt: skip
    k0, k1, _, _ = (int(word) for word in _derived_key(seed, _DROPOUT, site, step))
    threshold = int(float(rate1[0]) * 2**32)
    one = rate1.dtype.type(1)
    lines = np.arange(per_sample // width if width else 0)
    starts = offset + lines // rows * plane_step + lines % rows * row_step
    elements = (starts[:, None] + np.arange(width)).reshape(-1)
    for sample in range(x.size // per_sample if per_sample else 0):
        part = slice(sample * per_sample, (sample + 1) * per_sample)
        words = _element_words(k0, k1, first_sample + sample, elements, 4)
        kept = words[np.arange(per_sample), elements % 4] >= threshold
        y[part] = np.where(kept, x[part] * (one / (one - rate1[0]) if rate1[0] < 1 else one), 0)


#: The gradient of :func:`dropout` is the same mask and factor on the gradient.
dropout_backward = dropout


def _mix(half: int, key: int) -> int:
    p = (half ^ key) * 0xD2511F53
    p = ((p >> 32) ^ (p % 2**32) ^ key) * 0xCD9E8D57
    return (p >> 32) ^ (p % 2**32)


def permutation(index: Array, length: int, seed: int, epoch: int) -> None:
    keys = [int(word) for part in (0, 1) for word in _derived_key(seed, _PERMUTATION, epoch, part)]
    bits = 1
    while 4**bits < length:
        bits += 1
    for i, value in enumerate(index.tolist()):
        if not 0 <= value < length:
            index[i] = -1
            continue
        image = length
        while image >= length:
            left, right = divmod(value, 2**bits)
            for key in keys:
                left, right = right, left ^ (_mix(right, key) % 2**bits)
            image = value = left * 2**bits + right
        index[i] = image
