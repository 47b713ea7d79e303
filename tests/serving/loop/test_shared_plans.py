"""Plans of shared prefixes in an engine: which keys decodes read once, in captured steps and in others."""

import numpy as np
import pytest
import torch
from support.fake_device import Capturer, FakeDevice, move
from support.models import make_model

from kvpage import CacheConfig, ops
from kvpage.blocks.rows import StepInputs
from kvpage.layout.shared_prefixes import PlanRow
from kvpage.ops.shared_prefixes import LEAST_SAVED
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.graphs.decode_inputs import DecodeInputs
from kvpage.serving.loop.graphs.kept_plan import KeptPlan
from kvpage.serving.loop.graphs.static_inputs import StaticInputs
from kvpage.serving.loop.ranks.rank_caches import RankCaches


def inputs_of(lengths, num_same, first_block=100):
    """Sequences that begin with the same blocks of 16 tokens."""
    width = -(-max(lengths) // 16)
    tables = first_block + np.arange(len(lengths) * width, dtype=np.int32).reshape(-1, width)
    tables[:, : num_same // 16] = tables[0, : num_same // 16]
    return StepInputs(np.zeros(len(lengths), np.int64), tables, np.array(lengths, np.int64))


def made(kept, inputs, rows, num_rows=4):
    plan = np.full((len(PlanRow), num_rows), 77, np.int64)
    kept.write(plan, inputs, None if rows is None else np.array(rows))
    return plan


def test_a_plan_is_kept_while_the_same_sequences_decode():
    kept, rows = KeptPlan(16), [3, 9, 4]
    plan = made(kept, inputs_of([1100] * 3, 1040), rows)
    assert plan[PlanRow.OWN_BEGIN].tolist() == [1024] * 3 + [0] and kept.num_made == 1
    grown = inputs_of([1100] * 3, 1040)._replace(seq_lens=np.array([1101] * 3))
    assert (made(kept, grown, rows) == plan).all() and kept.num_made == 1
    for change in ({"rows": [3, 9, 5]}, {"rows": [3, 9, 4], "num_rows": 6}, {"rows": None}):
        num_before = kept.num_made
        made(kept, grown, **change)
        assert kept.num_made == num_before + 1, change


def test_a_plan_goes_with_the_blocks_that_its_groups_read():
    kept, rows = KeptPlan(16), [3, 9, 4]
    inputs = inputs_of([1100] * 3, 1040)
    plan = made(kept, inputs, rows)
    inputs.block_tables[:, 1024 // 16 :] += 1
    made(kept, inputs, rows)
    assert kept.num_made == 1
    inputs.block_tables[plan[PlanRow.ORDER, 0], 5] += 1
    assert made(kept, inputs, rows)[PlanRow.OWN_BEGIN].max() == 0 and kept.num_made == 2


@pytest.mark.parametrize("num_windows", [0, 1])
def test_plans_come_with_the_other_inputs(num_windows):
    """In the rows of a captured step; padding, and sequences that share nothing, are in no group."""
    static = StaticInputs(6, 80, torch.device("cpu"), num_groups=1 + num_windows, block_size=16)
    views = static.views(4)
    nothing = [[0] * 4, [-1] * 4, [-1] * 4]
    assert all(plan[:3].tolist() == nothing for plan in views.plans)
    full, other = inputs_of([1100] * 3, 1040), inputs_of([1100] * 3, 0)
    static.fill(4, DecodeInputs(full, [other] * num_windows), np.zeros(3, np.int32))
    assert views.plans[0, PlanRow.OWN_BEGIN].tolist() == [1024] * 3 + [0]
    assert views.plans[0, PlanRow.OUTER_GROUP].tolist() == [0, 0, 0, -1]
    assert all(plan[:3].tolist() == nothing for plan in views.plans[1:])
    static.clear()
    assert all(plan[:3].tolist() == nothing for plan in views.plans)


@pytest.fixture
def plans(monkeypatch):
    """The plan of each step that is made, None among them."""
    found, make = [], ops.Sequences.of_step

    def keep(*args, **options):
        found.append(options.get("shared"))
        return make(*args, **options)

    monkeypatch.setattr(ops.Sequences, "of_step", keep)
    return found


def sampling_engine(device, patch, captures, runs_ahead=False):
    """An engine on a fake device, with two samples of one prompt that is worth a group, and a request of its own."""
    model = make_model("llama", max_position_embeddings=4096)
    config = EngineConfig(CacheConfig(16, 400), max_num_seqs=6, native_layers=False, max_num_batched_tokens=4096)
    engine = Engine.from_model(model, config)
    prompt = np.random.default_rng(0).integers(1, 90, LEAST_SAVED + 100).tolist()
    engine.add_request(prompt, SamplingParams(max_tokens=20, n=2))
    engine.add_request([7, 8, 9], SamplingParams(max_tokens=20))
    engine.step()
    move(engine, device, patch, runs_ahead)
    if captures:
        engine.debug.use_graphs(Capturer(device))
        with device:
            engine.debug.batch_runner.graphs.capture()
        assert engine.stats().graphs.sizes == (1, 2, 4, 6), engine.stats().graphs
    return engine


def test_samples_of_a_prompt_share_it_in_a_step_of_its_own(monkeypatch, plans):
    device = FakeDevice()
    engine = sampling_engine(device, monkeypatch, captures=False)
    plans.clear()
    with device:
        engine.step()
    (plan,) = plans
    assert sorted(plan[PlanRow.OWN_BEGIN].tolist()) == [0, LEAST_SAVED, LEAST_SAVED]
    assert device.num_uploads == 1


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_samples_of_a_prompt_share_it_in_a_captured_step(monkeypatch, plans, runs_ahead):
    """The plan comes with the upload that there is, into the memory that the captured step reads."""
    device = FakeDevice()
    engine = sampling_engine(device, monkeypatch, True, runs_ahead)
    with device:
        for _ in range(4):
            device.clear()
            engine.step()
    (plan,) = (plan for plan in plans if plan is not None and plan.shape[1] == 4)
    assert sorted(plan[PlanRow.OWN_BEGIN].tolist()) == [0, 0, LEAST_SAVED, LEAST_SAVED]
    assert device.num_uploads == 1


def test_a_graph_for_a_cpu_or_a_library_has_no_plan(monkeypatch):
    device = FakeDevice()
    engine = sampling_engine(device, monkeypatch, captures=False)
    caches = RankCaches(engine.cache)
    assert caches.take_plans
    for cache in caches.full.bound_caches:
        monkeypatch.setattr(cache, "library", object())
    assert not caches.take_plans
