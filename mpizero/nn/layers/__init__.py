"""Provide layers with hand-written backward passes."""
