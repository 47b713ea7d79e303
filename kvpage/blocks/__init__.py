"""Blocks and sequences without their bytes: who holds which block, and what moves."""
