"""Calls on a store pass few functions in the caller's thread, so that small chunks cost little."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from support.store_engines import TOKENS, C, L, make_engine

from kvpage.store import KVStore, KVStoreConfig, metadata_of

TABLE = list(range(8))


def num_calls(call: Callable[[], object]) -> int:
    """Return how many functions of kvpage a call passes in this thread, comprehensions left out."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("kvpage.") and not frame.f_code.co_name.endswith("comp>"):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(names)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_call_of_two_chunks_passes_few_functions(kind: str, tmp_path) -> None:
    tier = "memory://?size=4MiB" if kind == "memory" else f"disk://{tmp_path}?size=4MiB&segment=1MiB"
    engine, tokens = make_engine(), TOKENS[: 2 * C]
    kv = torch.zeros(L, 2, 2 * C, 2, 10, dtype=torch.bfloat16)
    with KVStore(KVStoreConfig(C, (tier,), num_threads=2), metadata_of(engine, "m")) as store:
        assert num_calls(lambda: store.store(tokens, kv)) <= 100
        assert num_calls(lambda: store.store_blocks(tokens, engine, TABLE)) <= 160  # the first: the layout is derived
        assert num_calls(lambda: store.store_blocks(tokens, engine, TABLE)) <= 70
        assert num_calls(lambda: store.load_blocks(tokens, engine, TABLE)) <= 110
