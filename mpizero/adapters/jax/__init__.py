"""Train models that are written in JAX.

Import this package before JAX computes anything: XLA's number of threads can be set only before.
"""

from mpizero.adapters.jax.function import fix_threads

fix_threads()  # before anything below could start the client of XLA

from mpizero.adapters.jax.model import JaxModel  # noqa: E402

__all__ = ["JaxModel"]
