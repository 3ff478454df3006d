"""Run mpizero, PyTorch and DeepSpeed on the same training, for compare.py and others."""
