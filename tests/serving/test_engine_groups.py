"""What engines over models with states promise, and those whose windows have blocks of their own: both are asked."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from support import state_engines, window_engines
from support.models import make_model
from support.state_engines import B, finished, greedy, own_beams, own_tokens, random_prompt
from support.state_loop import assert_near, own_logits
from support.state_models import make_state_model
from transformers import PreTrainedModel

from kvpage.serving import BeamSearchParams, Branches, Engine, PagedTokenTrie
from kvpage.serving.model.states.model_states import are_states_served

PROMPT = random_prompt(5 * B + 3)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model and the module of its engines. step: the tokens between two positions at which a prompt can go on."""

    name: str
    model: PreTrainedModel
    engines: ModuleType
    step: int
    fields: Mapping[str, object] = field(default_factory=dict)

    def make_engine(self, **fields: object) -> Engine:
        return self.engines.make_engine(self.model, **{**self.fields, **fields})

    def ask(self, engine: Engine, num_tokens: int, **arguments: object) -> int:
        """Require that the answer to PROMPT is right. Return how much of it was cached."""
        found, num_cached = self.engines.ask(engine, PROMPT, num_tokens, **arguments)
        assert found == own_tokens(self.model, PROMPT, num_tokens)
        return num_cached

    def reach(self, num_tokens: int) -> int:
        return num_tokens // self.step * self.step


@pytest.fixture(params=["jamba", "lfm2", "mamba2", "qwen3_next", "gemma3", "mistral", "recurrent_gemma"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param in ("gemma3", "mistral"):
        return Kind(request.param, make_model(request.param), window_engines, B)
    if request.param == "recurrent_gemma":  # states beside windows of their own blocks
        fields = {"num_window_blocks": 32}
        return Kind(request.param, make_state_model(request.param), state_engines, 1, fields)
    return Kind(request.param, make_state_model(request.param), state_engines, 1)


@pytest.mark.parametrize("num_batched_tokens", [7, 64])
def test_each_fork_goes_on_alone(kind: Kind, num_batched_tokens: int) -> None:
    engine = kind.make_engine(max_num_batched_tokens=num_batched_tokens)
    with Branches(engine) as branches:
        trunk = branches.start(PROMPT)
        branches.compute([trunk])
        first = len(PROMPT) if kind.step == 1 else len(PROMPT) // B * B  # windows: amid the last block; a state: never
        assert branches.first_forkable(trunk) == first
        with pytest.raises(ValueError, match=rf"num_tokens must be in \[{first}, {len(PROMPT)}\]"):
            branches.fork(trunk, first - 1)
        forks = [trunk, branches.fork(trunk), branches.fork(trunk)]
        for token, branch in enumerate(forks):
            branch.append([token + 5, token + 1])
        logits = branches.compute(forks)
        for row, branch in zip(logits, forks, strict=True):
            assert_near(row, own_logits(kind.model, branch.token_ids.tolist())[-1])
    kind.engines.check_nothing_held(engine)


@pytest.mark.parametrize("num_batched_tokens", [4, 64])
def test_beams_are_those_of_generate(kind: Kind, num_batched_tokens: int) -> None:
    if kind.name == "mamba2" and not are_states_served("5.13"):
        pytest.skip("before transformers 5.13 generate does not reorder the states of Mamba's beams")
    engine = kind.make_engine(max_num_batched_tokens=num_batched_tokens)
    params = BeamSearchParams(num_beams=3, num_return_sequences=3, max_tokens=6, ignore_eos=True)
    first, again = (engine.beam_search([PROMPT], params)[0] for _ in range(2))
    expected = own_beams(kind.model, PROMPT, 3, 6)
    assert [beam.token_ids for beam in first.beams] == [beam.token_ids for beam in again.beams] == expected
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, kind.reach(len(PROMPT) - 1))
    kind.engines.check_nothing_held(engine)


def test_log_probabilities_of_a_prompt(kind: Kind) -> None:
    engine = kind.make_engine(max_num_batched_tokens=5)
    expected = own_logits(kind.model, PROMPT).log_softmax(dim=-1)
    rows = [float(expected[at, token]) for at, token in enumerate(PROMPT[1:])]
    for _ in range(2):
        (output,) = engine.generate([PROMPT], greedy(2, prompt_logprobs=0))
        assert [one.logprob for one in output.prompt_logprobs[1:]] == pytest.approx(rows, abs=1e-4)
        assert output.samples[0].token_ids == own_tokens(kind.model, PROMPT, 2)
    kind.engines.check_nothing_held(engine)


def test_nothing_is_found_after_a_reset(kind: Kind) -> None:
    engine, most = kind.make_engine(), kind.reach(len(PROMPT) - 1)
    assert [kind.ask(engine, 2) for _ in range(2)] == [0, most]
    engine.reset_prefix_cache()
    kind.engines.poison(engine)
    assert all(stats.num_free_blocks == stats.num_blocks for stats in engine.stats().windows)
    assert [kind.ask(engine, 2) for _ in range(2)] == [0, most]


def test_a_reset_while_requests_run(kind: Kind) -> None:
    engine = kind.make_engine(max_num_batched_tokens=6)
    engine.add_request(PROMPT, greedy(6))
    for _ in range(5):
        engine.step()
    engine.reset_prefix_cache()
    kind.engines.poison(engine)
    (output,) = finished(engine)
    assert output.samples[0].token_ids == own_tokens(kind.model, PROMPT, 6)
    kind.engines.check_nothing_held(engine)


def test_namespaces_share_nothing(kind: Kind) -> None:
    engine = kind.make_engine()
    found = [kind.ask(engine, 2, namespace=name) for name in (b"a", b"b", b"a")]
    assert found == [0, 0, kind.reach(len(PROMPT) - 1)]


def test_aborted_requests_leave_what_is_exact(kind: Kind) -> None:
    engine = kind.make_engine(max_num_batched_tokens=6)
    request_id = engine.add_request(PROMPT, greedy(6))
    for _ in range(2):
        engine.step()
    engine.abort(request_id)
    kind.engines.poison(engine)
    kind.engines.check_nothing_held(engine)
    assert kind.ask(engine, 6) == kind.reach(12)  # what the two steps left


def own_logprobs(model: PreTrainedModel, token_lists: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        rows = [model(torch.tensor([tokens])).logits[0, -1] for tokens in token_lists]
    return torch.stack(rows).log_softmax(dim=-1)


@pytest.mark.parametrize("num_blocks", [16, 96])
def test_a_trie_of_log_probabilities(kind: Kind, num_blocks: int) -> None:
    """Lists part from each other amid blocks; branches end where blocks or slots are short."""
    rng, engine = random.Random(num_blocks), kind.make_engine(num_blocks=num_blocks)
    with PagedTokenTrie(engine, max_branches=5) as trie:
        lists = [PROMPT[: 2 * B + 1]]
        for _ in range(6):
            bases = [rng.choice(lists) for _ in range(3)]
            lists = [base[: rng.randint(1, len(base))] + random_prompt(rng.randint(1, B)) for base in bases]
            lists = [tokens[: 8 * B] for tokens in lists]
            found = trie.next_token_logprobs(lists)
            assert_near(found, own_logprobs(kind.model, lists))
            engine.manager.check()
    assert engine.manager.stats().num_sequences == 0
