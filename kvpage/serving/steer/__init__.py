"""Branches, beams and tries over one engine."""
