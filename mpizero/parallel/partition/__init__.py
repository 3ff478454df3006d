"""Divide a model over ranks: cut it into pipeline stages, and split its layers over tensor and context groups."""
