"""`model.generate` over a KVPageCache gives the tokens that it gives without, and computes only what was not found."""

import copy
import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as tf
from support.models import COMMON, CONFIGS, VOCAB, make_model, make_prompts

from kvpage import CacheConfig, KVScales, OutOfBlocks
from kvpage.serving import KVPageCache, KVPageCachePool
from kvpage.serving.model.limits import vocab_size

B = 4
NEW = 10
KINDS = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "deepseek_v2", "deepseek_v3"]
LAYOUTS = [
    {"backend": backend, "kv_layout": kv_layout, "layer_layout": layer_layout}
    for backend, kv_layout in (
        ("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD"),
    )
    for layer_layout in ("separate", "packed")
]  # fmt: skip


@functools.cache
def model_of(kind: str) -> tf.PreTrainedModel:
    if kind in CONFIGS:
        return make_model(kind)
    torch.manual_seed(0)
    config = tf.DeepseekV2Config(
        **{**COMMON, "num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy",
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@functools.cache
def hands_latents(kind: str) -> bool:
    """Whether this version's model gives its cache latents: one head, of other sizes than the attention's."""
    model = model_of(kind)
    if not hasattr(model.config, "kv_lora_rank"):
        return False
    shapes = []

    class Seen(tf.DynamicCache):
        def update(self, key_states: torch.Tensor, *args: object, **kwargs: object) -> object:
            shapes.append(tuple(key_states.shape))
            return super().update(key_states, *args, **kwargs)

    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=Seen(), use_cache=True)
    return shapes[0] == (1, 1, 3, model.config.kv_lora_rank)


def make_pool(kind: str, num_blocks: int = 64, num_host_blocks: int = 0, **fields: object) -> KVPageCachePool:
    """A pool whose blocks hold NaN where nothing has been written."""
    if hands_latents(kind):
        fields["backend"] = "mla"
    config = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks, **fields)
    pool = KVPageCachePool.from_model(model_of(kind), config)
    if not pool.engine.layout.has_token_scales:
        for cache in (*pool.engine.gpu_cache, *pool.engine.cpu_cache):
            cache.fill_(float("nan"))
    return pool


def rows_of(*prompts: list[int]) -> torch.Tensor:
    return torch.tensor(prompts)


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def generate(kind: str, ids: torch.Tensor, cache: KVPageCache | None = None, **options: object) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
    torch.manual_seed(1)
    return model_of(kind).generate(ids, past_key_values=cache, pad_token_id=0, **options)


@contextmanager
def counted(kind: str) -> Iterator[list[int]]:
    """The tokens of each forward: rows times columns of what the embedding is asked for."""
    counts: list[int] = []
    embedding = model_of(kind).get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    yield counts
    hook.remove()


def check_drained(pool: KVPageCachePool) -> None:
    pool.manager.check()
    assert pool.manager.stats().num_used_blocks == 0
    assert not has_hooks(pool.model)


def has_hooks(model: tf.PreTrainedModel) -> bool:
    return any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_first_call_then_shared_beginnings_then_the_whole_prompt(kind: str) -> None:
    pool = make_pool(kind)
    shared, tail = make_prompts([3 * B + 1, B + 2], seed=1)
    different = set()
    for prompt, found in ((shared, 0), (shared + tail, 3 * B + 1), (shared[: B + 1], B), (shared + tail, 4 * B + 2)):
        ids = rows_of(prompt)
        expected = generate(kind, ids)
        with KVPageCache(pool, ids) as cache, counted(kind) as counts:
            assert cache.get_seq_length() == found
            assert torch.equal(generate(kind, ids, cache), expected)
            assert cache.get_seq_length() == len(prompt) + NEW - 1
        assert counts == [len(prompt) - found] + [1] * (NEW - 1)
        different.update(expected[0, len(prompt) :].tolist())
    assert len(different) > 10, "too few different tokens to tell right from wrong"
    check_drained(pool)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 5 * B])
def test_edges_of_a_block(length: int) -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([length]))
    expected = generate("llama", ids)
    for found in (0, length - 1):  # generated tokens have filled the last block
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(generate("llama", ids, cache), expected)
    check_drained(pool)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
def test_layouts(layout: dict[str, str]) -> None:
    pool, ids = make_pool("llama", **layout), rows_of(*make_prompts([3 * B + 2] * 2))
    expected = generate("llama", ids)
    for found in (0, 3 * B + 1):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(generate("llama", ids, cache), expected)
    check_drained(pool)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latents_lie_in_blocks_as_they_are(kind: str) -> None:
    pool, text = make_pool(kind), model_of(kind).config
    if hands_latents(kind):
        assert pool.engine.layout.backend == "mla"
        assert pool.engine.layout.head_size == text.kv_lora_rank + text.qk_rope_head_dim
    else:
        assert pool.engine.layout.num_kv_heads == text.num_attention_heads
    ids = rows_of(*make_prompts([B, B, B]))
    expected = generate(kind, ids, num_beams=2)
    with KVPageCache(pool, ids) as cache:
        assert torch.equal(generate(kind, ids, cache, num_beams=2), expected)
    check_drained(pool)


