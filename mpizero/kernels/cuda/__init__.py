"""Compute on GPU arrays by CUDA kernels; the modules of this package are imported on first use.

Arrays are CuPy's.
"""

from mpizero._util.names import lazy_modules

__getattr__ = lazy_modules(__name__)
