"""Read whole blocks of neighbouring samples: for a copy of all samples a node, or for a shuffle by blocks."""
