"""What `kvpage bench blend` measures with: its documents, its blending, its count of the arithmetic."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from kvpage.benchmarks import blend_methods, blend_model, blend_quality, blend_speed
from kvpage.benchmarks import blend_task as task
from kvpage.benchmarks.blend_quality import Method
from kvpage.blend import select_tokens

SEGMENT = 8
CONFIG = blend_model.TrainingConfig(num_layers=3, hidden_size=32, num_heads=2, num_tokens=32)


def naive_owners(tokens: list[int]) -> tuple[list[int], list[int]]:
    """By reading the document from its begin."""
    last_of_kind = [-1, -1]
    owner, named_at, owners, places = task.NOBODY, -1, [], []
    for place, token in enumerate(tokens):
        if token in (task.HE, task.SHE):
            named_at = last_of_kind[token - task.HE]
        elif token < task.FIRST_FACT:
            last_of_kind[(token - task.FIRST_NAME) // task.NUM_NAMES] = named_at = place
        owner = task.NOBODY if named_at < 0 else tokens[named_at]
        owners.append(owner)
        places.append(named_at)
    return owners, places


def test_owners_are_those_that_reading_gives() -> None:
    documents = task.write_documents(40, 50, seed=1)
    columns = (rows.tolist() for rows in (documents.tokens, documents.owners, documents.named_at))
    for tokens, owners, places in zip(*columns, strict=True):
        assert (owners, places) == naive_owners(tokens)
        facts = [token for token in tokens if token >= task.FIRST_FACT]
        assert len(facts) == len(set(facts)) and max(facts) < task.VOCAB_SIZE


def test_cross_facts_are_named_before_their_segment() -> None:
    documents = task.write_documents(40, 50, seed=2)
    is_cross = documents.is_cross(SEGMENT)
    assert is_cross.any()
    for row, tokens in enumerate(documents.tokens.tolist()):
        _, places = naive_owners(tokens)
        for place, token in enumerate(tokens):
            expected = token >= task.FIRST_FACT and 0 <= places[place] < place // SEGMENT * SEGMENT
            assert bool(is_cross[row, place]) == expected


def test_a_document_longer_than_there_are_facts_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {task.NUM_FACTS}"):
        task.write_documents(1, task.NUM_FACTS + 1, seed=0)


@pytest.fixture(scope="module")
def batch() -> blend_quality.Batch:
    model, attention = blend_model.build(CONFIG)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(80)  # answers depend on what is attended to
    documents = task.write_documents(3, CONFIG.num_tokens, seed=3)
    return blend_quality.Batch(model.eval(), attention, documents, SEGMENT, 4)


def test_segments_are_turned_to_where_they_stand(batch: blend_quality.Batch) -> None:
    """Layer 0's K depends on nothing but token and position; the first segment has nothing before it in any layer."""
    fresh = []
    batch.run(lambda layer, q, k, v: (fresh.append((k, v)), (k, v))[1])
    for part in (0, 1):
        torch.testing.assert_close(batch.retrieved[0][part], fresh[0][part][:, :, : CONFIG.num_tokens])
        for now, before in zip(fresh, batch.retrieved, strict=True):
            torch.testing.assert_close(before[part][:, :, :SEGMENT], now[part][:, :, :SEGMENT])
    assert float((batch.retrieved[2][1] - fresh[2][1][:, :, : CONFIG.num_tokens]).abs().max()) > 1e-2


