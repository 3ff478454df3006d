"""Plain NumPy oracles with the names and signatures of the kernels; slow, and obviously right."""
