"""Define scalar formulas, once for CPU and GPU.

Plain Python without float literals: numba would take them for float64, and float32 arithmetic with them.
"""
