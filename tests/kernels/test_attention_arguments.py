"""The cut of attention, and each argument of its launches, against tables of their own. Nothing is compiled."""

import math
import os
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import triton.language as tl  # noqa: E402

from kvpage import CacheLayout  # noqa: E402
from kvpage.kernels import attention_launch, attention_plan  # noqa: E402
from kvpage.kernels.attention_launch import Device, DeviceSequences, Rows, paged_attention  # noqa: E402
from kvpage.kernels.attention_plan import Sizes, Tile, choose_items, choose_pieces, choose_tile  # noqa: E402
from kvpage.kernels.prepared import PreparedKinds  # noqa: E402
from kvpage.layout.attention import Attention  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
ROWS = Sizes(4, 128, 128, 2, 2, False, False)
SMALL, LARGE, FLOATS = ROWS._replace(key_size=8, value_size=8), ROWS._replace(value_size=256), Sizes(
    1, 64, 64, 4, 4, False, False
)  # fmt: skip
LATENTS = Sizes(128, 576, 512, 2, 2, True, False)
ANY_MEMORY = 2**20  # room for whatever registers have room for
TILES = [  # sizes, rows wanted, capability; rows, keys, columns of K, the rest of them, of V, warps, precision
    (ROWS, 16, 90, (16, 64, 128, 0, 128, 4, "tf32x3")),
    (ROWS, 17, 90, (64, 64, 128, 0, 128, 8, "tf32x3")),
    (ROWS, 64, 90, (64, 64, 128, 0, 128, 8, "tf32x3")),
    (ROWS, 65, 89, (64, 64, 128, 0, 128, 8, "tf32x3")),
    (ROWS, 65, 90, (128, 64, 128, 0, 128, 8, "tf32x3")),
    (ROWS, 65, 119, (128, 64, 128, 0, 128, 8, "tf32x3")),
    (ROWS, 65, 120, (64, 64, 128, 0, 128, 8, "tf32x3")),
    (ROWS._replace(has_token_scales=True), 65, 90, (64, 64, 128, 0, 128, 8, "tf32x3")),
    (ROWS._replace(is_scattered=True), 16, 80, (16, 32, 128, 0, 128, 4, "tf32x3")),
    (ROWS._replace(is_scattered=True), 17, 80, (64, 64, 128, 0, 128, 8, "tf32x3")),
    (SMALL, 1, 80, (16, 128, 16, 0, 16, 4, "tf32x3")),
    (SMALL, 65, 80, (64, 64, 16, 0, 16, 8, "tf32x3")),
    (LARGE, 65, 90, (64, 32, 128, 0, 256, 8, "ieee")),
    (ROWS._replace(key_size=257, value_size=257), 65, 90, (32, 16, 256, 16, 512, 8, "ieee")),
    (ROWS._replace(key_size=1024, value_size=1024), 65, 90, (16, 16, 1024, 0, 1024, 8, "ieee")),
    (FLOATS, 16, 90, (16, 64, 64, 0, 64, 4, "tf32x3")),
    (FLOATS, 17, 90, (32, 32, 64, 0, 64, 4, "tf32x3")),
    (FLOATS._replace(key_size=65), 17, 90, (16, 32, 64, 16, 64, 4, "tf32x3")),
    (LATENTS, 65, 80, (64, 32, 512, 64, 512, 8, "ieee")),
    (LATENTS, 65, 90, (64, 32, 512, 64, 512, 8, "ieee")),
    (LATENTS, 65, 120, (32, 16, 512, 64, 512, 8, "ieee")),
    (LATENTS._replace(group_size=32), 32, 90, (32, 16, 512, 64, 512, 8, "ieee")),
    (LATENTS._replace(group_size=33), 33, 90, (64, 32, 512, 64, 512, 8, "ieee")),
    (LATENTS._replace(stored_bytes=1), 65, 80, (16, 16, 512, 64, 512, 8, "ieee")),
    (LATENTS._replace(stored_bytes=1), 65, 90, (32, 16, 512, 64, 512, 8, "ieee")),
    (LATENTS._replace(value_size=576), 65, 90, (16, 16, 512, 64, 1024, 8, "ieee")),
    (LATENTS._replace(key_size=512), 65, 90, (64, 32, 512, 0, 512, 8, "ieee")),
    (LATENTS._replace(key_size=192, value_size=128), 65, 90, (64, 64, 128, 64, 128, 8, "ieee")),
]


