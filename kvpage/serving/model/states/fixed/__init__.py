"""Scans and convolutions of mixers that compute token by token, in prompts as in answers."""
