"""Comparisons with PyTorch, an implementation that shares nothing with this one; they run where it is installed."""