@pytest.mark.parametrize("sizes, wanted, capability, tile", TILES)
@pytest.mark.parametrize("latent_stages", [2, 3])
def test_tiles(monkeypatch, sizes, wanted, capability, tile, latent_stages):
    """Of latents that are read once, where tensor cores read shared memory, the compiler chooses the stages."""
    monkeypatch.setattr(attention_plan, "LATENT_STAGES", latent_stages)
    num_stages = latent_stages if capability == 90 and tile[:2] == (64, 32) and sizes.shares_rows else 3
    assert choose_tile(sizes, wanted, capability, ANY_MEMORY) == Tile(*tile[:-1], num_stages, tile[-1])


@pytest.mark.parametrize("capability, room, buffers", [(80, 163, 2), (90, 227, 3)])
@pytest.mark.parametrize("sizes", [(320, 256), (384, 256), (512, 512), (576, 512)])
def test_latents_of_64_heads_fit_into_shared_memory(sizes, capability, room, buffers):
    """The queries, or what is made of them, and the tiles that are under way."""
    tile = choose_tile(LATENTS._replace(key_size=sizes[0], value_size=sizes[1]), 64, capability, ANY_MEMORY)
    row_bytes = 2 * (tile.key_tile + tile.key_tail)
    assert tile.rows == 64 and (tile.rows + buffers * tile.keys) * row_bytes < room * 1024


def test_rows_that_v_shares_are_of_16_keys_a_block():
    for block_size, rows in ((16, 64), (48, 64), (8, 32), (24, 32), (1, 32)):
        assert choose_tile(LATENTS._replace(block_size=block_size), 128, 90, ANY_MEMORY).rows == rows


DECODE = Tile(16, 64, 128, 0, 128, 4, 3, "tf32x3")
FEW, WIDE = DECODE._replace(rows=32), DECODE._replace(rows=64)
PIECES = [  # tiles of queries, of heads; longest, tile, decodes, multiprocessors; pieces
    (0, 8, 10_000, DECODE, True, 132, 0),
    (1, 8, 128, DECODE, True, 132, 0),
    (1, 8, 129, DECODE, True, 132, 132),
    (1, 8, 256, FEW, True, 132, 0),
    (1, 8, 257, FEW, True, 132, 132),
    (500, 8, 10_000, FEW, False, 132, 132),
    (1, 8, 512, WIDE, True, 132, 0),
    (1, 8, 513, WIDE, True, 132, 33),
    (500, 8, 10_000, WIDE, True, 132, 33),
    (16, 8, 10_000, WIDE, False, 132, 33),
    (17, 8, 10_000, WIDE, False, 132, 0),
    (33, 4, 10_000, WIDE, False, 132, 0),
    (1, 5000, 10_000, DECODE, True, 132, 1),
    (1, 3, 10_000, DECODE, True, 4, 10),
]


@pytest.mark.parametrize("tiles, heads, longest, tile, is_decode, multiprocessors, pieces", PIECES)
def test_pieces(tiles, heads, longest, tile, is_decode, multiprocessors, pieces):
    assert choose_pieces(tiles, heads, longest, tile, is_decode, multiprocessors) == pieces


@pytest.mark.parametrize(
    "tiles, pieces, longest, items",
    [(7, 0, 10_000, 7), (7, 100, 10_000, 107), (7, 100, 1, 7), (7, 100, 128, 7), (7, 100, 129, 14), (7, 3, 129, 10),
     (1, 1000, 10**6, 128), (2, 300, 10**6, 256), (2, 200, 10**6, 202), (1, 100, 0, 1)],
)  # fmt: skip
def test_items(tiles, pieces, longest, items):
    assert choose_items(tiles, pieces, longest, DECODE) == items


def test_the_least_split_is_of_two_tiles_or_more_keys_than_its_results():
    least = [attention_plan.min_keys_of_split(tile) for tile in (DECODE, FEW, WIDE, DECODE._replace(keys=16))]
    assert least == [128, 256, 512, 128]


