"""Send messages inside a model: sums, gathers and shifts in tensor and context groups, and between pipeline stages."""