def test_what_forward_returns_and_what_blocks_hold_are_transformers_own() -> None:
    """Logits, and K and V of every layer bit by bit, against a DynamicCache."""
    model, ids = model_of("llama"), rows_of(*make_prompts([3 * B + 1]))
    pool, own = make_pool("llama"), tf.DynamicCache()
    with torch.no_grad(), KVPageCache(pool, ids) as cache:
        for piece in ids.split([B + 1, 1, 2 * B - 1], dim=1):
            expected = model(piece, past_key_values=own).logits
            assert torch.equal(model(piece, past_key_values=cache).logits, expected)
        length = cache.get_seq_length()
        cache._rows.commit()  # the last block is not full: it would be written at the release
        table = pool.manager.block_tables([row.seq_id for row in cache._rows._rows])
        for layer, blocks in zip(own.layers, pool.engine.gpu_cache, strict=True):
            for part, rows in ((0, layer.keys), (1, layer.values)):
                held = blocks[part, table[0]].flatten(0, 1)[:length]
                assert torch.equal(held, rows[0].transpose(0, 1))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_a_batch_begins_where_the_shortest_found_beginning_ends(kind: str) -> None:
    pool = make_pool(kind)
    long, short, fresh = make_prompts([5 * B + 1] * 3, seed=3)
    for ids in (rows_of(long), rows_of(short[: 2 * B])):
        with KVPageCache(pool, ids) as cache:
            generate(kind, ids, cache, max_new_tokens=2)
    ids = rows_of(long, short, long)
    expected = generate(kind, ids)
    with KVPageCache(pool, ids) as cache, counted(kind) as counts:
        assert cache.get_seq_length() == 2 * B
        assert torch.equal(generate(kind, ids, cache), expected)
    assert counts[0] == 3 * (3 * B + 1)
    ids = rows_of(long, fresh)
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(kind, ids, cache), generate(kind, ids))
    check_drained(pool)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("is_told", [True, False], ids=["mask", "no-mask"])
def test_padded_rows_neither_find_nor_are_found(kind: str, is_told: bool) -> None:
    pool = make_pool(kind)
    prompts = make_prompts([2 * B, 4 * B], seed=4)
    ids, mask = padded(prompts)
    expected = generate(kind, ids, attention_mask=mask)
    with KVPageCache(pool, ids, mask if is_told else None) as cache:
        assert torch.equal(generate(kind, ids, cache, attention_mask=mask), expected)
    # The padded row's ids as a prompt of its own, where 0 is a token like others.
    with KVPageCache(pool, ids[:1]) as cache:
        assert cache.get_seq_length() == 0
    with KVPageCache(pool, ids[1:]) as cache:  # the unpadded row is found
        assert cache.get_seq_length() == 4 * B - 1
    with KVPageCache(pool, ids, mask) as cache:
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(kind, ids, cache, attention_mask=mask), expected)
    check_drained(pool)


def test_padding_leaves_nothing_behind() -> None:
    pool = make_pool("llama")
    ids, mask = padded([[5, 6, 7] * B, [9]])
    for beams in (1, 3):
        with KVPageCache(pool, ids[1:], mask[1:]) as cache:
            generate("llama", ids[1:], cache, attention_mask=mask[1:], num_beams=beams)
    assert pool.manager.tree.num_cached == 0
    check_drained(pool)


def test_namespaces() -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([3 * B]))
    with KVPageCache(pool, ids, namespace=b"one") as cache:
        generate("llama", ids, cache)
    for namespace, found in ((b"", 0), (b"two", 0), (b"one", 3 * B - 1)):
        with KVPageCache(pool, ids, namespace=namespace) as cache:
            assert cache.get_seq_length() == found


# --- what generate can do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_beams(kind: str) -> None:
    pool, ids = make_pool(kind, 96), rows_of(*make_prompts([2 * B + 1] * 2, seed=5))
    expected = generate(kind, ids, num_beams=3, num_return_sequences=2)
    for found in (0, 2 * B):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(generate(kind, ids, cache, num_beams=3, num_return_sequences=2), expected)
    check_drained(pool)


def test_beams_with_padding() -> None:
    pool = make_pool("llama", 96)
    ids, mask = padded(make_prompts([B + 1, 3 * B], seed=6))
    expected = generate("llama", ids, attention_mask=mask, num_beams=3)
    with KVPageCache(pool, ids, mask) as cache:
        assert torch.equal(generate("llama", ids, cache, attention_mask=mask, num_beams=3), expected)
    check_drained(pool)


def test_beams_share_blocks() -> None:
    """Four beams of a long prompt fit into blocks that two copies of it would not."""
    ids = rows_of(*make_prompts([10 * B], seed=7))
    pool = make_pool("llama", 26)
    with KVPageCache(pool, ids) as cache:
        generate("llama", ids, cache, max_new_tokens=2)
    expected = generate("llama", ids, num_beams=4)
    with KVPageCache(pool, ids) as cache:
        assert torch.equal(generate("llama", ids, cache, num_beams=4), expected)
    check_drained(pool)


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 3}, {"num_beams": 2}], ids=str)
def test_sampling_with_a_seed(options: dict[str, int]) -> None:
    pool, ids = make_pool("qwen3"), rows_of(*make_prompts([2 * B + 1]))
    expected = generate("qwen3", ids, do_sample=True, **options)
    for _ in range(2):
        with KVPageCache(pool, ids) as cache:
            assert torch.equal(generate("qwen3", ids, cache, do_sample=True, **options), expected)
    check_drained(pool)


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_prefill_in_chunks(kind: str) -> None:
    pool, ids = make_pool(kind), rows_of(*make_prompts([5 * B + 2]))
    expected, is_right = generate(kind, ids), counts_places_right(kind, ids)
    with KVPageCache(pool, ids) as cache, counted(kind) as counts:
        if is_right:
            assert torch.equal(generate(kind, ids, cache, prefill_chunk_size=7), expected)
        else:
            with pytest.raises(ValueError, match="cache_position must show every token of a row in its place"):
                generate(kind, ids, cache, prefill_chunk_size=7)
    assert counts[:2] == [7, 7]
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() >= 5 * B
        assert torch.equal(generate(kind, ids, cache), expected)
    check_drained(pool)


