"""K and V of tokens, stores of them, and tiers in trouble, for tests of a KVStore."""

import threading

import torch
from support.insides import entries_of, slab_of, stack_of

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, Placed, TierError
from kvpage.store.tiers.memory_tier import MemoryTier

L, H, D, C = 3, 2, 4, 4
FMTS = ["vllm", "huggingface"]


def kv_of(
    tokens: list[int], fmt: str = "vllm", dtype: torch.dtype = torch.float32, namespace: bytes = b""
) -> torch.Tensor:
    """K and V that are a function of all tokens up to each: [L, 2, T, H, D] or [L, 2, H, T, D]."""
    rows = []
    for end in range(1, len(tokens) + 1):
        seed = hash((tuple(tokens[:end]), namespace)) % (1 << 31)
        rows.append(torch.randn(L, 2, H, D, generator=torch.Generator().manual_seed(seed)))
    whole = torch.stack(rows, dim=2) if rows else torch.empty(L, 2, 0, H, D)
    return (whole if fmt == "vllm" else whole.transpose(2, 3).contiguous()).to(dtype)


TOKENS = list(range(2 * C + 1))
KV = kv_of(TOKENS)


def make(fmt: str = "vllm", tiers=None, dtype: torch.dtype = torch.float32, chunk_size: int = C, **config) -> KVStore:
    config = KVStoreConfig(chunk_size=chunk_size, tiers=("memory://?size=4MiB",), num_threads=2, **config)
    return KVStore(config, KVStoreMetadata("m", fmt=fmt, kv_dtype=dtype), tiers)


def narrow(kv: torch.Tensor, fmt: str, begin: int, end: int) -> torch.Tensor:
    return kv.narrow(2 if fmt == "vllm" else 3, begin, end - begin)


def same(found, expected: torch.Tensor) -> bool:
    if expected.numel() == 0:
        return found == ()
    tensor = torch.stack([torch.stack(list(layer)) for layer in found]) if isinstance(found, tuple) else found
    return torch.equal(tensor.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def two_tiers(**second) -> tuple[KVStore, MemoryTier, MemoryTier]:
    tiers = [MemoryTier(3 * 4096, pin_memory=False, name="small"), MemoryTier(1 << 20, pin_memory=False, name="large")]
    return make(tiers=[Placed(tiers[0]), Placed(tiers[1], **second)]), *tiers


class Troubled(MemoryTier):
    """Fails whenever `fails(method)` says so."""

    def __init__(self, fails) -> None:
        super().__init__(1 << 20, pin_memory=False, name="troubled")
        self.fails = fails

    def _check_open(self) -> None:
        super()._check_open()
        if self.fails():
            raise TierError("gone")


class Between(MemoryTier):
    """Calls `then` once, within the `number`th call of the method, after its work or before it."""

    def __init__(self, method: str, number: int = 1, after: bool = True) -> None:
        super().__init__(1 << 20, pin_memory=False, name="between")
        self.then = lambda: None
        works, calls = getattr(self, method), []

        def called(*args):
            calls.append(method)
            if len(calls) == number and not after:
                self.then()
            result = works(*args)
            if len(calls) == number and after:
                self.then()
            return result

        self.begin = lambda: setattr(self, method, called)


def corrupt(tier: MemoryTier, key: bytes, at: int) -> None:
    entry = entries_of(tier)[key]
    slab_of(tier)[entry.begin * 4096 + at] ^= 1 << (at % 8)


def written_back(small_records: int):
    """Two tiers, the second written back by a thread that waits until it is told to go on; the first is small."""
    kv = kv_of(list(range(C)))
    probe = MemoryTier(1 << 20, pin_memory=False)
    make(tiers=[probe]).store(list(range(C)), kv)
    units = -(-probe.stats().num_bytes // 4096)
    small = MemoryTier(small_records * units * 4096, pin_memory=False)
    large = MemoryTier(1 << 20, pin_memory=False, name="large")
    store = make(tiers=[Placed(small), Placed(large, is_written_back=True)])
    go = threading.Event()
    stack_of(store).threads.later(lambda: int(go.wait(120)))
    return store, small, large, go
