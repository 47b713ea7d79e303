"""Types of command-line arguments that benchmarks share."""

import argparse


def positive(text: str) -> int:
    """Return the integer that the text says, at least 1. Raises argparse.ArgumentTypeError for others."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"it must be a positive integer, got {text!r}")
    return number
