"""Compare shuffled reads of an HDF5 file with sequential reads of the same bytes, with and without the node's copy.

For samples of 4 and 64 KiB, contiguous and in gzip chunks of 64 samples, one process reads batches of 64 samples:

``sequential``  h5py, in file order
``shuffled``    `Hdf5Source` in the order of an epoch
``copy``        the same from `cached`, which is filled meanwhile; of contiguous files the page cache is the copy
``second``      the next epoch from the full copy
``blocks``      `BlockShuffledSource` of 16 blocks of 64 samples, in the order of an epoch
``loader``      PyTorch's DataLoader with one worker, which reads one sample after the other by h5py (if torch is there)

The page cache forgets the file before each measurement but ``second``. A contender that has not read the file in
``--seconds`` stops there, but not ``copy`` and ``second``, whose rates are of whole epochs because the first batches
fill most of the copy. Rates are bytes of samples over time; ratios are to ``sequential`` of the same round.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import h5py
import numpy as np
from harness.options import parser
from harness.tables import aligned
from harness.turns import alternate

import mpizero as mz
from mpizero._util.numbers import Measurement

BATCH = CHUNK = 64
LAYOUTS: dict[str, dict[str, Any]] = {"contiguous": {}, "gzip": {"compression": "gzip", "compression_opts": 1}}


def main() -> None:
    """Measure every size and layout, and print the tables."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--samples", type=int, default=20_000, help="(default: %(default)s)")
    made.add_argument("--kib", type=int, nargs="+", default=[4, 64], help="sizes of a sample (default: 4 64)")
    made.add_argument("--seconds", type=float, default=10.0, help="longest measurement (default: %(default)s)")
    made.add_argument("--folder", help="where the files are made (default: the folder for temporary files)")
    options = made.parse_args()
    with mz.ShardingConfig(comm="self") as config:  # loads the kernel that shuffles
        next(mz.data.batches(mz.data.ArraySource(np.zeros(2), np.zeros(2)), config, 1))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kib in options.kib:
            for layout, storage in LAYOUTS.items():
                path = Path(folder) / f"{layout}-{kib}.h5"
                write(path, options.samples, kib * 256, storage)
                rates = measure(path, options.rounds, options.seconds)
                path.unlink()
                base = rates["sequential"]
                lines = [(name, Measurement.of(r).text(0), Measurement.of_ratios(r, base)) for name, r in rates.items()]
                print("\n" + aligned((f"{kib} KiB, {layout}", "MiB/s", "of sequential"), lines), flush=True)


def write(path: Path, samples: int, floats: int, storage: dict[str, Any]) -> None:
    """Write a file of random samples of about 12 significant bits."""
    rng = np.random.default_rng(0)
    chunks = {"chunks": (CHUNK, floats)} if storage else {}
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (samples, floats), "f4", **chunks, **storage)
        file["y"] = np.arange(samples)
        for start in range(0, samples, CHUNK):
            part = rng.normal(size=(min(CHUNK, samples - start), floats)).astype("f4")
            x[start : start + len(part)] = (part.view("u4") & 0xFFFFF000).view("f4")


def forget(path: Path) -> None:
    """Drop the file from the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return, by contender, its rates in MiB/s, one of each round."""
    second: list[float] = []

    def one(name: str) -> float:
        if name == "copy":
            with mz.ShardingConfig(comm="self") as config:
                forget(path)
                start = time.perf_counter()
                source = mz.data.Hdf5Source(path, "x", "y")
                with mz.data.cached(source, config) as copy:
                    rate = timed(epoch(copy, config), math.inf, start)
                    second.append(timed(epoch(copy, config, 1), math.inf))
                source.close()
            return rate
        forget(path)
        return timed(CONTENDERS[name](path), seconds)

    names = ["sequential", "shuffled", "copy", "blocks"] + (["loader"] if find_spec("torch") else [])
    return alternate(rounds, names, one) | {"second": second}


def timed(batches: Iterator[Any], seconds: float, start: float | None = None) -> float:
    """Return MiB of inputs per second; no batch begins later than ``seconds`` after the start."""
    start, done = time.perf_counter() if start is None else start, 0
    for x, _ in batches:
        done += x.nbytes
        if time.perf_counter() - start > seconds:
            break
    return done / 2**20 / (time.perf_counter() - start)


def sequential(path: Path) -> Iterator[Any]:
    """Yield all samples in file order."""
    with h5py.File(path, locking=False) as file:
        for start in range(0, len(file["x"]), BATCH):
            yield file["x"][start : start + BATCH], file["y"][start : start + BATCH]


def shuffled(path: Path, block: int = 1) -> Iterator[Any]:
    """Yield all samples in the order of an epoch, without a copy; maybe shuffled by blocks of so many samples."""
    with mz.ShardingConfig(comm="self") as config:
        source = mz.data.Hdf5Source(path, "x", "y")
        yield from epoch(source if block == 1 else mz.data.BlockShuffledSource(source, block=block), config)
        source.close()


def epoch(source: mz.data.Source, config: mz.ShardingConfig, number: int = 0) -> Iterator[Any]:
    """Yield the batches of one epoch."""
    steps = len(source) // BATCH
    yield from mz.data.batches(source, config, BATCH, steps=steps, consumed=number * len(source))


def loader(path: Path) -> Iterator[Any]:
    """Yield all samples from PyTorch's DataLoader with one worker."""
    import torch

    class Samples(torch.utils.data.Dataset):  # type: ignore[misc]
        file: Any = None

        def __len__(self) -> int:
            with h5py.File(path, locking=False) as file:
                return len(file["x"])

        def __getitem__(self, index: int) -> Any:
            self.file = self.file or h5py.File(path, locking=False)
            return self.file["x"][index], self.file["y"][index]

    yield from torch.utils.data.DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=1)


CONTENDERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "sequential": sequential,
    "shuffled": shuffled,
    "blocks": partial(shuffled, block=CHUNK),
    "loader": loader,
}


if __name__ == "__main__":
    main()
