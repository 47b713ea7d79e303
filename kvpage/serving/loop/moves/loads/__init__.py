"""Prompts on their way out of a store, for requests that wait."""