def counts_places_right(kind: str, ids: torch.Tensor) -> bool:
    """Whether this transformers puts tokens after a prefill in chunks where they belong; 5.0 leaves one place out."""
    places, own = [], tf.DynamicCache()

    def note(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        given = kwargs.get("cache_position")
        places.append(given is None or int(given[0]) == own.get_seq_length())

    hook = model_of(kind).base_model.register_forward_pre_hook(note, with_kwargs=True)
    generate(kind, ids, own, prefill_chunk_size=7)
    hook.remove()
    return all(places)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3"])
def test_assisted_generation_crops(kind: str) -> None:
    pool = make_pool(kind)
    ids = rows_of(make_prompts([B])[0] * 3)
    expected = generate(kind, ids, eos_token_id=VOCAB - 1)
    for found in (0, 3 * B - 1):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            crops = count_calls(cache, "crop")
            tokens = generate(kind, ids, cache, prompt_lookup_num_tokens=3, eos_token_id=VOCAB - 1)
            assert torch.equal(tokens, expected)
            assert crops
    check_drained(pool)


def count_calls(cache: KVPageCache, name: str) -> list[tuple]:
    calls: list[tuple] = []
    method = getattr(cache, name)
    setattr(cache, name, lambda *args: (calls.append(args), method(*args)))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_finds_prompt_and_answer(kind: str) -> None:
    pool = make_pool(kind)
    first, second = make_prompts([2 * B + 1, B + 1], seed=8)
    ids = rows_of(first)
    with KVPageCache(pool, ids) as cache:
        answer = generate(kind, ids, cache)[0].tolist()
    ids = rows_of(answer + second)
    expected = generate(kind, ids)
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() == (len(answer) - 1) // B * B
        assert torch.equal(generate(kind, ids, cache), expected)
    check_drained(pool)


def test_several_calls_over_one_cache() -> None:
    pool = make_pool("llama")
    first, second = make_prompts([2 * B + 1, B + 1], seed=9)
    with KVPageCache(pool, rows_of(first)) as cache:
        answer = generate("llama", rows_of(first), cache)[0].tolist()
        ids = rows_of(answer + second)
        with counted("llama") as counts:
            out = generate("llama", ids, cache, num_return_sequences=2, do_sample=True)
        assert counts[0] == 2 * (len(second) + 1)
    assert torch.equal(out, generate("llama", ids, num_return_sequences=2, do_sample=True))
    check_drained(pool)


def test_two_caches_at_once() -> None:
    pool = make_pool("llama")
    prompts = make_prompts([2 * B + 1, 3 * B], seed=10)
    with KVPageCache(pool, rows_of(prompts[0])) as one, KVPageCache(pool, rows_of(prompts[1])) as two:
        for prompt, cache in zip(prompts, (one, two), strict=True):
            assert torch.equal(generate("llama", rows_of(prompt), cache), generate("llama", rows_of(prompt)))
    check_drained(pool)


def test_what_was_evicted_comes_back_from_the_host() -> None:
    pool = make_pool("llama", 8, num_host_blocks=32)
    prompts = make_prompts([4 * B] * 4, seed=11)
    for _ in range(2):
        for prompt in prompts:
            ids = rows_of(prompt)
            with KVPageCache(pool, ids) as cache:
                assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
        check_drained(pool)
    assert pool.manager.stats().space.promoted_blocks > 0


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8_e4m3", "bf16"])
def test_caches_of_fewer_bits_are_near(cache_dtype: str) -> None:
    """The tokens are not promised to be the same; the logits are near, also after what was found."""
    model, ids = model_of("llama"), rows_of(*make_prompts([4 * B + 1]))
    pool = make_pool("llama", cache_dtype=cache_dtype)
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        for found in (0, 4 * B):
            with KVPageCache(pool, ids) as cache:
                assert cache.get_seq_length() == found
                for piece in ids[:, found:].split(B + 1, dim=1):
                    logits = model(piece, past_key_values=cache).logits[0, -1]
            error = (logits - expected).norm() / (expected - expected.mean()).norm()
            assert 0 < error < (0.05 if cache_dtype != "fp8_e4m3" else 0.3)
        # The model sees what is stored, from the first forward on: it matters not what was found.
        for pieces in ([4 * B + 1], [B, 3 * B + 1]):
            with KVPageCache(pool, ids, namespace=bytes([len(pieces)])) as cache:
                for piece in ids.split(pieces, dim=1):
                    own = model(piece, past_key_values=cache).logits[0, -1]
            assert torch.allclose(own, logits, atol=1e-4)
    check_drained(pool)


def test_scales_of_8_bit_floats() -> None:
    """Scales under which the elements fill the range, then ones that leave nothing of them."""
    model, ids = model_of("llama"), rows_of(*make_prompts([4 * B + 1]))
    config = CacheConfig(block_size=B, num_gpu_blocks=16, cache_dtype="fp8_e4m3")
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        pool = KVPageCachePool.from_model(model, config, kv_scales=[KVScales.of([0.02, 0.05], 0.03)] * 3)
        for found in (0, 4 * B):
            with KVPageCache(pool, ids) as cache:
                assert cache.get_seq_length() == found
                logits = model(ids[:, found:], past_key_values=cache).logits[0, -1]
            assert (logits - expected).norm() / (expected - expected.mean()).norm() < 0.3
    with pytest.raises(ValueError, match="logits over blocks of torch.float8_e4m3fn must be the model's own"):
        KVPageCachePool.from_model(model, config, kv_scales=[KVScales.of(1e-6, 1e6)] * 3)
    assert not has_hooks(model)


# --- other calls ------------------------------------------------------------------------------------------------------


def logits_of(kind: str, ids: torch.Tensor, cache: tf.Cache | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model_of(kind)(ids, past_key_values=cache).logits


def test_crop_by_hand_then_other_tokens() -> None:
    """Zero and a positive number mean what transformers' own caches take them for, or took."""
    pool, (prompt, other) = make_pool("llama"), make_prompts([4 * B, B])
    takes_length = "max_length" in inspect.signature(tf.DynamicCache.crop).parameters
    for argument, left in (
        (-1, 4 * B - 1),
        (-B, 3 * B),
        (B + 1, B + 1),
        (-9 * B, 0),
        (0, 0 if takes_length else 4 * B),
    ):
        with KVPageCache(pool, rows_of(prompt), namespace=bytes([left])) as cache:
            logits_of("llama", rows_of(prompt), cache)
            cache.crop(argument)
            assert cache.get_seq_length() == left
            found = logits_of("llama", rows_of(other), cache)
        expected = logits_of("llama", rows_of(prompt[:left] + other))[:, left:]
        assert torch.allclose(found, expected, atol=1e-5)
    check_drained(pool)


def test_rows_repeated_selected_and_reordered() -> None:
    pool, prompts = make_pool("llama"), make_prompts([2 * B + 1] * 2)
    with KVPageCache(pool, rows_of(*prompts)) as cache:
        logits_of("llama", rows_of(*prompts), cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        cache.batch_select_indices(torch.tensor([True, True, False]))
        cache.reorder_cache(torch.tensor([1, 0]))
        next_tokens = rows_of([5, 6], [7, 8])
        found = logits_of("llama", next_tokens, cache)
    expected = logits_of("llama", torch.cat([rows_of(*prompts), next_tokens], dim=1))[:, -2:]
    assert torch.allclose(found, expected, atol=1e-5)
    check_drained(pool)


def test_reset_begins_anew_with_any_rows() -> None:
    pool, prompts = make_pool("llama"), make_prompts([2 * B + 1] * 3)
    with KVPageCache(pool, rows_of(prompts[0])) as cache:
        logits_of("llama", rows_of(prompts[0]), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        ids = rows_of(*prompts)
        assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
    check_drained(pool)


def test_layers_have_their_own_lengths_within_a_forward() -> None:
    """As in a DynamicCache: some models ask a layer for its length after they have updated it."""
    model, ids = model_of("llama"), rows_of(*make_prompts([2 * B + 1]))
    told: list[list[int]] = []
    pool = make_pool("llama")
    for cache in (tf.DynamicCache(), KVPageCache(pool, ids)):
        lengths: list[int] = []
        told.append(lengths)
        hooks = [
            layer.register_forward_hook(
                lambda *_, cache=cache, lengths=lengths: lengths.extend(cache.get_seq_length(i) for i in range(3))
            )
            for layer in model.model.layers
        ]
        for piece in ids.split(B, dim=1):
            logits_of("llama", piece, cache)
        for hook in hooks:
            hook.remove()
    cache.release()
    assert told[0] == told[1]


@pytest.mark.parametrize("make", ["opt", "bloom", "llava", "gemma3n"])
def test_models_of_other_forms(make: str) -> None:
    """OPT calls its decoder past the module between, Bloom has its own attention, Llava embeds tokens outside of its
    decoder, Gemma 3n shares K and V between layers.
    """
    model = FORMS[make]()
    pool = KVPageCachePool.from_model(model, CacheConfig(block_size=B, num_gpu_blocks=32))
    ids = rows_of(*make_prompts([3 * B + 1]))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    for found in (0, 3 * B):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    if make != "llava" or int(tf.__version__.split(".")[0]) > 4:  # there it gives its decoder embeddings: refused
        with KVPageCache(pool, ids, namespace=b"past the hooks of the model itself") as cache, torch.no_grad():
            assert torch.allclose(model.forward(ids, past_key_values=cache).logits, model(ids).logits, atol=1e-4)
            assert cache.get_seq_length() == 3 * B + 1
    if make == "gemma3n":
        assert list(pool.layers) == [0, 1]
    if make == "llava":
        images = torch.zeros(1, 3, 8, 8)
        with KVPageCache(pool, ids, namespace=b"images") as cache, torch.no_grad():
            for name, value in (("pixel_values", images), ("image_sizes", [[8, 8]]), ("mm", {"image": (None, images)})):
                with pytest.raises(ValueError, match=f"takes text only, got {name}"):
                    model(ids, past_key_values=cache, **{name: value})
    check_drained(pool)


def make_opt() -> tf.PreTrainedModel:
    config = tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=256, init_std=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config).eval()


def make_bloom() -> tf.PreTrainedModel:
    config = tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config).eval()


def make_llava() -> tf.PreTrainedModel:
    vision = tf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = tf.LlavaConfig(vision_config=vision, text_config=CONFIGS["llama"](), image_token_index=VOCAB - 1)
    return tf.LlavaForConditionalGeneration(config).eval()


def make_gemma3n() -> tf.PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Gemma3nTextConfig(
        **{**COMMON, "num_hidden_layers": 4}, head_dim=16, sliding_window=6, layer_types=kinds * 2,
        num_kv_shared_layers=2, activation_sparsity_pattern=[0.0] * 4, vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config).eval()


FORMS = {"opt": make_opt, "bloom": make_bloom, "llava": make_llava, "gemma3n": make_gemma3n}


def test_lengths_that_it_tells() -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([2 * B + 1]))
    with KVPageCache(pool, ids) as cache:
        assert len(cache) == 3 and bool(cache)
        assert cache.get_mask_sizes(torch.arange(5), 0) == cache.get_mask_sizes(5, 0) == (5, 0)
        logits_of("llama", ids, cache)
        assert cache.get_mask_sizes(torch.arange(5), 2) == cache.get_mask_sizes(5, 2) == (2 * B + 6, 0)
        assert cache.get_max_length() == cache.get_max_cache_shape() == -1
        assert (cache.is_initialized, cache.is_compileable, cache.is_croppable) == (True, False, True)
        assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False] * 3
        assert repr(cache) == f"KVPageCache(1 rows of {2 * B + 1} tokens)"


