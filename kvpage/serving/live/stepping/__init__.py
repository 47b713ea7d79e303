"""The stepping thread of an AsyncEngine, and the ways to it."""
