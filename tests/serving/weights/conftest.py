"""Tiny models: what is shared by the tests of weights."""

from support.threads import one_thread

__all__ = ["one_thread"]
