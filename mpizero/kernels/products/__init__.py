"""Multiply matrices on the CPU: with kernels of this package, or with a BLAS library of the user's choice."""
