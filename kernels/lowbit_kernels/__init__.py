"""Kernels for low-bit weights: quantize and pack, WnA16 GEMM, and their truth in plain PyTorch.

Importing needs neither a GPU nor Triton, and changes nothing. Knows nothing of `lowbit`.
"""
