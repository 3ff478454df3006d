"""Exact sums and gathers of gradients and parameters over the data ranks."""