# --- what goes wrong --------------------------------------------------------------------------------------------------


def state(cache: KVPageCache) -> tuple:
    pool, rows = cache._pool, cache._rows
    kept = [(row.seq_id, row.is_private, pool.manager.block_ids(row.seq_id).tolist()) for row in rows._rows]
    return rows.length, rows._tokens.tolist(), kept, pool.manager.stats().num_used_blocks


def test_a_forward_that_raises_is_as_if_it_had_not_been() -> None:
    pool, (prompt,) = make_pool("llama"), make_prompts([4 * B])
    ids = rows_of(prompt)
    layer = model_of("llama").model.layers[1]
    with pytest.raises(RuntimeError, match="broken"), KVPageCache(pool, ids) as cache:
        logits_of("llama", ids[:, : 2 * B + 1], cache)
        hook = layer.register_forward_pre_hook(broken)
        try:
            logits_of("llama", ids[:, 2 * B + 1 :], cache)
        finally:
            hook.remove()
            assert cache.get_seq_length() == 2 * B + 1
    check_drained(pool)
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() == 2 * B  # what was computed before it, in whole blocks
        assert torch.equal(generate("llama", ids, cache), generate("llama", ids))


def test_a_forward_after_one_that_raised() -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([2 * B]))
    with KVPageCache(pool, ids) as cache:
        hook = model_of("llama").model.layers[1].register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken"):
            generate("llama", ids, cache)
        hook.remove()
        assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
    check_drained(pool)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt("broken")])
