"""Compute on a GPU: keep copies of parameters on it, update them there, and copy arrays to and from the host."""
