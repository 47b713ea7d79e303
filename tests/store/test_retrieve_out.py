"""KVStore.retrieve into the caller's tensors: exactly what was found, and nothing beside it."""

import pytest
import torch
from support.store_kv import FMTS, KV, TOKENS, C, D, H, L, corrupt, kv_of, make, narrow, same

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.tiers.memory_tier import MemoryTier

NAN = float("nan")


def out_of(kind: str, fmt: str, num_tokens: int, dtype: torch.dtype = torch.float32, d: int = D):
    """Return what to write to, and that as one tensor [L, 2, ...]; filled with NaN."""
    shape = (L, 2, num_tokens, H, d) if fmt == "vllm" else (L, 2, H, num_tokens, d)
    if kind == "one":
        whole = torch.full(shape, NAN, dtype=dtype)
    elif kind == "turned":
        whole = torch.full((*shape[:2], shape[3], shape[2], d), NAN, dtype=dtype).transpose(2, 3)
    elif kind == "gaps":
        whole = torch.full((*shape[:4], 2 * d), NAN, dtype=dtype)[..., ::2]
    elif kind == "longer":
        whole = narrow(torch.full((L, 2, 50, H, d) if fmt == "vllm" else (L, 2, H, 50, d), NAN, dtype=dtype), fmt, 9,
                       9 + num_tokens)  # fmt: skip
    else:
        parts = [tuple(torch.full(shape[2:], NAN, dtype=dtype) for _ in range(2)) for _ in range(L)]
        return parts, lambda: torch.stack([torch.stack(layer) for layer in parts])
    return whole, lambda: whole


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("kind", ["one", "turned", "gaps", "longer", "parts"])
@pytest.mark.parametrize("codec, d", [("raw", D), ("raw", 16), ("zstd", D)])
def test_the_found_prefix_is_written_and_the_rest_is_left_alone(fmt: str, kind: str, codec: str, d: int) -> None:
    tokens = list(range(3 * C + 2))
    kv = torch.randn(L, 2, len(tokens), H, d) if fmt == "vllm" else torch.randn(L, 2, H, len(tokens), d)
    for num_stored in (0, C, 2 * C, 3 * C + 2):
        with make(fmt, codec=codec) as store:
            store.store(tokens[:num_stored], narrow(kv, fmt, 0, num_stored))
            for num_skipped in (0, 1, C, 2 * C + 1, len(tokens)):
                out, whole = out_of(kind, fmt, len(tokens) - num_skipped, d=d)
                as_tuple = kind == "parts" or num_skipped % 2 == 0
                mask = torch.arange(len(tokens)) >= num_skipped
                found, ret_mask = store.retrieve(tokens, mask, as_tuple, out=out)
                num_found = max(num_stored - num_skipped, 0)
                assert ret_mask.tolist() == [num_skipped <= at < num_stored for at in range(len(tokens))]
                wanted = narrow(kv, fmt, num_skipped, num_skipped + num_found)
                assert same(found, wanted) and isinstance(found, tuple) == (as_tuple or not num_found)
                assert same(narrow(whole(), fmt, 0, num_found), wanted) or not num_found
                assert narrow(whole(), fmt, num_found, len(tokens) - num_skipped).isnan().all()
                if num_found:
                    first = found[0][0] if as_tuple else found[0, 0]
                    assert first.data_ptr() == (out[0][0] if kind == "parts" else out[0, 0]).data_ptr()


def test_memory_around_a_view_is_left_alone() -> None:
    room = torch.full((L, 2, 50, H, 16), NAN)
    kv = torch.randn(L, 2, len(TOKENS), H, 16)
    with make() as store:
        store.store(TOKENS, kv)
        store.retrieve(TOKENS, out=room[:, :, 20 : 20 + len(TOKENS)])
    assert torch.equal(room[:, :, 20 : 20 + len(TOKENS)], kv)
    assert room[:, :, :20].isnan().all() and room[:, :, 20 + len(TOKENS) :].isnan().all()


def part_at(memory: torch.Tensor, begin: int) -> torch.Tensor:
    """Return a part that begins so many numbers into the memory; of the same strides if that is [n, H, D]."""
    stride = memory.stride(0) if memory.dim() == 3 else H * D
    return memory.as_strided((len(TOKENS), H, D), (stride, D, 1), memory.storage_offset() + begin)


