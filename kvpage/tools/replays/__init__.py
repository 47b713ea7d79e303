"""Kinds of replays of a trace, and their output."""
