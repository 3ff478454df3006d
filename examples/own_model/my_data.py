"""Positions of a damped pendulum at a few times, from which its frequency and damping are to be found."""

from __future__ import annotations

from typing import Any

import numpy as np


def make(samples: int, noise: float, seed: int) -> tuple[Any, Any]:
    """Return the curves (samples, 16) and what made them (samples, 2); the same on every rank, by ``seed``."""
    random = np.random.default_rng(seed)
    frequency, damping = random.uniform(1, 3, samples), random.uniform(0, 1, samples)
    times = np.linspace(0, 3, 16)
    curves = np.exp(-np.outer(damping, times)) * np.cos(np.outer(frequency, times))
    curves += noise * random.normal(size=curves.shape)
    return curves.astype(np.float32), np.stack([frequency, damping], axis=1).astype(np.float32)
