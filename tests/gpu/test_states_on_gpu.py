"""Models with states and with windows on a GPU: tokens and hits are those of the CPU, with each tier of checkpoints."""

import pytest
from support import state_engines, window_engines
from support.state_engines import random_prompt
from support.state_models import make_state_model

KINDS = ("lfm2", "mamba2", "jamba", "qwen3_next", "falcon_h1", "recurrent_gemma")
LENGTHS = (1, 4, 5, 33, 40)  # from the beginning of one prompt
ON_DEVICE = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])


def answers(module, engine) -> list[tuple[list[int], int]]:
    """Return tokens and cached tokens of prompts that begin alike, each asked twice."""
    prompts = [[*random_prompt(length), 7, length] for length in LENGTHS]
    return [module.ask(engine, prompt, 6, cache_at=[len(prompt) - 2]) for prompt in [*prompts, *prompts]]


@ON_DEVICE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_device", "num_host"), [(16, 0), (2, 16)])
def test_states(device, kind, num_device, num_host):
    found = []
    for where in ("cpu", device):
        engine = state_engines.make_engine(make_state_model(kind).to(where), num_host_blocks=64, max_num_seqs=2)
        states = state_engines.states_for(engine, num_device, num_host)
        engine = state_engines.make_engine(
            make_state_model(kind).to(where), num_host_blocks=64, max_num_seqs=2, states=states, load_or_compute=False
        )
        found.append(answers(state_engines, engine))
        state_engines.check_nothing_held(engine)
    assert found[0] == found[1]
    assert sum(num_cached for _, num_cached in found[1]) > sum(LENGTHS)


@ON_DEVICE
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "cohere2"])
def test_windows(device, kind):
    found = []
    for where in ("cpu", device):
        engine = window_engines.make_engine(window_engines.make_window_model(kind).to(where))
        prompts = [[*random_prompt(length), 7, length] for length in LENGTHS]
        found.append([window_engines.ask(engine, prompt, 6) for prompt in [*prompts, *prompts]])
        window_engines.check_nothing_held(engine)
    assert found[0] == found[1]
    assert sum(num_cached for _, num_cached in found[1]) > 0
