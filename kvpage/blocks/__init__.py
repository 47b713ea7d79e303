"""Blocks of both tiers: sequences' block tables, the moves between the tiers, and the names of cached blocks."""
