"""Adapters of peft: their files, and linear layers that add them to single rows."""
