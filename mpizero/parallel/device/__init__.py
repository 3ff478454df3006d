"""Compute on a GPU: copies of parameters, optimizer updates, and where arrays live."""
