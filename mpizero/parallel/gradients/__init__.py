"""Collect, reduce and average gradients over the data ranks."""
