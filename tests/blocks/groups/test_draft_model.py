"""A tiny draft model over a target's hidden states: with shared blocks its outputs are those without."""

import pytest
import torch

from kvpage import BlockManager, CacheConfig, CacheEngine, ModelConfig, ops
from kvpage.blocks.drafted_manager import DraftedManager

B, SIZE, HEADS, VOCABULARY, NUM_BLOCKS = 4, 16, 2, 32, 64


class PagedLayer:
    """One attention layer over blocks, with random weights. It adds its output to its input."""

    def __init__(self, manager: BlockManager) -> None:
        model = ModelConfig(SIZE // HEADS, HEADS, ("full_attention",), torch.float32)
        self.manager = manager
        self.cache = CacheEngine(CacheConfig(block_size=B, num_gpu_blocks=NUM_BLOCKS), model)
        self.cache.gpu_cache[0].fill_(float("nan"))  # whoever reads what nobody wrote shows it
        self.weights = torch.randn(3, SIZE, SIZE) / SIZE**0.5

    def __call__(self, seq_id: int, inputs: torch.Tensor, begin: int) -> torch.Tensor:
        end, layer, layout = begin + len(inputs), self.cache.gpu_cache[0], self.cache.layout
        self.manager.do_moves(self.cache.do_move)
        slots = torch.from_numpy(self.manager.slot_mapping(seq_id, begin, end))
        query, key, value = (self._heads(inputs, weight) for weight in self.weights)
        ops.reshape_and_cache(key, value, layer, slots, layout)
        tables = torch.from_numpy(self.manager.block_tables([seq_id]))
        return inputs + ops.paged_attention(query, layer, tables, [end], layout, query_lens=[end - begin]).flatten(1)

    def dense(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(inputs, weight).transpose(0, 1) for weight in self.weights)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return inputs + attended.transpose(0, 1).flatten(1)

    def _heads(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (inputs @ weight).unflatten(1, (HEADS, SIZE // HEADS)).contiguous()


class Drafting:
    """A target of one layer, and a draft model of one layer over its hidden states and the next tokens."""

    def __init__(self, enable_prefix_caching: bool = True) -> None:
        torch.manual_seed(0)
        targets = BlockManager(NUM_BLOCKS, B, enable_prefix_caching)
        self.manager = DraftedManager(targets, BlockManager(NUM_BLOCKS, B, enable_prefix_caching))
        self.embedding = torch.randn(VOCABULARY, SIZE)
        self.target, self.draft = PagedLayer(targets), PagedLayer(self.manager.drafts)

    def generate(self, seq_id: int, prompt: list[int], count: int) -> tuple[int, list[int], torch.Tensor]:
        """Return the cached tokens, all tokens, and the draft model's outputs of the computed positions."""
        given, tokens, outputs = self.manager.allocate(seq_id, prompt), list(prompt), []
        begin, drafted = given.num_cached_tokens, given.drafts.num_cached_tokens
        for _ in range(count):
            end = len(tokens)
            hidden = self.target(seq_id, self.embedding[tokens[begin:end]], begin)
            tokens.append(int((hidden[-1] @ self.embedding.T).argmax()))
            inputs = hidden[drafted - begin :] + self.embedding[tokens[drafted + 1 : end + 1]].roll(1, 1)
            outputs.append(self.draft(seq_id, inputs, drafted))
            self.manager.commit(seq_id, tokens[begin:end], tokens[drafted + 1 : end + 1])
            self.manager.append([seq_id])
            begin = drafted = end
        self.manager.release(seq_id)
        return given.num_cached_tokens, tokens, torch.cat(outputs)

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """The draft model's outputs of all positions, without blocks."""
        hidden = self.target.dense(self.embedding[tokens[:-1]])
        return self.draft.dense(hidden + self.embedding[tokens[1:]].roll(1, 1))


@pytest.mark.parametrize("num_shared", [0, 1, B - 1, B, B + 1, 3 * B, 3 * B + 1])
def test_the_draft_models_outputs_are_those_without_sharing(num_shared):
    models = Drafting()
    first = torch.randint(VOCABULARY, (3 * B + 1,)).tolist()
    second = [*first[:num_shared], (first + [0])[num_shared] ^ 1, 5, 6]
    for seq_id, (prompt, least) in enumerate(
        [(first, 0), (second, min(max(num_shared - 1, 0), 3 * B)), (first, 3 * B)]
    ):
        num_cached, tokens, outputs = models.generate(seq_id, prompt, B + 1)
        assert num_cached >= least
        torch.testing.assert_close(outputs, models.expected(tokens)[-len(outputs) :], rtol=1e-4, atol=1e-5)
        plain = Drafting(enable_prefix_caching=False).generate(0, prompt, B + 1)
        assert plain[0] == 0 and plain[1] == tokens
        torch.testing.assert_close(outputs, plain[2][-len(outputs) :], rtol=1e-4, atol=1e-5)