@pytest.mark.parametrize("name", blend_methods.METHODS)
def test_ratio_1_is_a_full_recompute(batch: blend_quality.Batch, name: str) -> None:
    found = blend_quality.answers([batch], Method(name, ((1, 1.0),)))
    assert found.agrees.all() and found.share_computed == found.share_found == 1


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.15, 0.5, 1.0])
def test_rows_are_those_that_the_library_chooses(ratio: float) -> None:
    score = torch.rand(4, 20, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    chosen = blend_methods.largest(score, ratio, torch.ones(4, 20, dtype=torch.bool))
    for row, mine in zip(score, chosen, strict=True):
        always = torch.cat([row, torch.zeros(1)])  # the library always takes the last row: a question's
        valid = torch.arange(21) < 20
        theirs = select_tokens(always, valid, [0, 21], [ratio]).indices.tolist()
        assert mine.nonzero().flatten().tolist() == theirs[:-1]


def test_stages_choose_among_what_is_left(batch: blend_quality.Batch) -> None:
    blending = batch.blending(Method("v", ((0, 0.5), (1, 0.25))))
    seen = []
    batch.run(lambda *layer: (blending(*layer), seen.append(blending.chosen))[0])
    assert [int(chosen.sum()) for chosen in seen] == [3 * 16, 3 * 8, 3 * 8]
    assert not (seen[1] & ~seen[0]).any()
    let_go = blend_methods.KV_SHARE * (16 + 8)  # K and V of what the first two layers let go
    assert blending.num_computed == pytest.approx(3 * (16 + 8 + 8 + let_go))


def test_rows_that_were_not_chosen_are_the_segments(batch: blend_quality.Batch) -> None:
    blending = batch.blending(Method("random", ((0, 0.25),)))
    used = []
    batch.run(lambda *layer: (used.append(blending(*layer)), used[-1])[1])
    kept = ~blending.chosen
    for part in (0, 1):
        now, before = used[2][part][:, :, : CONFIG.num_tokens], batch.retrieved[2][part]
        same = (now == before).all(dim=3).all(dim=1)
        assert same[kept].all() and not same[blending.chosen][SEGMENT:].all()


def test_intervals_hold_the_mean() -> None:
    right = torch.rand(50, 8, generator=torch.Generator().manual_seed(0)) < 0.7
    counted = torch.ones(50, 8, dtype=torch.bool)
    counted[:, 6:] = False
    found = blend_quality.estimate(right, counted)
    assert found.mean == pytest.approx(float(right[:, :6].float().mean())) and found.low < found.mean < found.high
    assert blend_quality.difference(right, right, counted) == (0, 0, 0)


def test_flops_of_everything_chosen_are_those_of_a_full_recompute() -> None:
    shape = blend_speed.SMALL
    full = blend_speed.full_flops(shape, 0, 2048)
    assert blend_speed.blend_flops(shape, 0, 2048, 1, 2048) == pytest.approx(full)
    rest = 2 * (4 * 768**2 + 3 * 768 * 2048) * 2048 * 16  # weights, then Q K and P V over half of the keys
    assert full == pytest.approx(rest + 4 * 768 * 2048**2 / 2 * 16)
    assert blend_speed.blend_flops(shape, 0, 2048, 1, 307) < full / 4
    assert blend_speed.blend_flops(shape, 0, 2048, None, 2048) == pytest.approx(full)
    assert blend_speed.blend_flops(shape, 0, 2048, None, 256) == pytest.approx(full / 8)


@pytest.mark.parametrize("check_layer", [None, 1])
def test_prompts_are_timed_through_the_engine(check_layer: int | None) -> None:
    shape = blend_speed.Shape(3, 32, 64, 2, 2)
    rows = blend_speed.measure(shape, 64, [0.25, 1.0], check_layer, 1, "cpu", 16)
    found = {(row["method"], row["ratio"]): row for row in rows}
    assert list(found) == [("full", None), ("prefix", None), ("blend", 0.25), ("blend", 1.0)]
    # Of the three segments behind the first.
    assert [row["num_recomputed"] for row in rows] == [0, 0, 12, 48]
    total = 64 + blend_speed.QUESTION_TOKENS
    assert {row["num_tokens"] for row in rows} == {total}
    assert found["full", None]["flops"] == blend_speed.full_flops(shape, 0, total)
    assert found["blend", 1.0]["flops"] == pytest.approx(found["prefix", None]["flops"])
    assert all(row["seconds"].median > 0 for row in rows)


def test_warming_is_timed_through_the_engine() -> None:
    found = blend_speed.warming(blend_speed.Shape(3, 32, 64, 2, 2), 16, 1, "cpu")
    assert found["alone"].median > 0 and found["measured"].median > 0


def test_probes_know_nothing_of_the_document() -> None:
    """Each document has tokens of its own."""
    segments = torch.arange(3 * 2 * 4).view(3, 2, 4) + 1000 * torch.arange(3).view(3, 1, 1)
    found = dict(blend_methods.probes(segments))
    assert {name for name, _ in blend_methods.probes(segments)} == set(found)
    for name, tokens in found.items():
        assert tokens.shape[:2] == (3, 2)
        for document in range(3):
            for place in range(2):
                mine, own = set(tokens[document, place].tolist()), set(segments[document, place].tolist())
                if name == "random tokens":
                    assert max(mine) < task.VOCAB_SIZE
                elif "stranger" in name:
                    assert not mine & set(segments[document].flatten().tolist()) and mine <= set(
                        segments.flatten().tolist()
                    )
                else:
                    assert mine <= own
        assert torch.equal(tokens, dict(blend_methods.probes(segments))[name])


def test_sensitivity_is_how_far_v_is_behind_the_probe(batch: blend_quality.Batch) -> None:
    tokens = batch.ids[:, : CONFIG.num_tokens]
    segments = tokens.unflatten(1, (-1, SEGMENT))
    for name, probe in blend_methods.probes(segments):
        found = batch.truth.sensitivity[name]
        assert not found[:, :SEGMENT].any() and (found[:, SEGMENT] > 0).all()
        for document, place in ((0, 1), (2, 3)):
            rows = []
            batch._attention.mask, batch._attention.swap = None, lambda _, q, k, v: (rows.append(v[0]), (k, v))[1]  # noqa: B023
            for part in (segments[document, place], torch.cat([probe[document, place], segments[document, place]])):
                batch._model(input_ids=part[None], use_cache=False)
            batch._attention.swap = None
            pairs = [(rows[index], rows[index + 3][:, -SEGMENT:]) for index in range(3)]
            each = [(b - a).square().mean((0, 2)) / a.square().mean() for a, b in pairs]
            mine = found[document, place * SEGMENT : (place + 1) * SEGMENT]
            torch.testing.assert_close(mine, torch.stack(each).mean(0), rtol=1e-3, atol=1e-7)


def test_a_trained_model_is_kept_and_found_again(tmp_path, monkeypatch) -> None:
    config = blend_model.TrainingConfig(num_steps=3, batch_tokens=64, num_layers=3, hidden_size=32, num_heads=2)
    trained, _ = blend_model.load_or_train(config, tmp_path)
    untrained, _ = blend_model.build(config)
    monkeypatch.setattr(blend_model, "train", None)
    found, _ = blend_model.load_or_train(config, tmp_path)
    assert not found.training and len(list(tmp_path.iterdir())) == 1
    names = dict(trained.named_parameters())
    assert all(torch.equal(parameter, names[name]) for name, parameter in found.named_parameters())
    assert not torch.equal(found.lm_head.weight, untrained.lm_head.weight)
    with pytest.raises(TypeError):  # another seed is another model, to be trained
        blend_model.load_or_train(
            blend_model.TrainingConfig(seed=1, num_layers=3, hidden_size=32, num_heads=2), tmp_path
        )


@pytest.mark.parametrize("stages", [((1, 0.4), (2, 0.1)), ((1, 0.3), (3, 0.2), (5, 0.15))])
def test_equal_ratios_take_equal_work(stages: tuple[tuple[int, float], ...]) -> None:
    """Layer by layer, for 1000 rows of 6 layers."""

    def work(stages: tuple[tuple[int, float], ...]) -> float:
        total, rows, shares = 0.0, 1000.0, dict(stages)
        for layer in range(6):
            left = 1000 * shares[layer] if layer in shares else rows
            total, rows = total + left + blend_methods.KV_SHARE * (rows - left), left
        return total

    ratio = blend_quality.equal_ratio(stages, 6)
    assert stages[-1][1] < ratio < stages[0][1]
    assert work(((1, ratio),)) == pytest.approx(work(stages), rel=1e-2)


def test_following_finds_rows_that_attend_to_changed_ones() -> None:
    """Of two segments of three rows, V of one's first row has changed, and its last row attended to that."""
    fresh, old = (torch.ones(1, 2, 6, 4) for _ in range(2))
    fresh[:, :, 3] = 3.0
    within = torch.eye(3).repeat(1, 2, 1, 1)
    within[0, 1, 2] = torch.tensor([1.0, 0.0, 0.0])
    truth = blend_methods.Truth(torch.zeros(1, 6), torch.zeros(1, 6, dtype=torch.bool), torch.arange(6) % 3, {})
    layer = blend_methods.Layer(0, torch.zeros(1, 2, 6, 4), (fresh, fresh), (old, old), [within] * 2)
    score = blend_methods.followed(layer, truth)
    assert (score > 0).tolist() == [[False, False, False, True, False, True]]
    assert (blend_methods.at_seams(layer, truth) > 0).tolist() == [[False, False, False, True, False, False]]


@pytest.mark.parametrize("name", blend_quality.ENGINES)
def test_the_engine_answers_as_the_reference_does(batch: blend_quality.Batch, name: str) -> None:
    """9 rows are computed again: of the 24 that the engine finds no prefix for, and of 32."""
    found = blend_quality.engine_agreement(batch, SEGMENT, 0.375, name)
    assert found.equal == 1 and found.right == found.right_here
    blended = batch.run(batch.blending(Method(name, ((blend_quality.ENGINES[name][0], 0.28125),))))
    nothing = batch.run(batch.blending(Method("v", ((1, 0.0),))))
    assert not torch.equal(nothing, blended) and not torch.equal(batch.full, blended)
