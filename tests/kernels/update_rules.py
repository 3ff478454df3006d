"""The kernels that update parameters, with the scalars of some step: for tests, and for the check of a GPU."""

from __future__ import annotations

#: Kernel -> (number of arrays of its state, its scalars).
UPDATES: dict[str, tuple[int, list[float]]] = {
    "sgd": (0, [0.1, 0.01]),
    "momentum": (1, [0.1, 0.01, 0.9, 0.8, 1.0, 0.9]),
    "adam": (2, [0.01, 0.9, 0.1, 0.999, 0.001, 0.05, 3.0, 1e-8]),
    "adamw": (2, [0.99, 0.9, 0.1, 0.999, 0.001, 0.05, 3.0, 1e-8]),
    "rmsprop": (1, [0.1, 0.01, 0.99, 0.01, 1e-8]),
    "lion": (1, [0.99, 0.1, 0.9, 0.1, 0.99, 0.01, 0.0]),
    "lamb_direction": (2, [0.01, 0.9, 0.1, 0.999, 0.001, 1.5, 3.0, 1e-6]),
    "lamb_apply": (0, [0.3]),
    "ema": (0, [0.3]),
}
#: Those that a kernel of its own also computes in one pass with the sum of a tree's rows.
IN_ONE_PASS = tuple(name for name in UPDATES if not name.startswith("lamb") and name != "ema")
