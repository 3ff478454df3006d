"""Define formulas of single numbers, once for CPU and GPU.

They are plain Python without bare float literals: numba takes a literal for float64, and would then compute in float64
where the arrays are float32.
"""