def test_tokens_of_a_tile():
    assert [DECODE.num_tokens(*sizes) for sizes in ((4, 1), (4, 2), (16, 2), (17, 2), (1, 9), (5, 9))] == [
        1, 4, 1, 1, 16, 3
    ]  # fmt: skip


# --- launches ---


@pytest.fixture
def launches(monkeypatch):
    """Each launch with its arguments by name, the grid as "grid", the kind of the launch as "kind"."""
    found = []

    class Kept:
        def __init__(self, kernel, fixed, options, num_bits, aligned):
            self.kernel, self.fixed, self.kind = kernel, fixed, (options, num_bits, [*aligned])

        def launch(self, grid, tensors, numbers):
            given = dict(zip(self.kernel.arg_names, (*tensors, *numbers, *self.fixed), strict=True))
            found.append({"grid": grid, "kind": self.kind, "kernel": self.kernel.__name__, **given})

    monkeypatch.setattr(attention_launch, "Prepared", Kept)
    for name in ("_kinds", "_plans"):
        monkeypatch.setattr(attention_launch, name, PreparedKinds())
    return found


def make_call(layout, queries=(1, 1, 1), group=2, query_dtype=BF16, value_size=None, longest=100_000, **options):
    """Arguments of paged_attention with distinct strides of the queries and of what comes out."""
    key, value = (view and Rows(view.rows, view.scales) for view in layout.views(layout.allocate(7, 1, CPU)[0]))
    num_tokens, num_heads, size = sum(queries), group * layout.num_kv_heads, value_size or layout.head_size
    query = torch.zeros(num_tokens, num_heads, 2 * layout.head_size, dtype=query_dtype)[..., : layout.head_size]
    out = torch.zeros(num_tokens + 1, num_heads, size, dtype=query_dtype)[:num_tokens]
    lengths = torch.full((len(queries),), 9)
    counts = None if set(queries) == {1} else torch.tensor(queries)
    decodes = next((i for i, n in enumerate(queries) if n > 1), 0)
    tables = torch.zeros(len(queries), 11, dtype=torch.int32)
    sequences = DeviceSequences(tables, lengths, counts, longest, max(queries, default=0), decodes)
    return SimpleNamespace(
        query=query, out=out, key=key, value=value, sequences=sequences, attention=Attention(0.5, **options)
    )


CPU, ERROR = torch.device("cpu"), torch.zeros(1, dtype=torch.int32)
FLASH = CacheLayout(16, 3, 64, BF16)
MLA = CacheLayout(16, 1, 576, BF16, "mla")


def run(call, multiprocessors=132, capability=90):
    paged_attention(**vars(call), device=Device(ERROR, multiprocessors, capability, ANY_MEMORY))


def assert_arguments(launch, wanted):
    for name, value in wanted.items():
        got = launch[name]
        if isinstance(value, torch.Tensor):
            assert got.data_ptr() == value.data_ptr() and got.shape == value.shape, name
        else:
            assert got == value and type(got) is type(value), (name, got)


LOG2_E = math.log2(math.e)


