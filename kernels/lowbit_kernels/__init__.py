"""Triton kernels for low-bit weights: pack, W4A16 GEMM and the plain-torch truth. Knows nothing of `lowbit`."""
