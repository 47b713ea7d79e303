"""Triton kernels. Only kvpage/ops.py imports them; installed as kvpage.kernels."""
