"""Compute in plain NumPy what each kernel computes, under the same name and signature: slow, but easy to check."""