@pytest.mark.parametrize("where", ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"])
def test_other_tokens_after_a_forward_that_did_not_end(where: str, error: BaseException) -> None:
    """As many of them: they are written as theirs, and what was not computed is found by nobody. torch calls no hooks
    behind KeyboardInterrupt.
    """
    pool, ids = make_pool("llama"), rows_of(*make_prompts([2 * B + 2]))
    ended, other, more = rows_of([7, 8, 9]), rows_of([3, 4, 5]), rows_of([1, 2, 6])
    model = model_of("llama")

    def breaks(module: torch.nn.Module, args: tuple) -> None:
        hook.remove()
        raise error

    with KVPageCache(pool, ids) as cache:
        logits_of("llama", ids, cache)
        hook = model.get_submodule(where).register_forward_pre_hook(breaks)
        with pytest.raises(type(error), match="broken"):
            logits_of("llama", ended, cache)
        found = logits_of("llama", other, cache)
        assert cache.get_seq_length() == 2 * B + 5
        torch.testing.assert_close(found, logits_of("llama", torch.cat([ids, other], 1))[:, -3:], rtol=1e-4, atol=1e-5)
        logits_of("llama", more, cache)
    for tokens, num_found in ((ended, 2 * B + 2), (other, 2 * B + 7)):
        asked = torch.cat([ids, tokens, more], 1)
        with KVPageCache(pool, asked) as cache:
            assert cache.get_seq_length() == num_found
            assert torch.equal(generate("llama", asked, cache), generate("llama", asked))
    check_drained(pool)


@pytest.mark.parametrize("where", ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"])
def test_a_generate_that_was_interrupted_goes_on_from_a_crop(where: str) -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([2 * B + 2]))
    calls = []

    def breaks(module: torch.nn.Module, args: tuple) -> None:
        calls.append(module)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with KVPageCache(pool, ids) as cache:
        hook = model_of("llama").get_submodule(where).register_forward_pre_hook(breaks)
        with pytest.raises(KeyboardInterrupt):
            generate("llama", ids, cache)
        hook.remove()
        cache.crop(ids.shape[1] + 1)
        known = generate("llama", ids)[:, : ids.shape[1] + 1]
        asked = torch.cat([known, rows_of([5])], 1)
        assert torch.equal(generate("llama", asked, cache), generate("llama", asked))
    check_drained(pool)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("others_between", [False, True])
def test_a_turn_that_did_not_end_is_taken_again(where: str, error: type, is_padded: bool, others_between: bool) -> None:
    """With nothing done to the cache: the same one, or a longer. The model may have worked for others meanwhile."""
    pool, model = make_pool("llama"), model_of("llama")
    for num_more in (0, 5):
        prompt, turn, more = make_prompts([9, 5, 5], seed=3)
        ids = rows_of(prompt)
        mask = torch.ones_like(ids)
        mask[:, : 2 * is_padded] = 0
        with KVPageCache(pool, ids, mask) as cache:
            ids = torch.cat([generate("llama", ids, cache, attention_mask=mask, max_new_tokens=4), rows_of(turn)], 1)
            mask = torch.cat([mask, mask.new_ones(1, 4 + len(turn))], 1)
            hook = model.get_submodule(where).register_forward_pre_hook(raises(error))
            with pytest.raises(error, match="broken"):
                generate("llama", ids, cache, attention_mask=mask)
            hook.remove()
            if others_between:
                generate("llama", rows_of(prompt[:4]))
            assert cache.get_seq_length() == 9 + 4 - 1
            ids = torch.cat([ids, rows_of(more[:num_more])], 1) if num_more else ids
            mask = torch.cat([mask, mask.new_ones(1, num_more)], 1)
            found = generate("llama", ids, cache, attention_mask=mask)
            assert torch.equal(found, generate("llama", ids, attention_mask=mask))
    check_drained(pool)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_inner_module_after_a_forward_that_did_not_end(error: type) -> None:
    pool, model, ids = make_pool("llama"), model_of("llama"), rows_of(*make_prompts([9]))
    with KVPageCache(pool, ids) as cache, torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        hook = model.model.embed_tokens.register_forward_pre_hook(raises(error))
        with pytest.raises(error, match="broken"):
            model(ids[:, -1:], past_key_values=cache)
        hook.remove()
        with pytest.raises(ValueError, match="text only"):
            model.model(inputs_embeds=model.model.embed_tokens(ids[:, -1:]), past_key_values=cache)
        found = model.model(ids[:, -1:], past_key_values=cache).last_hidden_state
        assert cache.get_seq_length() == 9
        wanted = model.model(ids).last_hidden_state
        torch.testing.assert_close(found, wanted[:, -1:], rtol=1e-4, atol=1e-5)
    check_drained(pool)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_did_not_end_leaves_no_rows(error: type) -> None:
    """That it has made for its answers."""
    pool, ids = make_pool("llama"), rows_of(*make_prompts([9]))
    with KVPageCache(pool, ids) as cache:
        hook = model_of("llama").lm_head.register_forward_pre_hook(raises(error))
        with pytest.raises(error, match="broken"):
            generate("llama", ids, cache, num_beams=3)
        hook.remove()
        assert cache.get_seq_length() == 0
        assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
    check_drained(pool)


def test_a_cache_forgotten_in_a_forward_that_did_not_end() -> None:
    """The frame of the call keeps it alive until the garbage collector comes."""
    pool, ids = make_pool("llama"), rows_of(*make_prompts([9]))
    cache = KVPageCache(pool, ids)
    hook = model_of("llama").lm_head.register_forward_pre_hook(raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        generate("llama", ids, cache)
    hook.remove()
    del cache
    gc.collect()
    assert len(pool.forgotten) == 1
    KVPageCache(pool, ids).release()
    check_drained(pool)


def test_a_model_called_by_a_hook_of_its_own_forward() -> None:
    """Without the cache: it neither ends nor counts for the cache's forward."""
    pool, model, ids = make_pool("llama"), model_of("llama"), rows_of(*make_prompts([9]))

    def calls(module: torch.nn.Module, args: tuple) -> None:
        hook.remove()
        model(ids[:, :3])

    with KVPageCache(pool, ids) as cache, torch.no_grad():
        hook = model.model.layers[1].register_forward_pre_hook(calls)
        found = model(ids, past_key_values=cache).logits
        assert cache.get_seq_length() == 9
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)
    check_drained(pool)


def raises(error: type) -> Callable[[torch.nn.Module, tuple], None]:
    def hook(module: torch.nn.Module, args: tuple) -> None:
        raise error("broken")

    return hook


def broken(module: torch.nn.Module, args: tuple) -> None:
    raise RuntimeError("broken")


def test_without_room_for_the_prompt() -> None:
    pool, ids = make_pool("llama", 4), rows_of(*make_prompts([2 * B] * 3))
    with pytest.raises(OutOfBlocks):
        KVPageCache(pool, ids)
    check_drained(pool)
    assert pool.manager.num_free_blocks == 4


def test_without_room_for_the_answer_nothing_is_lost() -> None:
    pool, ids = make_pool("llama", 4), rows_of(*make_prompts([3 * B]))
    with pytest.raises(OutOfBlocks), KVPageCache(pool, ids) as cache:
        try:
            generate("llama", ids, cache)
        finally:
            assert cache.get_seq_length() == 4 * B
    check_drained(pool)
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() == 2 * B  # there is no room to copy a part of the third block
        assert torch.equal(generate("llama", ids, cache, max_new_tokens=2), generate("llama", ids, max_new_tokens=2))


def test_without_room_for_more_rows() -> None:
    pool, ids = make_pool("llama", 8), rows_of(*make_prompts([3 * B]))
    with KVPageCache(pool, ids) as cache:
        before = state(cache)
        with pytest.raises(OutOfBlocks):
            generate("llama", ids, cache, num_beams=4)
        assert state(cache) == before
        with pytest.raises(OutOfBlocks):  # there is room for a second row, but not for what comes next
            logits_of("llama", torch.cat([ids, rows_of([1, 2, 3, 4, 5])], dim=1).repeat(2, 1), cache)
        assert (len(cache._rows), cache.get_seq_length()) == (1, 0)
        assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
    check_drained(pool)


def test_forwards_that_it_refuses_before_anything_is_computed() -> None:
    pool, (prompt,) = make_pool("llama"), make_prompts([3 * B])
    model, ids = model_of("llama"), rows_of(prompt)
    with KVPageCache(pool, ids) as cache:
        generate("llama", ids, cache)
    with KVPageCache(pool, ids) as cache:
        rest, before = ids[:, cache.get_seq_length() :], state(cache)
        masked = torch.ones_like(ids)
        masked[0, 1] = 0
        embeds = model.get_input_embeddings()(rest)
        for kwargs, message in (
            ({"input_ids": rest, "pixel_values": embeds}, "takes text only, got pixel_values"),
            ({"inputs_embeds": embeds}, "takes text only, got inputs_embeds"),
            ({"input_ids": rest + 1}, "input_ids must be those that the cache was made with"),
            ({"input_ids": rest.repeat(2, 1)[:0]}, "input_ids must be integers"),
            ({"input_ids": rest * 0 + vocab_size(model)}, r"input_ids must be ids in \[0, "),
            (
                {"input_ids": rest, "attention_mask": masked},
                "attention_mask, position_ids and cache_position must show",
            ),
            (
                {"input_ids": rest, "position_ids": rest * 0 + 1},
                "attention_mask, position_ids and cache_position must show",
            ),
            (
                {"input_ids": rest, "attention_mask": torch.ones(1, 1, 1, 3 * B)},
                "attention_mask, position_ids and cache_position must show",
            ),
        ):
            with torch.no_grad(), pytest.raises(ValueError, match=message):
                model.model(past_key_values=cache, **kwargs)
            assert state(cache) == before
        with pytest.raises(ValueError, match="need no gradients"):
            model(rest, past_key_values=cache)
        assert cache.get_seq_length() == 3 * B - 1
        model.train()
        with pytest.raises(ValueError, match="model must be in eval mode"):
            logits_of("llama", rest, cache)
        model.eval()
        assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
    with (
        KVPageCache(pool, ids.repeat(2, 1)) as cache,
        pytest.raises(ValueError, match="must have 2 rows, or a multiple"),
    ):
        logits_of("llama", ids[:, -1:].repeat(3, 1), cache)
    check_drained(pool)


def test_updates_that_come_from_no_forward_of_its_model() -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([2 * B]))
    cache = KVPageCache(pool, ids)
    rows = torch.zeros(1, 2, 2 * B, 8)
    message = "K and V of layer 0 must come from a forward of the pool's model"
    with pytest.raises(ValueError, match=message):
        cache.update(rows, rows, 0)
    cache.release()
    cache.release()
    with pytest.raises(ValueError, match=message):
        generate("llama", ids, cache)
    check_drained(pool)


