"""`model.generate` over a KVPageCache gives a hybrid model's own tokens, and begins at exact kept positions."""

import functools
import re
from collections.abc import Sequence

import pytest
import torch
from support.models import VOCAB
from support.state_models import APART, SERVED, make_state_model

from kvpage import CacheConfig
from kvpage.checks.errors import OutOfSlots
from kvpage.serving import KVPageCache, KVPageCachePool, StateConfig
from kvpage.serving.model.states.model_states import are_states_served
from kvpage.serving.model.states.piece_cache import ARE_NUMBERED
from kvpage.serving.model.states.scan_start import ScannedForward

pytestmark = pytest.mark.skipif(not are_states_served("5.14"), reason="needs transformers 5.14")
B, NEW = 4, 32
LATENT = ("bailing_hybrid", "kimi_linear")
NO_KV = "forward must take past_key_values|states must be in the cache, beside K and V"
REASONS = {
    "bamba": "logits over blocks of torch.float32 must be the model's own",  # it counts positions of parts from 0
    "falcon_mamba": NO_KV,
    "lara_mini": "layers must not have windows beside states",
    "mamba": NO_KV,
    "mamba2": NO_KV,
    "recurrent_gemma": NO_KV,
}
REFUSED = {kind: reason for kind, reason in REASONS.items() if kind in SERVED}
TAKEN = [kind for kind in SERVED if kind not in REFUSED]
CLOSELY = ["jamba", "lfm2", "qwen3_5_text", "zamba2"]
model_of = functools.cache(make_state_model)


def make_pool(kind: str, num_blocks: int = 64, **options: object) -> KVPageCachePool:
    """A pool whose blocks and slots are poisoned."""
    backend = "mla" if kind in LATENT else "flash"
    num_host = options.pop("num_host_blocks", 0)
    config = CacheConfig(B, num_blocks, num_host, backend=backend)
    pool = KVPageCachePool.from_model(model_of(kind), config, **options)
    for layer in pool.engine.gpu_cache:
        layer.fill_(torch.nan)
    poison(pool)
    return pool


def poison(pool: KVPageCachePool) -> None:
    pool.states._cache.slots.fill_(0xFF)


def tokens_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def slot_bytes(kind: str) -> int:
    """The bytes of one state and its tail, as the refusal of a smaller budget says."""
    with pytest.raises(ValueError, match="checkpoint_bytes must be") as caught:
        make_pool(kind, states=StateConfig(checkpoint_bytes=1))
    return int(re.findall(r"must be (\d+) or more", str(caught.value))[0])


def generate(kind: str, ids: torch.Tensor, cache: KVPageCache | None = None, **options: object) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model_of(kind).generate(ids, past_key_values=cache, **settings)


def answer(pool: KVPageCachePool, kind: str, ids: torch.Tensor, num_found: int, **options: object) -> torch.Tensor:
    """Generate over a new cache, which must find so many tokens."""
    cache_at = options.pop("cache_at", ())
    with KVPageCache(pool, ids, cache_at=cache_at) as cache:
        assert cache.get_seq_length() == num_found
        found = generate(kind, ids, cache, **options)
    pool.manager.check()
    return found


def drained(pool: KVPageCachePool) -> bool:
    """Whether no slot is taken but by checkpoints."""
    slots = pool.manager.stats().slots
    return slots.num_slots - slots.num_free_slots == slots.num_checkpoints and pool.manager.stats().num_used_blocks == 0


