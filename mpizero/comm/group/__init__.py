"""Messages inside a model: sums, gathers and shifts of tensor and context groups, and between pipeline stages."""
