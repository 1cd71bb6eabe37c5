"""Triton kernels, each held to its torch reference."""
