"""The blocks of a model that drafts, beside those of its target."""
