"""The group of layers that keep a state: its slots, and the checkpoints at which prompts can begin."""
