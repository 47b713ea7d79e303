"""The operations on tensors in host memory: the C++ core."""
