"""Provide the layers that run whole on one rank, with hand-written backward passes."""
