"""Forwards and calls over a KVPageCache that fail leave everything as it was."""

import copy
import gc

import pytest
import torch
import transformers as tf
from support.generate_pools import (
    B,
    broken,
    check_drained,
    generate,
    logits_of,
    make_pool,
    model_of,
    raises,
    rows_of,
    state,
)
from support.insides import cached_rows
from support.models import CONFIGS, make_prompts

from kvpage import CacheConfig, OutOfBlocks
from kvpage.serving import KVPageCache, KVPageCachePool
from kvpage.serving.model.limits import vocab_size


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
        assert (len(cached_rows(cache)), cache.get_seq_length()) == (1, 0)
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
                found = generate("llama", ids, cache, max_new_tokens=B + 1)
            assert torch.equal(found, generate("llama", ids, max_new_tokens=B + 1))
        except RuntimeError as error:
            assert str(error) == "boom"
            num_raised += 1
        pool.manager.check()
    assert num_raised > 0 and pool.manager.num_free_blocks == 16
