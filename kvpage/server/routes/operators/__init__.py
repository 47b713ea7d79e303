"""The paths for operators and probes."""
