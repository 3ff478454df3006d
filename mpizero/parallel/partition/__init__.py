"""Divide a model over ranks: pipeline stages, tensor and context parts."""
