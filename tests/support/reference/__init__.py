"""Compute in plain NumPy what each kernel computes: slow, but easy to check.

Each function has the name and the signature of a kernel of :mod:`mpizero.kernels.cpu`, whose docstring explains them.
"""
