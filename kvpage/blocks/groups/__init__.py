"""Managers of models whose layers keep their cache in several ways: over a window, or of a model that drafts."""
