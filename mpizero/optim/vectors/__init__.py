"""Minimize by methods that look at the whole vector of parameters: L-BFGS, conjugate gradients, Newton-CG."""
