"""What explain tells is what the oracle computes anew, and what a request then finds, of random prompts."""

import pytest
from support.explain_life import WORLDS, ExplainLife
from support.seeds import replay, seed_of


@pytest.mark.parametrize("number", range(len(WORLDS)))
def test_a_life(number):
    print(replay())
    life = ExplainLife(seed_of(number), **WORLDS[number])
    try:
        life.live(60)
    finally:
        life.close()
    assert len(life.figures) >= 3, life.figures


def test_requests_know_nothing_unless_they_are_asked_to():
    life = ExplainLife(0, num_blocks=16, explains_requests=False)
    [output] = life.engine.generate([[1, 2, 3]])
    assert output.explanation is None
    life.close()