def test_arguments() -> None:
    pool = make_pool("llama")
    too_large = vocab_size(pool.model)
    for ids in ([1, 2], [[]], [[1.5]], [[-1]], [[too_large]], [[2**31]], torch.ones(1, 2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="input_ids must be"):
            KVPageCache(pool, ids)
    with pytest.raises(ValueError, match=r"attention_mask must be of shape \(1, 2\), got \(1, 3\)"):
        KVPageCache(pool, [[1, 2]], torch.ones(1, 3))
    with pytest.raises(TypeError, match="namespace must be bytes"):
        KVPageCache(pool, [[1, 2]], namespace="a")
    check_drained(pool)
    with KVPageCache(pool, [[1, 2]]) as cache:
        for copied in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be copied"):
                copied(cache)


def test_a_forgotten_cache_gives_its_blocks_back_when_the_next_is_made() -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([2 * B + 1]))
    cache = KVPageCache(pool, ids)
    generate("llama", ids, cache)
    del cache
    gc.collect()
    assert pool.manager.stats().num_sequences == 1
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() == 2 * B
        assert pool.manager.stats().num_sequences == 1
    check_drained(pool)


def test_lengths_at_which_the_rotary_embedding_changes() -> None:
    config = CONFIGS["llama"]()
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    setattr(config, "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", parameters)
    config.max_position_embeddings = 3 * B
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    pool = KVPageCachePool.from_model(model, CacheConfig(block_size=B, num_gpu_blocks=16))
    with pytest.raises(ValueError, match=f"rows must have at most {3 * B} tokens"):
        KVPageCache(pool, [[1] * (3 * B + 1)])
    ids = rows_of([1] * 3 * B)
    with KVPageCache(pool, ids) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=f"rows must have at most {3 * B} tokens"):
            model(ids[:, :1], past_key_values=cache)
    check_drained(pool)


