"""Decode steps that a device replays as a whole, with one launch of the host."""
