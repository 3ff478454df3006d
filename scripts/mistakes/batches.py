"""Mistakes with batches."""

from __future__ import annotations

import case

import mpizero as mz


@case.mistake("DataError", "3", "features", status=65)
def an_axis_too_short():
    """Train on samples with 3 features where the layer takes 4."""
    model = mz.ZeRO1Model(mz.nn.Sequential([mz.nn.Linear(4, 2)], loss=mz.nn.MeanSquaredError()), mz.ShardingConfig())
    x, y = case.samples()
    model.train(x[:, :3], y)


if __name__ == "__main__":
    case.main()
