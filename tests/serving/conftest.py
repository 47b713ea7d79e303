"""Tiny models: what is shared by the tests of the serving loop."""

from support.threads import one_thread

__all__ = ["one_thread"]
