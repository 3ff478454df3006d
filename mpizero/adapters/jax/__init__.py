"""Train models that are written in JAX.

Import this package before JAX computes anything: afterwards, XLA's number of threads cannot be changed.
"""

from mpizero.adapters.jax.function import fix_threads

fix_threads()  # before anything below could start the client of XLA

from mpizero.adapters.jax.model import JaxModel  # noqa: E402

__all__ = ["JaxModel"]
