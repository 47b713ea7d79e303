"""StateConfig: checkpoints use at most their own bytes, however many working slots are idle."""

import pytest
from support.state_engines import ask, make_engine, random_prompt, states_for
from support.state_models import make_state_model

from kvpage.serving import StateConfig


def test_idle_working_slots_hold_no_checkpoints() -> None:
    model = make_state_model("lfm2")
    for num_kept in (0, 2):
        budget = states_for(make_engine(model), num_kept)
        engine = make_engine(model, max_num_seqs=8, states=budget)
        for seed in range(4):
            ask(engine, random_prompt(9, seed), 2)
        slots = engine.stats().blocks.slots
        assert (slots.num_slots, slots.num_checkpoints) == (8 + num_kept, num_kept)


@pytest.mark.parametrize("field", ["checkpoint_bytes", "host_checkpoint_bytes"])
def test_a_budget_of_less_than_a_slot_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be 0, or \d+ or more, a state and its tail, got 1$"):
        make_engine(make_state_model("lfm2"), states=StateConfig(**{field: 1}))
