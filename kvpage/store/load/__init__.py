"""Chunks of tensors and of an engine's blocks, on their way to records and back."""
