"""Run the same training with mpizero, PyTorch and DeepSpeed, for compare.py and other benchmarks."""
