"""ByteStore over a tier in memory, and pages of tensors: keys, buffers, ids and deadlines of every kind."""

import random
from concurrent.futures import Future
from typing import Any

import torch
from fuzz_case import Case, World

from kvpage.store import ByteStore, ByteStoreConfig, PageView

KEYS = [b"a", b"bc", b"d" * 40]
CALLS = ("contains", "put", "get_into", "remove", "later", "flush", "follow", "view", "pieces", "config", "store")


def content(key: bytes) -> bytes:
    """Return the bytes that are put under a key, always the same."""
    return key * 7


class ByteWorld(World):
    covers = ("kvpage.store.ByteStore", "kvpage.store.ByteStoreConfig", "kvpage.store.ByteStoreStats")
    covers += ("kvpage.store.ByteTierStats", "kvpage.store.PageView", "kvpage.store.Pieces", "kvpage.store.Later")
    covers += ("kvpage.store.Follow", "kvpage.store.ByteEvent")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.store = ByteStore(ByteStoreConfig(("memory://?size=1MiB",), num_threads=1), {"model": "m"})
        self.pages = torch.arange(2.0 * 6 * 4 * 3).view(2, 6, 4, 3)
        self.view = PageView(self.pages, 1, 2)

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def snapshot(self) -> object:
        self.store.flush()
        (tier,) = self.store.stats().tiers
        return tier.num_records, tier.num_bytes, self.store.contains(KEYS)

    def check(self) -> None:
        assert self.store.stats().corrupt_records == 0

    def case(self, rng: random.Random) -> Case:
        keys = rng.sample(KEYS, rng.randrange(len(KEYS) + 1))
        made: Case = getattr(self, f"_{rng.choice(CALLS)}")(keys)
        return made

    def _contains(self, keys: list[bytes]) -> Case:
        def judge(found: list[bool]) -> None:
            assert len(found) == len(keys)

        return Case("bytes.contains", self.store.contains, {"keys": keys, "deadline": None}, judge=judge)

    def _put(self, keys: list[bytes]) -> Case:
        args = {"keys": keys, "buffers": [content(key) for key in keys], "skip_existing": True, "deadline": None}
        case = Case("bytes.put", self.store.put, args, judge=lambda flags: _all(flags))
        case.fixed = ("buffers",)  # other bytes under the same key would be right ones
        return case

    def _get_into(self, keys: list[bytes]) -> Case:
        buffers = [bytearray(len(content(key))) for key in keys]

        def judge(flags: list[bool]) -> None:
            for key, buffer, is_found in zip(keys, buffers, flags, strict=True):
                assert not is_found or bytes(buffer) == content(key)

        args = {"keys": keys, "buffers": buffers, "deadline": None}
        return Case("bytes.get_into", self.store.get_into, args, judge=judge)

    def _remove(self, keys: list[bytes]) -> Case:
        return Case("bytes.remove", self.store.remove, {"keys": keys, "deadline": None})

    def _later(self, keys: list[bytes]) -> Case:
        name = self.rng.choice(("contains", "remove"))

        def done(future: "Future[list[bool]]") -> None:
            future.result(60.0)

        return Case(f"bytes.later.{name}", getattr(self.store.later, name), {"keys": keys, "deadline": None}, done=done)

    def _flush(self, keys: list[bytes]) -> Case:
        return Case("bytes.flush", self.store.flush, {"sync": False})

    def _follow(self, keys: list[bytes]) -> Case:
        return Case("bytes.follow", self.store.follow, {"listener": list}, done=lambda listening: listening.close())

    def _view(self, keys: list[bytes]) -> Case:
        args = {"tensors": self.pages, "page_dim": 1, "token_dim": 2, "version": "1"}
        return Case("PageView", PageView, args, judge=lambda view: _all([view.page_bytes == 2 * 4 * 3 * 4]))

    def _pieces(self, keys: list[bytes]) -> Case:
        ids = [self.rng.randrange(-1, 6) for _ in keys]

        def judge(pieces: list[Any]) -> None:
            assert [each is None for each in pieces] == [one < 0 for one in ids]

        return Case("view.pieces", self.view.pieces, {"page_ids": ids, "start": 0}, judge=judge)

    def _config(self, keys: list[bytes]) -> Case:
        args = {"tiers": ("memory://?size=1MiB",), "num_threads": 1, "deadline": 0.5}
        return Case("ByteStoreConfig", ByteStoreConfig, args)

    def _store(self, keys: list[bytes]) -> Case:
        args = {"config": ByteStoreConfig(("memory://?size=64KiB",), num_threads=1), "header": {"a": [1, b"b", None]}}
        return Case("ByteStore", ByteStore, args, errors=(OSError, ImportError), done=lambda store: store.close())


def _all(flags: list[bool]) -> None:
    assert all(flags)
