"""Compute on NumPy arrays by kernels that numba has compiled; the modules of this package are imported on first use.

The last parameter of some kernels (``scratch``, ``block`` or ``chunk``) is temporary memory, which callers do not pass.
"""

from mpizero._util.names import lazy_modules

__getattr__ = lazy_modules(__name__)
