"""Requests whose segments are blended."""
