"""Minimize by methods of whole vectors: the loop, and its result."""
