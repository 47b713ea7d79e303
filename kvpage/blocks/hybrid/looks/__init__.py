"""Looks at what is cached for models with states: how far it reaches, and checkpoints that are read beside steps."""
