"""Prompts as other engines name their chunks: told of from a tier alone, without the engine."""
