"""Triton kernels. Only kvpage's operations import them, once a tensor is on a GPU; installed as kvpage.kernels.

The wrappers here take checked arguments: shapes, dtypes and devices are kvpage.ops.rows' to validate.
"""