# --- what a pool refuses ----------------------------------------------------------------------------------------------


def test_models_whose_state_is_not_all_in_k_and_v() -> None:
    sizes = {**COMMON, "num_hidden_layers": 2}
    refused = {
        "encoder": tf.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4),
        "layers must be of": tf.JambaConfig(**sizes, num_experts=2, use_mamba_kernels=False),
        "layers must be of .*, MambaForCausalLM has": tf.MambaConfig(
            vocab_size=99, hidden_size=16, num_hidden_layers=1, state_size=4
        ),
    }
    for message, config in refused.items():
        auto = tf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tf.AutoModelForCausalLM
        model = auto.from_config(config).eval()
        with pytest.raises(ValueError, match=message):
            KVPageCachePool.from_model(model, CacheConfig(num_gpu_blocks=4))


def test_models_that_do_not_keep_to_their_cache() -> None:
    """Found out by computing: one with a state of its own, one that calls its cache twice."""
    config = CacheConfig(block_size=B, num_gpu_blocks=4)
    model = make_model("llama")
    hook = model.model.layers[0].register_forward_hook(lambda module, args, out: running_sum(out))
    with pytest.raises(
        ValueError, match="logits over blocks of torch.float32 must be the model's own, those of LlamaForCausalLM are"
    ):
        KVPageCachePool.from_model(model, config)
    hook.remove()
    assert not has_hooks(model)
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ValueError, match=r"each layer must write to its cache once, those of .* \[0, 0, 2\]"):
        KVPageCachePool.from_model(model, config)


