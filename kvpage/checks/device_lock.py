"""The lock of captures: while a stream of a device is captured, CUDA lets no thread wait for the whole device."""

import threading

import torch

CAPTURING = threading.RLock()
"""Held for all of a capture, and by whoever waits for a device."""


def synchronize(device: torch.device | int) -> None:
    """Wait for all work of a device; first for the end of a capture in another thread.

    Args:
        device: A CUDA device, or its index.
    """
    with CAPTURING:
        torch.cuda.synchronize(device)
