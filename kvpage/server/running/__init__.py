"""Requests of the API, run by the engine."""