def running_sum(out: torch.Tensor | tuple) -> torch.Tensor | tuple:
    """Each token sees the hidden states of those before it, but only within one forward."""
    if isinstance(out, tuple):
        return (out[0].cumsum(dim=1), *out[1:])
    return out.cumsum(dim=1)


def test_configurations_that_do_not_fit() -> None:
    model = model_of("llama")
    with pytest.raises(TypeError, match="cache_config must be a CacheConfig, got dict"):
        KVPageCachePool.from_model(model, {})
    with pytest.raises(ValueError, match="num_gpu_blocks must be positive, got 0"):
        KVPageCachePool.from_model(model, CacheConfig())
    with pytest.raises(ValueError, match="backend must be 'mla' exactly where .* K and V of heads to 'mla'"):
        KVPageCachePool.from_model(model, CacheConfig(num_gpu_blocks=4, backend="mla"))
    if hands_latents("deepseek_v3"):
        with pytest.raises(ValueError, match="backend must be 'mla' exactly where .* latents to 'flash'"):
            KVPageCachePool.from_model(model_of("deepseek_v3"), CacheConfig(num_gpu_blocks=4))
    with pytest.raises(ValueError, match="model must be in eval mode, LlamaForCausalLM is in training mode"):
        KVPageCachePool.from_model(make_model("llama").train(), CacheConfig(num_gpu_blocks=4))
    assert not has_hooks(model)


def test_tensors_that_hold_no_numbers_are_refused() -> None:
    pool, ids = make_pool("llama"), rows_of([1, 2, 3])
    mask = torch.ones_like(ids)
    mask.untyped_storage().resize_(0)
    for wrong in (mask, torch.ones(1, 3, device="meta"), object()):
        with pytest.raises((TypeError, ValueError)):
            KVPageCache(pool, ids, wrong)
    with KVPageCache(pool, ids) as cache:
        for wrong in (1.5, [0], torch.tensor([0.0]), torch.tensor([0], device="meta")):
            with pytest.raises((TypeError, ValueError)):
                cache.reorder_cache(wrong)
            with pytest.raises((TypeError, ValueError)):
                cache.batch_select_indices(object() if wrong == [0] else wrong)  # lists are what tensors take, too
        with pytest.raises(ValueError, match="repeats must be at most"):
            cache.batch_repeat_interleave(10**9)
    check_drained(pool)


@pytest.mark.parametrize("kind", ["swap_in", "swap_out", "copy"])
@pytest.mark.parametrize("first", range(3))
def test_a_copy_between_the_tiers_that_fails_is_done_before_anything_else(kind: str, first: int) -> None:
    """The tree takes its blocks for what is to be copied into them, whatever becomes of the call."""
    stem, config = make_prompts([18], seed=3)[0], CacheConfig(block_size=B, num_gpu_blocks=16, num_cpu_blocks=30)
    prompts = [stem + tail for tail in make_prompts([1, 3, 5, 9, 2], seed=4)] + make_prompts([20, 5, 11], seed=5)
    pool, calls = KVPageCachePool.from_model(model_of("llama"), config), []
    works = getattr(pool.engine, kind)

    def fails(*args: object) -> object:
        calls.append(args)
        if len(calls) % 4 == first:
            raise RuntimeError("boom")
        return works(*args)

    setattr(pool.engine, kind, fails)
    num_raised = 0
    for prompt in prompts * 4:
        ids = torch.tensor([prompt])
        try:
            with KVPageCache(pool, ids) as cache:
                assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
        except RuntimeError as error:
            assert str(error) == "boom"
            num_raised += 1
        pool.manager.check()
    assert num_raised > 0 and pool.manager.num_free_blocks == 16
