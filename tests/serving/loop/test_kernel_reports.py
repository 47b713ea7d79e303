"""An id that kernels skip on a device ends the step that it was part of; see tests/ops/test_error_reports.py."""

import pytest
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Branches, Engine, EngineConfig, SamplingParams

B, NUM_TOKENS = 4, 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)
PROMPTS = make_prompts([B - 1, B, B + 1, 5 * B + 3], seed=7)


class PlayedReports:
    """The error word of a device whose kernels meet a bad id in one pass."""

    def __init__(self, bad_pass: int) -> None:
        self.num_fetched, self.bad_pass, self.is_due = 0, bad_pass, False

    def fetch(self) -> None:
        self.num_fetched += 1
        self.is_due = self.num_fetched == self.bad_pass

    def check(self) -> None:
        if self.is_due:
            self.is_due = False
            raise ValueError("block_tables held a block id out of range on cuda:0; it was skipped")

    def check_all(self) -> None:
        self.check()


@pytest.mark.parametrize("bad_pass", [1, 2, 4])
def test_a_bad_id_that_kernels_report_is_raised_by_its_step(bad_pass: int) -> None:
    """Nothing of that step is kept. It is computed once more, and the tokens are as without it."""
    engine = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(B, 64)))
    engine.debug.batch_runner._reports = PlayedReports(bad_pass)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, str(number))
    outputs = {}
    for number in range(1, 20):
        before = engine.stats().num_generated_tokens
        if number == bad_pass:
            with pytest.raises(ValueError, match="block_tables held a block id out of range"):
                engine.step()
            assert engine.stats().num_generated_tokens == before
            continue
        outputs |= {one.request_id: one.output for one in engine.step() if one.output}
    assert [outputs[str(one)].token_ids for one in range(len(PROMPTS))] == generate_each(
        make_model("llama"), PROMPTS, NUM_TOKENS
    )
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


def test_a_bad_id_in_a_pass_of_branches_is_raised_there() -> None:
    engine = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(B, 64)))
    with Branches(engine) as branches:
        first = branches.start(PROMPTS[3])
        engine.debug.batch_runner._reports = PlayedReports(1)
        with pytest.raises(ValueError, match="block_tables held a block id out of range"):
            branches.compute([first])
        assert first.num_computed == 0
        branches.compute([first])
        assert first.num_computed == len(PROMPTS[3])
    engine.manager.check()