def test_arguments_of_decodes(launches):
    sinks, positions = torch.zeros(6), torch.zeros(3, dtype=torch.int64)
    call = make_call(FLASH, sliding_window=70, softcap=4.0, sinks=sinks, query_positions=positions)
    run(call)
    attention, merge = launches
    pieces = 132 * 8 // 3
    assert_arguments(attention, {
        "grid": ((3 + pieces) * 3, 1, 1), "kernel": "paged_attention_kernel",
        "query_ptr": call.query, "out_ptr": call.out, "key_ptr": call.key.data, "value_ptr": call.value.data,
        "key_scale_ptr": None, "value_scale_ptr": None, "sink_ptr": sinks,
        "table_ptr": call.sequences.block_tables, "seq_len_ptr": call.sequences.seq_lens, "query_len_ptr": None,
        "position_ptr": positions, "error_ptr": ERROR,
        "factor": 0.25 * LOG2_E, "softcap": 4.0 * LOG2_E, "window": 70,
        "num_items": 3 + pieces, "num_pieces": pieces, "num_kv_heads": 3, "num_seqs": 3, "num_tokens": 3,
        "num_blocks": 7, "capacity": 11 * 16, "table_stride": 11,
        "query_token_stride": 6 * 128, "query_head_stride": 128, "out_token_stride": 6 * 64, "out_head_stride": 64,
        "key_block_stride": 16 * 3 * 64, "key_head_stride": 64,
        "value_block_stride": 16 * 3 * 64, "value_head_stride": 64,
        "key_scale_block_stride": 0, "key_scale_offset_stride": 0, "key_scale_head_stride": 0,
        "value_scale_block_stride": 0, "value_scale_offset_stride": 0, "value_scale_head_stride": 0,
    })  # fmt: skip
    assert attention["kind"] == (
        {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True},
        0,
        [0, 1, 2, 3, 4, 5, 11, 12, 13],
    )
    assert attention["partial_ptr"].shape == (3 + pieces, 6, 64) and attention["partial_ptr"].dtype == FP32
    assert attention["sum_ptr"].shape == (3 + pieces, 6, 2) and attention["sum_ptr"].dtype == FP32
    assert_arguments(merge, {
        "grid": (3 * 6, 1, 1), "kernel": "merge_splits_kernel", "out_ptr": call.out,
        "partial_ptr": attention["partial_ptr"], "sum_ptr": attention["sum_ptr"],
        "seq_len_ptr": call.sequences.seq_lens, "query_len_ptr": None, "num_seqs": 3, "num_heads": 6,
        "num_items": 3 + pieces, "num_pieces": pieces, "capacity": 11 * 16, "window": 70,
        "out_token_stride": 6 * 64, "out_head_stride": 64, "MERGED": 16, "A": attention["A"],
    })  # fmt: skip
    assert merge["kind"][1:] == (0, [0, 1, 2]) and merge["kind"][0]["num_warps"] == 4


