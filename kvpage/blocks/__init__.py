"""Blocks of both tiers: sequences' block tables, the moves between the tiers, and what cached blocks are known by."""
