"""The executor against a plain loop over requests and rows, and its selection against every documented rule."""

import random

import pytest
import torch

from kvpage.blend import RotaryTables, create_index, indices_to_mask, mask_to_indices, select_tokens, token_deviation
from kvpage.blend.selection import offsets_after_seams
from kvpage.integrations.lmcache import CacheBlendImpl

HEADS, SIZE = 2, 8
HIDDEN = HEADS * SIZE
ROTARY = RotaryTables.of_frequencies(10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE), SIZE)


# --- indices ---------------------------------------------------------------------------------------------------------


def test_indices_and_masks() -> None:
    tensor = torch.arange(24).view(2, 3, 4)
    assert torch.equal(tensor[create_index(3, 1, [0, 2])], tensor[:, [0, 2]])
    assert torch.equal(tensor[create_index(3, -1, slice(1, 3))], tensor[..., 1:3])
    for dim in (3, -4):
        with pytest.raises(ValueError, match=r"dim must be in \[-3, 3\)"):
            create_index(3, dim, 0)
    assert indices_to_mask(torch.tensor([3, 1]), 5).tolist() == [False, True, False, True, False]
    assert indices_to_mask(torch.tensor([], dtype=torch.int32), 2).tolist() == [False, False]
    for wrong in ([5], [-1]):
        with pytest.raises(ValueError, match=r"indices must be in \[0, 5\)"):
            indices_to_mask(torch.tensor(wrong), 5)
    for dtype in (torch.bool, torch.int64, torch.uint8):
        assert mask_to_indices(torch.tensor([0, 1, 0, 1]).to(dtype)).tolist() == [1, 3]
    assert mask_to_indices(torch.zeros(0, dtype=torch.bool)).tolist() == []
    for wrong in (torch.ones(2, 2, dtype=torch.bool), torch.ones(2)):
        with pytest.raises(ValueError, match="a mask must be"):
            mask_to_indices(wrong)


# --- selection -------------------------------------------------------------------------------------------------------


def naive_selection(deviation: list[float], valid: list[bool], bounds: list[int], ratio: float) -> list[list[int]]:
    each = []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        rows = [row for row in range(begin, end) if valid[row]]
        count = 0 if ratio == 0 else min(len(rows), max(1, int(len(rows) * ratio)))
        best = sorted(rows, key=lambda row: (-deviation[row], row))[:count]
        always = [row for row in range(begin, end) if not valid[row]] + ([end - 1] if end > begin else [])
        each.append(sorted({*best, *always}))
    return each


