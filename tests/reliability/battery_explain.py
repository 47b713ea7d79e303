"""Random questions to `explain`, beside an oracle and the requests that follow them."""

from battery import Battery
from support.explain_life import run_lives

BATTERIES = [Battery("explained prompts", "questions", 1_000, 100_000, run_lives)]
