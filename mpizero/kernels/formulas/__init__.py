"""Scalar formulas, written once for CPU and GPU: plain Python without float literals (they would turn float32 into float64)."""
