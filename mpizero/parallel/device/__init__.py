"""Compute on a GPU: hold copies of parameters there, update them, and copy arrays to and from the host."""
