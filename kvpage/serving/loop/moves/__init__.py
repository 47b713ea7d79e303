"""Blocks that are moved, or loaded from a store, beside the computation."""