def forked(ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Prompts of one length that begin as ids[0], each up to another place."""
    rows = ids.repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        rows[row, length:] = (rows[row, length:] + 1 + row) % (VOCAB - 1) + 1
    return rows


@pytest.mark.parametrize("kind", TAKEN)
def test_first_call_then_whole_prompt_then_the_answer_goes_on(kind: str) -> None:
    pool, ids = make_pool(kind), tokens_of(1, 3 * B + 1)
    expected = generate(kind, ids, max_new_tokens=8)
    assert torch.equal(answer(pool, kind, ids, 0, max_new_tokens=8), expected)
    assert torch.equal(answer(pool, kind, ids, 3 * B, max_new_tokens=8), expected)
    longer = torch.cat([expected, tokens_of(1, 3, seed=1)], dim=1)
    num_found = 3 * B if kind in APART else 3 * B + 8
    assert torch.equal(
        answer(pool, kind, longer, num_found, max_new_tokens=4), generate(kind, longer, max_new_tokens=4)
    )
    assert drained(pool)


@pytest.mark.parametrize("kind", CLOSELY)
def test_prefixes_shared_at_each_token(kind: str) -> None:
    pool, ids = make_pool(kind, num_blocks=256), tokens_of(1, 3 * B + 2)
    places = range(1, 3 * B + 1)
    prompts = forked(ids, places)
    expected = generate(kind, prompts)
    assert torch.equal(answer(pool, kind, ids, 0, cache_at=places), generate(kind, ids))
    for place, prompt, tokens in zip(places, prompts, expected, strict=True):
        assert torch.equal(answer(pool, kind, prompt[None], place), tokens[None])
    assert drained(pool)


@pytest.mark.parametrize("kind", CLOSELY)
def test_where_prompts_diverged_is_kept_for_the_third(kind: str) -> None:
    pool, ids = make_pool(kind), tokens_of(1, 3 * B)
    prompts = forked(ids, [B + 3] * 3)
    for prompt, num_found in zip(prompts, (0, 0, B + 3), strict=True):
        found = answer(pool, kind, prompt[None], num_found, max_new_tokens=8)
        assert torch.equal(found, generate(kind, prompt[None], max_new_tokens=8))


def test_evicted_checkpoints_and_blocks_are_computed_again() -> None:
    kind = "qwen3_5_text"
    pool = make_pool(kind, num_blocks=16, states=StateConfig(checkpoint_bytes=6 * slot_bytes(kind) - 1))
    assert pool.manager.stats().slots.num_slots == 5
    prompts = tokens_of(8, 2 * B + 1)
    expected = generate(kind, prompts, max_new_tokens=6)
    for _ in range(2):
        for prompt, tokens in zip(prompts, expected, strict=True):
            with KVPageCache(pool, prompt[None]) as cache:
                assert torch.equal(generate(kind, prompt[None], cache, max_new_tokens=6), tokens[None])
            pool.manager.check()
    assert pool.manager.stats().slots.evicted > 0
    assert drained(pool)


def test_checkpoints_come_back_from_the_host() -> None:
    kind = "lfm2"
    each = slot_bytes(kind)
    budget = StateConfig(checkpoint_bytes=3 * each, host_checkpoint_bytes=16 * each)
    pool = make_pool(kind, num_blocks=12, num_host_blocks=48, states=budget)
    prompts = tokens_of(6, 2 * B + 1)
    expected = generate(kind, prompts, max_new_tokens=6)
    for num_found in (0, 2 * B):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert torch.equal(answer(pool, kind, prompt[None], num_found, max_new_tokens=6), tokens[None])
    assert pool.manager.stats().slots.demoted > 0


@pytest.mark.parametrize("kind", CLOSELY)
def test_rows_begin_at_one_position(kind: str) -> None:
    pool, ids = make_pool(kind, num_blocks=128), tokens_of(1, 3 * B)
    prompts = forked(ids, [2 * B + 1, B + 2])
    answer(pool, kind, ids, 0, cache_at=[B + 2, 2 * B + 1], max_new_tokens=1)
    expected = generate(kind, prompts, max_new_tokens=8)
    assert torch.equal(answer(pool, kind, prompts, B + 2, max_new_tokens=8), expected)
    assert torch.equal(answer(pool, kind, prompts, 3 * B - 1, max_new_tokens=8), expected)
    assert drained(pool)


@pytest.mark.parametrize("kind", CLOSELY)
def test_beams_copy_states(kind: str) -> None:
    pool, ids = make_pool(kind, num_blocks=128), tokens_of(2, 2 * B + 1)
    options = {"num_beams": 3, "max_new_tokens": 10}
    expected = generate(kind, ids, **options)
    for num_found in (0, 2 * B):
        assert torch.equal(answer(pool, kind, ids, num_found, **options), expected)
    assert drained(pool)


@pytest.mark.parametrize("kind", CLOSELY)
def test_rows_with_padding_share_nothing(kind: str) -> None:
    pool, ids = make_pool(kind), tokens_of(2, 2 * B + 1)
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    expected = generate(kind, ids, attention_mask=mask, max_new_tokens=8)
    for _ in range(2):
        with KVPageCache(pool, ids, mask) as cache:
            assert cache.get_seq_length() == 0
            found = generate(kind, ids, cache, attention_mask=mask, max_new_tokens=8)
        assert torch.equal(found, expected)
        pool.manager.check()
    assert drained(pool)


@pytest.mark.parametrize("kind", CLOSELY)
@pytest.mark.parametrize("max_working_bytes", [None, 0])
def test_prompts_in_parts(kind: str, max_working_bytes: int | None) -> None:
    pool, ids = make_pool(kind, max_working_bytes=max_working_bytes), tokens_of(1, 3 * B + 1)
    model = model_of(kind)
    with torch.no_grad():
        expected = model(ids, use_cache=True).logits
        for begin, cache_at in ((0, (B + 1, 2 * B + 3)), (3 * B, ())):
            with KVPageCache(pool, ids, cache_at=cache_at) as cache:
                assert cache.get_seq_length() == begin
                cuts = sorted({begin, max(begin, 7), 3 * B + 1})
                parts = [ids[:, start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
                found = torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], dim=1)
            torch.testing.assert_close(found, expected[:, begin:], rtol=1e-4, atol=1e-4)
    assert drained(pool)


def test_scans_that_are_not_known_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScannedForward, "of", lambda mixer, copy: None)
    pool, ids = make_pool("jamba"), tokens_of(1, 3 * B + 2)
    prompts = forked(ids, [B + 1, 2 * B + 2])
    assert torch.equal(answer(pool, "jamba", ids, 0, cache_at=[B + 1, 2 * B + 2]), generate("jamba", ids))
    for prompt, found in zip(prompts, (B + 1, 2 * B + 2), strict=True):
        assert torch.equal(answer(pool, "jamba", prompt[None], found), generate("jamba", prompt[None]))


def test_a_forward_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "lfm2"
    pool, ids, model = make_pool(kind), tokens_of(1, 2 * B + 1), model_of(kind)
    with torch.no_grad():
        expected = model(ids, use_cache=True).logits[:, 5:]
    with KVPageCache(pool, ids) as cache, torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        last = model.model.layers[-1]
        handle = last.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 5:], past_key_values=cache, use_cache=True)
        handle.remove()
        assert cache.get_seq_length() == 5
        found = model(ids[:, 5:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert drained(pool)


def test_the_model_has_no_hooks_afterwards() -> None:
    pool, ids = make_pool("lfm2"), tokens_of(1, 5)
    answer(pool, "lfm2", ids, 0, max_new_tokens=2)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model_of("lfm2").modules())


def test_namespaces_share_no_states() -> None:
    pool, ids = make_pool("lfm2"), tokens_of(1, 2 * B)
    for namespace in (b"a", b"b"):
        with KVPageCache(pool, ids, namespace=namespace) as cache:
            assert cache.get_seq_length() == 0
            generate("lfm2", ids, cache, max_new_tokens=2)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[kind]) as caught:
        make_pool(kind)
    assert type(model_of(kind)).__name__ in str(caught.value)


@pytest.mark.parametrize("cache_at", [[0], [6], [-1], [2, 2]])
def test_marks_that_are_not_of_the_prompt(cache_at: list[int]) -> None:
    pool = make_pool("lfm2")
    with pytest.raises(ValueError, match="cache_at must be"):
        KVPageCache(pool, tokens_of(1, 5), cache_at=cache_at)
    assert drained(pool)


def test_budgets() -> None:
    with pytest.raises(ValueError, match="checkpoint_bytes must be .* or more, a state and its tail, got 10"):
        make_pool("lfm2", states=StateConfig(checkpoint_bytes=10))
    with pytest.raises(TypeError, match="states must be a StateConfig, got int"):
        make_pool("lfm2", states=7)


def test_states_do_not_go_back() -> None:
    pool, ids = make_pool("lfm2"), tokens_of(1, 2 * B)
    with KVPageCache(pool, ids) as cache:
        with torch.no_grad():
            model_of("lfm2")(ids, past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="rows with states must keep their 8 tokens, got a length of 7"):
            cache.crop(-1)
        with torch.no_grad(), pytest.raises(ValueError, match="a forward over states must begin at token 8, got 0"):
            model_of("lfm2")(ids, past_key_values=cache, use_cache=True, position_ids=torch.arange(8)[None])
        with pytest.raises(ValueError, match="states must come from a forward"):
            cache.get_conv_state(0)
        assert cache.has_previous_state() and not cache.is_recording_past(0)


def test_no_slot_for_a_row() -> None:
    each = slot_bytes("lfm2")
    pool = make_pool("lfm2", states=StateConfig(checkpoint_bytes=2 * each))
    with pytest.raises(OutOfSlots, match="slot"):
        KVPageCache(pool, tokens_of(3, 5))
    assert drained(pool) and pool.manager.stats().slots.num_checkpoints == 0


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_layers_have_states_within_a_forward(kind: str) -> None:
    """Mixers of transformers before 5.21 read them there."""
    pool, ids, model, seen = make_pool(kind), tokens_of(1, 2 * B + 1), model_of(kind), []

    def read(module: torch.nn.Module, args: object, output: object) -> None:
        layer = cache.layers[module.layer_idx]
        states = layer.conv_states[0] if ARE_NUMBERED else layer.conv_states
        if hasattr(cache, "get_conv_state"):
            assert torch.equal(states, cache.get_conv_state(module.layer_idx))
        assert layer.device == states.device and not layer.record_past
        seen.append(module.layer_idx)

    mixers = [forward.mixer.module for forward in pool.states.forwards]
    handles = [mixer.register_forward_hook(read) for mixer in mixers]
    with torch.no_grad(), KVPageCache(pool, ids) as cache:
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        assert not hasattr(cache.layers[0], "conv_states")
    for handle in handles:
        handle.remove()
    assert seen == [mixer.layer_idx for mixer in mixers]


def test_layers_with_states_after_the_last_attention_count() -> None:
    model, pool = model_of("lfm2"), make_pool("lfm2")
    assert model.config.layer_types == ["conv", "full_attention", "conv"]
    tokens = torch.tensor([list(range(3, 9))])
    with KVPageCache(pool, tokens) as cache, torch.no_grad():
        model(tokens, past_key_values=cache)
        assert len(cache) == len(cache.layers) == 3 and cache.is_sliding == cache.is_dummy == [False] * 3
        assert cache[0] == cache[2] == (None, None) and cache[1][0].shape[2] == 6
        assert [pair[0] is None for pair in cache.to_legacy_cache()] == [True, False, True]
