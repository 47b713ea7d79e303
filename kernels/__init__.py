"""Triton kernels. Only kvpage's operations import them, once a tensor is on a GPU; installed as kvpage.kernels.

The wrappers here take checked arguments: kvpage.ops validates shapes, dtypes and devices.
"""