@pytest.mark.parametrize("ratio", [0, 0.05, 0.15, 0.5, 1, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_selection_is_that_of_a_loop(ratio: float, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, 7, 30]) for _ in range(rng.randint(1, 4))]
    bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    valid = [rng.random() < rng.choice([0, 0.5, 1]) for _ in range(bounds[-1])]
    deviation = [rng.choice([0.0, 0.5, 0.5, 1.0, 2.0]) for _ in valid]  # with ties
    selection = select_tokens(
        torch.tensor(deviation), torch.tensor(valid, dtype=torch.bool), bounds, [ratio] * len(lengths)
    )
    expected = naive_selection(deviation, valid, bounds, ratio)
    assert selection.indices.tolist() == [row for rows in expected for row in rows]
    ends = [sum(map(len, expected[:index])) for index in range(len(lengths) + 1)]
    assert selection.query_start_loc.tolist() == ends
    assert selection.num_tokens == bounds[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("token_dim", [0, 1])
def test_deviation_neither_overflows_nor_sees_invalid_rows(token_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fresh, retrieved = (torch.randn(6, 16).to(dtype) for _ in range(2))
    fresh[1], retrieved[1] = 60000.0 if dtype == torch.float16 else 1e5, -3e4
    valid = torch.tensor([True, True, False, True, False, True])
    retrieved[2] = float("nan")
    retrieved[4] = float("inf")
    expected = [
        sum((a - b) ** 2 for a, b in zip(fresh[row].tolist(), retrieved[row].tolist(), strict=True)) / 16
        if valid[row] else 0.0
        for row in range(6)
    ]  # fmt: skip
    if token_dim == 1:
        fresh, retrieved = fresh.t(), retrieved.t()
    found = token_deviation(fresh, retrieved, valid, token_dim)
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)


# --- rotary ----------------------------------------------------------------------------------------------------------


def naive_rotation(k: torch.Tensor, angles: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Pair by pair in fp64. k: [tokens, heads, size]; angles: [tokens, pairs]."""
    out = k.double().clone()
    half = tables.rotary_size // 2
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if tables.is_interleaved else (pair, pair + half)
        i, j = i + tables.offset, j + tables.offset
        cos, sin = angles[:, pair].cos()[:, None], angles[:, pair].sin()[:, None]
        out[..., i], out[..., j] = (
            k[..., i].double() * cos - k[..., j].double() * sin,
            k[..., j].double() * cos + k[..., i].double() * sin,
        )
    return out


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("size, rotary_size, offset", [(8, 8, 0), (8, 4, 0), (12, 6, 4), (46, 46, 0)])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_rotations_add_up(size: int, rotary_size: int, offset: int, is_interleaved: bool, scaling: float) -> None:
    torch.manual_seed(0)
    frequencies = 100.0 ** -(torch.arange(0, rotary_size, 2) / rotary_size)
    plain = RotaryTables.of_frequencies(frequencies, size, scaling, is_interleaved=is_interleaved)
    tables = RotaryTables(plain.cos_sin, size, rotary_size, is_interleaved, scaling, offset)
    old, new = torch.tensor([0, 5, 9, 100, 7]), torch.tensor([3, 5, 2, 101, 0])
    k = torch.randn(5, HEADS, size)
    expected = naive_rotation(k, (new - old)[:, None].double() * frequencies.double(), tables)
    before = k.clone()
    for shaped, token_dim in ((k, 0), (k.flatten(1), 0), (k.transpose(0, 1), 1), (k.flatten(1).t(), 1)):
        rotated = tables.rotate(shaped, old, new, token_dim)
        rows = rotated.movedim(token_dim, 0).reshape(5, HEADS, size)
        torch.testing.assert_close(rows.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(k, before)
    assert torch.equal(tables.rotate(k, old, old)[..., :offset], k[..., :offset])


def test_far_positions_cost_no_precision() -> None:
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    tables = RotaryTables.of_frequencies(frequencies, 64)
    raw = torch.randn(1, 1, 64)
    at = [tables.rotate(raw, torch.tensor([0]), torch.tensor([position])) for position in (100, 100_100)]
    rotated = tables.rotate(at[0], torch.tensor([100]), torch.tensor([100_100]))
    assert (rotated - at[1]).norm() / at[1].norm() < 1e-6


def test_bad_tables_and_keys() -> None:
    cos_sin = ROTARY.cos_sin
    for fields, message in (
        ({"rotary_size": 3}, "even and positive"),
        ({"rotary_size": 0}, "even and positive"),
        ({"rotary_size": 8, "offset": 1}, "must fit into head_size=8"),
        ({"rotary_size": 8, "scaling": 0.0}, "scaling must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            RotaryTables(cos_sin, 8, **fields)
    at = torch.zeros(3, dtype=torch.int64)
    for k in (torch.zeros(3, 12), torch.zeros(3, 2, 4), torch.zeros(24)):
        with pytest.raises(ValueError, match="whole heads of 8"):
            ROTARY.rotate(k, at, at)
    with pytest.raises(ValueError, match="must be of 3 tokens, got 2 and 3"):
        ROTARY.rotate(torch.zeros(3, 16), at[:2], at)


# --- blend -----------------------------------------------------------------------------------------------------------


class Forward:
    """Three layers of random K and V: fresh ones, and retrieved ones of which some rows are stale, some invalid."""

    def __init__(self, seed: int, lengths: list[int], dtype: torch.dtype = torch.float32, token_dim: int = 0) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.token_dim = token_dim
        self.bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        count = self.bounds[-1]
        self.valid = torch.tensor([rng.random() < 0.8 for _ in range(count)], dtype=torch.bool)
        self.positions = torch.cat([torch.arange(length) + rng.randrange(50) for length in lengths]).long()
        self.original = torch.randint(0, 50, (count,)) * self.valid
        self.fresh = [[torch.randn(count, HIDDEN).to(dtype) for _ in "qkv"] for _ in range(4)]
        self.retrieved = []
        for _, k, v in self.fresh:
            old = ROTARY.rotate(k, self.positions, self.original)
            noise = torch.randn(2, count, HIDDEN).to(dtype) * (torch.rand(count) < 0.3)[:, None]
            pair = [old + noise[0], v + noise[1]]
            for part in pair:
                part[~self.valid] = float("nan")
            self.retrieved.append(pair)

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t().contiguous() if self.token_dim else tensor

    def blend(self, executor: CacheBlendImpl, layer: int, rows: torch.Tensor, mask: torch.Tensor | None = None):
        fresh = [self.shaped(part[rows]) for part in self.fresh[layer]]
        return executor.blend(
            layer, *map(self.shaped, self.retrieved[layer]), self.valid if mask is None else mask, self.original,
            *fresh, self.positions[rows], torch.tensor(self.bounds), self.token_dim,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_offsets_are_those_of_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, 7, 30]) for _ in range(rng.randint(1, 4))] + [0] * (seed % 2)
    bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    valid = [rng.random() < 0.9 for _ in range(bounds[-1])]
    positions = list(range(5, 5 + bounds[-1]))
    original, at = [], 0
    for _ in positions:
        at = rng.randrange(50) if rng.random() < 0.2 else at + 1
        original.append(at)
    expected = []
    for row, position in enumerate(positions):
        goes_on = row not in bounds and valid[row] and valid[row - 1] and original[row] == original[row - 1] + 1
        expected.append(expected[-1] + 1 if goes_on else 0)
        assert position == row + 5
    tensors = torch.tensor(valid, dtype=torch.bool), torch.tensor(original).long(), torch.tensor(positions).long()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        assert offsets_after_seams(*tensors, torch.tensor(bounds, dtype=dtype)).tolist() == expected


def test_rows_behind_a_seam_count_for_more() -> None:
    """Two segments of five tokens; V of all rows is off by the same, or in the last row of each by twice that."""
    fresh = torch.zeros(11, HIDDEN)
    old = torch.ones(11, HIDDEN)
    old[[4, 9]] = 2.0
    valid = torch.arange(11) < 10
    original, positions = torch.tensor([*range(5), *range(20, 25), 0]), torch.arange(11)
    found = {}
    for seam in (0.0, 1.0, 4.0):
        executor = CacheBlendImpl(0.2, 1, "v", ROTARY, seam=seam)
        for layer in range(2):
            output = executor.blend(
                layer, fresh, old, valid, original, fresh, fresh, fresh, positions, torch.tensor([0, 11])
            )
        found[seam] = output.local_indices.tolist()
        offsets = torch.tensor([*range(5), *range(5), 0])
        weights = (1 + seam / (1 + offsets)) ** 2 * valid
        torch.testing.assert_close(executor.selection.deviation, old[:, 0] ** 2 * weights)
    assert found == {0.0: [4, 9, 10], 1.0: [4, 9, 10], 4.0: [0, 5, 10]}


STAGES = [(1, ()), (2, ()), (2, ((1, 0.6),)), (3, ((1, 0.7), (2, 0.5)))]
"""The layer that is checked, and the filters before it."""


@pytest.mark.parametrize("metric", ["k", "v", "kv"])
@pytest.mark.parametrize("token_dim", [0, 1])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("stages", STAGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blending_is_that_of_a_loop(ratio: float, token_dim: int, metric: str, stages: tuple, dtype) -> None:
    """A loop over requests and rows: each filter, and then the check layer, ranks the valid rows that are left."""
    forward, (check_layer, filters) = Forward(5, [11, 1, 20], dtype, token_dim), stages
    executor = CacheBlendImpl(ratio, check_layer, metric, ROTARY, filters, seam=0.0)
    shares = {layer: max(share, ratio) for layer, share in filters} | {check_layer: ratio}
    rows, before = list(range(forward.bounds[-1])), [part.clone() for layer in forward.retrieved for part in layer]
    for layer in range(4):
        output = forward.blend(executor, layer, torch.tensor(rows))
        k = ROTARY.rotate(forward.retrieved[layer][0], forward.original, forward.positions)
        v, fresh = forward.retrieved[layer][1].clone(), forward.fresh[layer]
        chosen = rows
        if layer in shares:
            parts = [(fresh[1], k)] * ("k" in metric) + [(fresh[2], v)] * ("v" in metric)
            deviation = sum((new.float() - old.float()).square().mean(1) for new, old in parts)
            chosen = chosen_rows(forward, deviation, rows, shares[layer])
            assert executor.selection.indices.tolist() == chosen
            assert output.query_start_loc.tolist() == [sum(row < bound for row in chosen) for bound in forward.bounds]
        else:
            assert output.query_start_loc is None
        assert output.local_indices.tolist() == [rows.index(row) for row in chosen]
        assert torch.equal(output.q, forward.shaped(fresh[0][chosen]))
        assert torch.equal(output.positions, forward.positions[chosen])
        if min(shares) <= layer:
            k[rows], v[rows] = fresh[1][rows], fresh[2][rows]
        else:
            k, v = fresh[1:]
        assert torch.equal(output.k, forward.shaped(k)) and torch.equal(output.v, forward.shaped(v))
        assert not output.k.isnan().any() and not output.v.isnan().any(), "an invalid row was not computed"
        rows = chosen
    after = [part for layer in forward.retrieved for part in layer]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))


def chosen_rows(forward: Forward, deviation: torch.Tensor, rows: list[int], share: float) -> list[int]:
    """Return the rows of all requests that are computed on: the worst of the valid ones, and all that are not valid."""
    chosen = []
    for begin, end in zip(forward.bounds[:-1], forward.bounds[1:], strict=True):
        valid = [row for row in range(begin, end) if forward.valid[row]]
        ranked = sorted((row for row in valid if row in rows), key=lambda row: (-float(deviation[row]), row))
        count = max(1, int(len(valid) * share)) if share else 0
        always = {*range(begin, end)} - {*valid} | {end - 1}
        chosen += sorted({*ranked[:count], *always})
    return chosen


def test_a_ratio_for_each_request() -> None:
    forward = Forward(6, [10, 10])
    forward.valid[:] = True
    executor = CacheBlendImpl([0.0, 1.0], rotary=ROTARY)
    rows = torch.arange(20)
    for layer in range(2):
        output = forward.blend(executor, layer, rows)
    assert output.local_indices.tolist() == [9, *range(10, 20)]
    with pytest.raises(ValueError, match="got 3 for 2"):
        executor = CacheBlendImpl([0.0, 1.0, 0.5], rotary=ROTARY)
        for layer in range(2):
            forward.blend(executor, layer, rows)


def test_layer_zero_begins_anew_and_other_layers_need_the_one_before() -> None:
    executor = CacheBlendImpl(0.2, rotary=ROTARY)
    chosen = []
    for seed in (8, 9):
        forward = Forward(seed, [15])
        for layer in range(2):
            output = forward.blend(executor, layer, torch.arange(15))
        forward.blend(executor, 2, output.local_indices)
        chosen.append(output.local_indices.tolist())
    fresh = CacheBlendImpl(0.2, rotary=ROTARY)
    for layer in range(2):
        output = forward.blend(fresh, layer, torch.arange(15))
    assert chosen[1] == output.local_indices.tolist() != chosen[0]
    for layer in (0, 1):
        with pytest.raises(ValueError, match=r"layer_id must be 0, or 0"):
            forward.blend(CacheBlendImpl(0.2, rotary=ROTARY), layer + 1, torch.arange(15))
    with pytest.raises(ValueError, match="layer_id must be 2"):
        forward.blend(fresh, 1, torch.arange(15))


def test_encoders_do_what_tables_do() -> None:
    forward = Forward(10, [15])
    forward.valid[:] = True
    for k, v in forward.retrieved:
        k.nan_to_num_(), v.nan_to_num_()
    executors = [CacheBlendImpl(0.4, metric="kv", rotary=ROTARY), CacheBlendImpl(0.4, metric="kv")]
    zero = torch.zeros_like
    executors[1].set_positional_encoder(lambda p, q, k: (q, ROTARY.rotate(k, zero(p), p)))
    with pytest.raises(ValueError, match="rotary, or both positional encoders"):
        for layer in range(2):
            forward.blend(executors[1], layer, torch.arange(15))
    executors[1].set_reverse_positional_encoder(lambda p, q, k: (q, ROTARY.rotate(k, p, zero(p))))
    outputs = []
    for executor in executors:
        rows = torch.arange(15)
        for layer in range(3):
            output = forward.blend(executor, layer, rows)
            rows = output.local_indices if layer == 1 else rows
        outputs.append(output)
    assert torch.equal(*(executor.selection.indices for executor in executors))
    torch.testing.assert_close(outputs[0].k, outputs[1].k, rtol=1e-4, atol=1e-4)


def test_bad_arguments() -> None:
    for fields, message in (
        ({"recompute_ratio": -0.1}, r"recompute_ratio must be in \[0, 1\]"),
        ({"recompute_ratio": float("nan")}, r"recompute_ratio must be in \[0, 1\]"),
        ({"recompute_ratio": [0.5, 1.5]}, r"recompute_ratio must be in \[0, 1\]"),
        ({"recompute_ratio": 0.5, "check_layer": 0}, "check_layer must be an integer of at least 1"),
        (
            {"recompute_ratio": 0.5, "check_layer": 2, "filters": [(0, 0.5)]},
            "filters must be of layers from 1 to under 2",
        ),
        ({"recompute_ratio": 0.5, "seam": -1.0}, "seam must be finite and not negative, got -1.0"),
        ({"recompute_ratio": 0.5, "metric": "q"}, "metric must be one of k, v, kv"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheBlendImpl(**fields)
    forward = Forward(11, [6])
    executor = CacheBlendImpl(0.5, rotary=ROTARY)
    with pytest.raises(ValueError, match="fresh_q must have 6 rows in dimension 0"):
        forward.blend(executor, 0, torch.arange(5))
    with pytest.raises(ValueError, match="must be of 6 tokens, got 5 and 6"):
        forward.blend(executor, 0, torch.arange(6), forward.valid[:5])


def test_no_tokens_and_no_requests() -> None:
    for lengths in ([0], [0, 0]):
        forward = Forward(12, lengths)
        executor = CacheBlendImpl(0.5, rotary=ROTARY)
        for layer in range(3):
            output = forward.blend(executor, layer, torch.arange(0))
        assert output.k.shape == (0, HIDDEN)


def test_positions_that_change_from_layer_to_layer_are_seen() -> None:
    """The rotation is made once for layers of the same positions, and anew for others, were they the same tensor."""
    forward = Forward(13, [9])
    executor = CacheBlendImpl(0.3, rotary=ROTARY)
    rows = torch.arange(9)
    for layer in range(4):
        if layer == 3:
            forward.original += 5
        output = forward.blend(executor, layer, rows)
        rows = output.local_indices if layer == 1 else rows
        if layer > 1:
            expected = ROTARY.rotate(forward.retrieved[layer][0], forward.original, forward.positions)
            expected[rows] = forward.fresh[layer][1][rows]
            assert torch.equal(output.k, expected)


def test_latents_are_blended_without_values() -> None:
    """MLA: one head, of which the last part is rotated; V has no elements."""
    torch.manual_seed(0)
    frequencies = 100.0 ** -(torch.arange(0, 4, 2) / 4)
    plain = RotaryTables.of_frequencies(frequencies, 4)
    tables = RotaryTables(plain.cos_sin, 12, 4, True, offset=8)
    k, fresh, nothing = torch.randn(6, 12), torch.randn(6, 12), torch.empty(6, 0)
    old, new, valid = torch.arange(6) + 3, torch.arange(6), torch.ones(6, dtype=torch.bool)
    executor, rows = CacheBlendImpl(0.5, metric="k", rotary=tables), torch.arange(6)
    for layer in range(3):
        output = executor.blend(
            layer, k, nothing, valid, old, fresh[rows], fresh[rows], nothing[rows], new[rows], torch.tensor([0, 6])
        )
        rows = output.local_indices if layer == 1 else rows
    want = naive_rotation(k[:, None], (new - old)[:, None].double() * frequencies.double(), tables)[:, 0].float()
    want[rows] = fresh[rows]
    torch.testing.assert_close(output.k, want, rtol=1e-5, atol=1e-5)
    assert output.v.shape == (6, 0) and 0 < len(rows) < 6


def test_a_call_that_is_refused_does_not_end_the_pass() -> None:
    k, positions, starts = torch.randn(3, 2, 8), torch.arange(3), torch.tensor([0, 3])
    executor = CacheBlendImpl(0.5, rotary=RotaryTables.of_frequencies(torch.tensor([1.0, 0.5]), 8))
    given = [k, k, torch.ones(3, dtype=torch.bool), positions, k, k, k, positions, starts]
    for layer in range(2):
        executor.blend(layer, *given)
    selection = executor.selection
    with pytest.raises(ValueError, match="fresh_q must have 3 rows"):
        executor.blend(0, *given[:4], k[:2], *given[5:])
    assert executor.selection is selection and selection is not None
    rows = [each[selection.indices] for each in (k, k, k, positions)]
    executor.blend(2, *given[:4], *rows, starts)


def test_tensors_without_memory_or_numbers_are_refused() -> None:
    gone = torch.ones(3, dtype=torch.bool)
    gone.untyped_storage().resize_(0)
    for wrong in (gone, torch.ones(3, dtype=torch.bool, device="meta")):
        with pytest.raises(ValueError, match="mask must"):
            mask_to_indices(wrong)
    with pytest.raises(TypeError, match="mask must be a torch.Tensor, got list"):
        mask_to_indices([True])