def parts_in(memory: torch.Tensor, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return parts that begin `step` numbers after one another."""
    begins = torch.arange(2 * L) * step
    return [(part_at(memory, int(k)), part_at(memory, int(v))) for k, v in begins.view(L, 2)]


@pytest.mark.parametrize("kind", ["neighbours", "by token", "by head", "two strides"])
def test_parts_between_one_another_are_written(kind: str) -> None:
    """Their memory interleaves, and no element is of two."""
    num_tokens = len(TOKENS)
    if kind == "neighbours":
        parts = list(torch.full((L, 2, num_tokens, H, D), NAN))
    elif kind == "by token":
        parts = list(torch.full((num_tokens, L, 2, H, D), NAN).permute(1, 2, 0, 3, 4))
    elif kind == "by head":
        parts = list(torch.full((num_tokens, H, L, 2, D), NAN).permute(2, 3, 0, 1, 4))
    else:
        room = torch.full((2 * L, num_tokens, 2, H, D), NAN)
        wide = [(room[2 * at, :, 0], room[2 * at, :, 1]) for at in range(L)]
        parts = [(k, room[2 * at + 1].flatten(0, 1)[:num_tokens]) for at, (k, _) in enumerate(wide)]
    with make() as store:
        store.store(TOKENS, KV)
        store.retrieve(TOKENS, out=[tuple(layer) for layer in parts])
    assert torch.equal(torch.stack([torch.stack(list(layer)) for layer in parts]), KV)


def bad_outs() -> dict:
    num_tokens = len(TOKENS)
    good = torch.full_like(KV, NAN)
    part = torch.full((num_tokens, H, D), NAN)
    leaf = torch.full_like(KV, NAN).requires_grad_()
    flat = torch.full((6 * L * KV.numel(),), NAN)
    shifted = [(part.clone(), part.clone()) for _ in range(L - 1)]
    room, count = bytearray(8 * part.numel()), part.numel()
    halves = (torch.frombuffer(room, dtype=torch.float32, count=count, offset=at) for at in (2, 4 * count))
    shifted.append(tuple(half.view(part.shape) for half in halves))
    return {
        "no tensor": (3, TypeError, "not iterable"),
        "four dimensions": (good[0], ValueError, "out must have 5 dimensions"),
        "too few tokens": (good[:, :, 1:], ValueError, "out must be of 9 tokens, got 8"),
        "too many tokens": (torch.cat([good, good], 2), ValueError, "out must be of 9 tokens, got 18"),
        "another dtype": (good.half(), ValueError, "out must be of torch.float32, got torch.float16"),
        "fewer layers": (good[1:], ValueError, r"out must be of torch.float32, for K and V of \[3, 2, 9, 2, 4\], got"),
        "another head size": (good[..., :2], ValueError, "out must be of torch.float32, for K and V of"),
        "one row for all": (part[:1].expand(L, 2, num_tokens, H, D), ValueError, "out must have memory for each of"),
        "one part twice": ([(part, part)] * L, ValueError, "out must name each tensor once"),
        "parts that overlap": (
            parts_in(flat, (num_tokens - 1) * H * D),
            ValueError,
            "out must not share memory between",
        ),
        "rows that overlap": (parts_in(flat.view(-1, 2, H, D)[:, 0], H * D), ValueError, "out must not share memory"),
        "bytes that overlap": (shifted, ValueError, "out must not share memory"),
        "a gradient": (leaf, ValueError, "out must not require a gradient"),
        "no memory": ([(part.to("meta"), part.to("meta"))] * L, ValueError, "out must have memory"),
        "two shapes": ([(part, part[1:])] * L, ValueError, "all parts of out must be of one shape"),
    }


@pytest.mark.parametrize("case", bad_outs())
def test_wrong_tensors_are_refused_and_stay(case: str) -> None:
    out, error, message = bad_outs()[case]
    with make() as store:
        store.store(TOKENS, KV)
        with pytest.raises(error, match=message):
            store.retrieve(TOKENS, out=out)
        if isinstance(out, torch.Tensor):
            assert out.isnan().all()


def test_wrong_arguments_beside_it() -> None:
    parts, whole = out_of("parts", "vllm", len(TOKENS))
    with make() as store:
        store.store(TOKENS, KV)
        with pytest.raises(ValueError, match="out must be one tensor where return_tuple is False"):
            store.retrieve(TOKENS, return_tuple=False, out=parts)
        with pytest.raises(ValueError, match="device must be a CPU or a CUDA device, got 'cpux'"):
            store.retrieve(TOKENS, device="cpux", out=parts)
        with pytest.raises(ValueError, match="device must be that of out, cpu, or None, got cuda"):
            store.retrieve(TOKENS, device="cuda", out=parts)
        assert whole().isnan().all()
        assert same(store.retrieve(TOKENS, device="cpu", out=parts)[0], KV)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_damaged_record_ends_the_prefix(chunk: int) -> None:
    """Tokens after it mean nothing; those before it are right."""
    tier = MemoryTier(1 << 20, pin_memory=False)
    store = make(tiers=[tier])
    store.store(TOKENS, KV)
    corrupt(tier, store.keys_of(TOKENS)[chunk], 200)
    out = torch.full_like(KV, NAN)
    found, mask = store.retrieve(TOKENS, out=out)
    assert int(mask.sum()) == chunk * C and same(found, KV[:, :, : chunk * C])
    assert torch.equal(out[:, :, : chunk * C], KV[:, :, : chunk * C])


def test_memory_of_results_is_used_again_and_let_go_of() -> None:
    tokens, kv = list(range(2 * C)), torch.randn(2, 2, 2 * C, 64, 2048)  # 8 MiB
    config = KVStoreConfig(C, ("memory://?size=32MiB",), kept_result_bytes="16MiB")
    with KVStore(config, KVStoreMetadata("m", kv_dtype=torch.float32)) as store:
        store.store(tokens, kv)
        first, _ = store.retrieve(tokens, return_tuple=False)
        second, _ = store.retrieve(tokens, return_tuple=False)
        first.zero_()
        assert torch.equal(second, kv)
        address = first.data_ptr()
        del first
        third, _ = store.retrieve(tokens)
        assert third[0][0].data_ptr() == address and same(third, kv)
        del second
        pool = store._tensors.pool
        assert pool.num_bytes == kv.nbytes
    assert pool.num_bytes == 0 and same(third, kv)


def test_a_long_prompt_of_which_little_is_there_takes_little_memory() -> None:
    with make(fmt="huggingface") as store:
        tokens = list(range(200 * C))
        store.store(tokens[:C], kv_of(tokens[:C], "huggingface"))
        found, _ = store.retrieve(tokens, return_tuple=False)
        assert found.untyped_storage().nbytes() == found.nbytes
