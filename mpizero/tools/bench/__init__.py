"""Measure a machine, training steps, memory and checkpoints: ``mpizero bench``."""
