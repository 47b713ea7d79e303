"""Random lives of a KVStore beside the set of chunks that it was given. The long form is a battery."""

from support.life import lived, total
from support.store_life import WORLDS, StoreLife


def test_random_lives() -> None:
    figures = total(lived(WORLDS, 120))
    assert min(figures[name] for name in ("stored", "read", "pinned")) > 0, figures


def test_a_pin_promises_nothing_of_what_was_removed() -> None:
    """What is put anew need not fit beside what the pin keeps."""
    life = StoreLife(1, "vllm", has_room=False)
    life.some = lambda: ([0] * 4, b"")
    for operation in (life.put, life.pin, life.clear):
        operation()
    life.some = lambda: ([0] * 17, b"")
    life.put()
    life.unpin()
    life.end()
