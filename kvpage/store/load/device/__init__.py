"""Copies of chunks between a GPU's blocks and host memory."""
