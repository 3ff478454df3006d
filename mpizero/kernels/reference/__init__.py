"""Compute what every kernel computes in plain NumPy, with the same names and signatures: slow, but easy to check."""
