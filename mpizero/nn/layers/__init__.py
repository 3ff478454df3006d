"""Layers with hand-written backward passes."""
