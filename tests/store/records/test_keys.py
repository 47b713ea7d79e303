"""Keys: deterministic, of all that K and V depend on, and the same for the same tokens in whatever type they come."""

import array
import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvpage import KVScales
from kvpage.store.records.keys import ChunkKeys, KVStoreMetadata, decode_meta, scales_digest

TOKENS = [5, 0, 2**31 - 1, -1, 7, 8, 9, 10, 11, 12]


def naive_keys(metadata: KVStoreMetadata, chunk_size: int, tokens: list[int], namespace: bytes) -> list[bytes]:
    key, keys = hashlib.sha256(metadata.encode(chunk_size, namespace)).digest(), []
    for begin in range(0, len(tokens), chunk_size):
        chunk = tokens[begin : begin + chunk_size]
        data = b"".join(struct.pack("<q", token) for token in chunk)
        key = hashlib.sha256(key + struct.pack("<Q", len(chunk)) + data).digest()
        keys.append(key)
    return keys


@pytest.mark.parametrize("num_tokens", range(len(TOKENS) + 1))
def test_keys_are_a_chain_of_hashes(num_tokens: int) -> None:
    metadata = KVStoreMetadata("model")
    found = ChunkKeys(metadata, 4).of(TOKENS[:num_tokens], b"tenant")
    assert found == naive_keys(metadata, 4, TOKENS[:num_tokens], b"tenant")
    assert len(found) == -(-num_tokens // 4)


def test_types_of_tokens_make_no_difference() -> None:
    keys = ChunkKeys(KVStoreMetadata("model"), 4)
    same = [
        TOKENS, tuple(TOKENS), np.array(TOKENS, np.int32), np.array(TOKENS, np.int64), np.array(TOKENS, ">i8"),
        torch.tensor(TOKENS), torch.tensor(TOKENS, dtype=torch.int32), array.array("q", TOKENS),
        np.array(TOKENS * 2)[: len(TOKENS)], np.array([TOKENS, TOKENS]).T[:, 0],
    ]  # fmt: skip
    assert len({tuple(keys.of(tokens)) for tokens in same}) == 1


def test_keys_are_the_same_in_another_process_and_stay_as_they_are() -> None:
    code = (
        "from kvpage.store.records.keys import ChunkKeys, KVStoreMetadata\n"
        "print(ChunkKeys(KVStoreMetadata('a/b@c d', 2, 1), 4).of([1, 2, 3, 4, 5], b'x')[-1].hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    here = ChunkKeys(KVStoreMetadata("a/b@c d", 2, 1), 4).of([1, 2, 3, 4, 5], b"x")[-1].hex()
    assert run.stdout.strip() == here
    assert here == "0fd419526df7a4a73de2c07a845dcfc1b077c6bcb558ecf45e8dfe092649f643"


def test_every_field_and_token_changes_the_keys() -> None:
    base = {"model_name": "m"}
    others = [
        {"model_name": "n"}, {"model_name": "m" * 1000}, {"model_name": ""}, {"model_name": "m@2@1"}, {"world_size": 2},
        {"world_size": 2, "worker_id": 1}, {"world_size": 3, "worker_id": 123}, {"worker_id": 123},
        {"fmt": "huggingface"}, {"kv_dtype": torch.float16}, {"row_layout": "int8"},
        {"scales_digest": b"x"}, {"extra": (("lora", "a"),)}, {"extra": (("lor", "aa"),)},
        {"extra": (("lora", "a"), ("x", ""))},
    ]  # fmt: skip
    first = [ChunkKeys(KVStoreMetadata(**{**base, **other}), 4).of(TOKENS)[0] for other in [{}, *others]]
    first += [ChunkKeys(KVStoreMetadata("m"), 5).of(TOKENS)[0], ChunkKeys(KVStoreMetadata("m"), 4).of(TOKENS, b"n")[0]]
    assert len(set(first)) == len(first)
    for index in range(len(TOKENS)):
        changed = list(TOKENS)
        changed[index] ^= 1
        pairs = zip(
            ChunkKeys(KVStoreMetadata("m"), 4).of(changed), ChunkKeys(KVStoreMetadata("m"), 4).of(TOKENS), strict=True
        )
        assert [a == b for a, b in pairs] == [chunk < index // 4 for chunk in range(3)]


def test_meta_can_be_read_back_and_nothing_else_can() -> None:
    metadata = KVStoreMetadata("модель @ \udcff", 4, 3, "huggingface", torch.float8_e4m3fn, "r", b"\0\1", (("a", "b"),))
    meta = metadata.encode(256, b"\xff tenant")
    fields = decode_meta(meta)
    assert (fields["model_name"], fields["namespace"], fields["worker_id"]) == (
        metadata.model_name,
        b"\xff tenant",
        "3",
    )
    assert (fields["kv_dtype"], fields["chunk_size"], fields["scales_digest"]) == ("float8_e4m3fn", "256", b"\0\1")
    for wrong in (b"", b"something", meta[:-1], meta + b"1234567", meta + b"\xff" * 8):
        with pytest.raises(ValueError):
            decode_meta(wrong)


def test_without_a_dtype_there_are_no_keys() -> None:
    metadata = KVStoreMetadata("m", kv_dtype=None)
    with pytest.raises(ValueError, match="kv_dtype must be known before there are keys"):
        ChunkKeys(metadata, 4)


def test_scales_have_a_digest() -> None:
    one, other = KVScales.of(1.0, 2.0), KVScales.of(2.0, 1.0)
    digests = [scales_digest(scales) for scales in (None, [one], [other], [one, other], [KVScales.of([1.0, 1.0], 2.0)])]
    assert digests[0] == b"" and len(set(digests)) == len(digests)
    assert scales_digest([KVScales.of(1.0, 2.0)]) == digests[1]


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"model_name": None}, TypeError, "model_name must be a str"),
        ({"world_size": 0}, ValueError, "world_size must be an integer of at least 1"),
        ({"worker_id": -1}, ValueError, "worker_id must be an integer of at least 0"),
        ({"worker_id": True}, ValueError, "worker_id must be an integer"),
        ({"fmt": "other"}, ValueError, "fmt must be one of vllm, huggingface"),
        ({"kv_dtype": "bf16"}, TypeError, "kv_dtype must be a torch.dtype"),
    ],
)
def test_bad_metadata(fields: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        KVStoreMetadata(**{"model_name": "m", **fields})
