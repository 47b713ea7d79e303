"""Hybrid models: states at exact token positions, beside the prefix tree. It owns no tensors."""
