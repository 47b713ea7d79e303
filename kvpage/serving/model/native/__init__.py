"""Layers of a model's view that compute with kvpage's own operations on a CPU, over the model's weights."""