def test_arguments_of_a_mixed_batch(launches):
    positions = torch.arange(2 + 130 + 60)
    call = make_call(FLASH, (1, 1, 130, 60), query_positions=positions, sliding_window=2**40)
    run(call, multiprocessors=1)
    decodes, merge, prefills = launches
    assert merge["kernel"] == "merge_splits_kernel" and "partial_ptr" in merge
    parts = ((decodes, slice(0, 2), slice(0, 2)), (prefills, slice(2, None), slice(2, None)))
    for launch, rows, seqs in parts:
        assert_arguments(launch, {
            "query_ptr": call.query[rows], "out_ptr": call.out[rows], "position_ptr": positions[rows],
            "table_ptr": call.sequences.block_tables[seqs], "seq_len_ptr": call.sequences.seq_lens[seqs],
            "window": 2**31 - 1, "softcap": 0.0, "factor": 0.5 * LOG2_E, "num_seqs": 2,
        })  # fmt: skip
    assert decodes["query_len_ptr"] is None and decodes["num_tokens"] == 2 and prefills["num_tokens"] == 190
    assert_arguments(prefills, {"query_len_ptr": call.sequences.query_lens[2:], "partial_ptr": None, "sum_ptr": None})
    # 130 queries of two heads in tiles of 64 tokens: at most three a sequence, and four of 190 tokens, one more each
    assert prefills["A"].TILE_TOKENS == 64 and prefills["num_items"] == min(2 * 3, 190 // 64 + 2)
    assert prefills["grid"] == (prefills["num_items"] * 3, 1, 1)


def test_arguments_of_scales(launches):
    """Of tokens, of heads, or of a layer."""
    run(make_call(CacheLayout(16, 3, 64, INT8)))
    call = make_call(CacheLayout(16, 3, 64, E4M3), group=40)
    call.key = call.key._replace(scales=torch.ones(3))
    call.value = call.value._replace(scales=torch.ones(1).expand(3))
    run(call)
    tokens, _, heads, _ = launches
    names = [f"{part}_scale_{stride}_stride" for part in ("key", "value") for stride in ("block", "offset", "head")]
    rows = CacheLayout(16, 3, 64, INT8).views(torch.zeros(CacheLayout(16, 3, 64, INT8).shape(7), dtype=INT8))
    assert [tokens[name] for name in names] == [n for view in rows for n in view.scales.stride()]
    assert [heads[name] for name in names] == [0, 0, 1, 0, 0, 0]
    assert heads["key_scale_ptr"] is call.key.scales and heads["value_scale_ptr"] is call.value.scales
    assert heads["key_ptr"].dtype == torch.uint8 and tokens["key_ptr"].dtype == torch.int16
    assert heads["grid"] == (heads["num_items"] * 3, 1, 1) and heads["A"].TILE_ROWS == 64


def test_arguments_of_latents(launches):
    call = make_call(MLA, group=128, value_size=512)
    run(call)
    assert_arguments(launches[0], {
        "key_ptr": call.key.data, "value_ptr": call.key.data, "num_kv_heads": 1, "num_pieces": 132,
        "grid": (launches[0]["num_items"] * 2, 1, 1), "value_block_stride": 16 * 576,
    })  # fmt: skip
    assert launches[0]["kind"][0] == {
        "num_warps": 8,
        "num_stages": attention_plan.LATENT_STAGES,
        "enable_fp_fusion": True,
    }


@pytest.mark.parametrize("queries", [(), (0, 0)])
def test_nothing_is_launched_for_no_query(launches, queries):
    call = make_call(FLASH, queries)
    run(call)
    assert not launches


def test_plans_are_made_once_for_a_shape(launches, monkeypatch):
    """And anew for each that differs in what a plan or a kernel depends on."""
    made, plan_of = [], attention_launch.plan_of
    monkeypatch.setattr(attention_launch, "plan_of", lambda *args: made.append(args) or plan_of(*args))
    base = {"layout": FLASH}
    others = [{}, {"queries": (1, 1)}, {"queries": (2, 2)}, {"longest": 90}, {"group": 4}, {"softcap": 1.0},
              {"sliding_window": 3}, {"query_dtype": FP16}, {"sinks": torch.zeros(6)}, {"layout": MLA},
              {"query_positions": torch.zeros(3, dtype=torch.int64)}, {"layout": CacheLayout(16, 3, 64, INT8)},
              {"layout": CacheLayout(16, 3, 64, BF16, "paged")}, {"layout": CacheLayout(32, 3, 64, BF16)}]  # fmt: skip
    for number, other in enumerate(others):
        for _ in range(2):
            run(make_call(**{**base, **other}))
            assert len(made) == number + 1, other
    for capability, multiprocessors in ((80, 132), (90, 108)):
        run(make_call(FLASH), multiprocessors, capability)
    assert len(made) == len(others) + 2


PLAIN = {
    "GROUP": 2, "KEY_SIZE": 64, "VALUE_SIZE": 64, "BLOCK_SIZE": 16, "KEY_RUN": 2**20, "VALUE_RUN": 2**20,
    "QUERY_ALIGN": 8, "KEY_ALIGN": 8, "VALUE_ALIGN": 8, "KEY_OFFSET_STRIDE": 192, "VALUE_OFFSET_STRIDE": 192,
    "STORED": "float", "COMPUTE": tl.bfloat16, "PRECISION": "tf32x3", "NORMALIZE": False, "TOKEN_SCALES": False,
    "SCALE_VALUES": False, "SHARED": False, "SAME_STRIDES": True, "KEY_PAIRS": False, "VALUE_PAIRS": False,
    "WINDOW": False, "SOFTCAP": False, "TILE_ROWS": 16, "TILE_TOKENS": 1, "HEADS": 2, "TILE_KEYS": 128,
    "KEY_TILE": 64, "KEY_TAIL": 0, "VALUE_TILE": 64, "BOUNDED": False, "MIN_SPLIT_TILES": 2,
    "MAX_SPLITS": 128, "BIT": 2,
}  # fmt: skip
PAIRS = {"KEY_PAIRS": True, "VALUE_PAIRS": True, "KEY_OFFSET_STRIDE": 96, "VALUE_OFFSET_STRIDE": 96}
NARROW = {**PAIRS, "COMPUTE": tl.float16, "NORMALIZE": True}
TOKENS = {"STORED": "int8", "TOKEN_SCALES": True, "KEY_OFFSET_STRIDE": 102, "VALUE_OFFSET_STRIDE": 102,
          "KEY_ALIGN": 2, "VALUE_ALIGN": 2}  # fmt: skip
EIGHT = {dtype: CacheLayout(16, 3, 64, dtype) for dtype in (E4M3, E5M2, INT8)}
KINDS = {
    "bf16": ({}, {}),
    "fp16": ({"layout": CacheLayout(16, 3, 64, FP16), "query_dtype": FP16}, {"COMPUTE": tl.float16}),
    "window": ({"sliding_window": 5}, {"WINDOW": True, "BOUNDED": True}),
    "window at positions": ({"sliding_window": 5, "query_positions": torch.zeros(3, dtype=torch.int64)},
                            {"WINDOW": True}),
    "softcap": ({"softcap": 2.0}, {"SOFTCAP": True}),
    "e4m3": ({"layout": EIGHT[E4M3]}, {**NARROW, "STORED": "e4m3"}),
    "e5m2": ({"layout": EIGHT[E5M2]}, {**NARROW, "STORED": "e5m2"}),
    "e5m2, fp16": ({"layout": EIGHT[E5M2], "query_dtype": FP16}, {**NARROW, "STORED": "e5m2", "NORMALIZE": False}),
    "int8": ({"layout": EIGHT[INT8]}, {**PAIRS, **TOKENS}),
    "int8, fp16": ({"layout": EIGHT[INT8], "query_dtype": FP16},
                   {**PAIRS, **TOKENS, "COMPUTE": tl.float16, "SCALE_VALUES": True}),
    "many heads": ({"group": 17}, {"GROUP": 17, "TILE_ROWS": 64, "HEADS": 17, "TILE_KEYS": 64, "MIN_SPLIT_TILES": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_constants(launches, name):
    given, differing = KINDS[name]
    run(make_call(**{"layout": FLASH, **given}))
    got = asdict(launches[0]["A"])
    assert {key: got[key] for key in PLAIN} == {**PLAIN, **differing}


def test_the_compiler_of_triton_3_2_widens_by_integers(launches, monkeypatch):
    monkeypatch.setattr(attention_launch, "WIDENS_BYTES", False)
    run(make_call(EIGHT[E4M3]))
    constants = launches[0]["A"]
    assert not constants.KEY_PAIRS and not constants.VALUE_PAIRS and constants.STORED == "e4m3 bits"


def test_constants_of_latents_and_of_parts(launches):
    run(make_call(MLA, group=128, value_size=512))
    run(make_call(CacheLayout(16, 3, 64, BF16, "paged")))
    run(make_call(CacheLayout(16, 3, 64, E4M3)), capability=80)
    latents, parts, bits = (launch["A"] for launch in launches if launch["kernel"] == "paged_attention_kernel")
    assert latents.SHARED and latents.HEADS == 64 and not latents.SAME_STRIDES and latents.MIN_SPLIT_TILES == 16
    assert latents.HAS_FEW_BLOCKS and latents.PART_KEYS == 16 and latents.NUM_PHASES == 1
    assert (parts.KEY_RUN, parts.VALUE_RUN) == (8, 1) and not parts.SAME_STRIDES and parts.TILE_KEYS == 64
    assert bits.STORED == "e4m3 bits" and not bits.DEPENDENT


@pytest.mark.parametrize(
    "block_size, few, part", [(16, False, 16), (32, True, 32), (64, True, 64), (256, True, 128), (192, False, 128)]
)
def test_blocks_of_a_tile(launches, block_size, few, part):
    """128 keys: eight blocks, four, two, a half, or a part of two."""
    run(make_call(CacheLayout(block_size, 3, 64, BF16)))
    constants = launches[0]["A"]
    assert few == constants.HAS_FEW_BLOCKS and part == constants.PART_KEYS


def test_prefills_have_edges_and_no_splits(launches):
    run(make_call(FLASH, (300,)), multiprocessors=1)
    (prefill,) = launches
    assert prefill["A"].HAS_EDGES and prefill["A"].NUM_PHASES == 2 and not prefill["A"].DEPENDENT
    assert prefill["A"].TILE_ROWS == 128 and prefill["kind"][0]["num_warps"] == 8
