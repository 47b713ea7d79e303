"""Answers apart: thoughts, content and calls of tools, by the format of the model."""
