"""Every public name is fuzzed, or stands here with the reason why not."""

import importlib

import pytest
from fuzz_targets import TARGETS

COVERED = {name for target in TARGETS for name in target.make.covers}
RESULTS = "made by kvpage, not by callers"
EXCEPTIONS = {
    "kvpage.AttentionBackend": "a protocol",
    "kvpage.Calibration": RESULTS,
    "kvpage.BlockMove": RESULTS,
    "kvpage.BlockMoves": RESULTS,
    "kvpage.KVView": "views that a CacheLayout makes",
    "kvpage.SpaceStats": RESULTS,
    "kvpage.SlotStats": RESULTS,
    "kvpage.WindowStats": RESULTS,
    "kvpage.Explanation": RESULTS,
    "kvpage.GroupReach": RESULTS,
    "kvpage.StoreReach": RESULTS,
    "kvpage.StoreVerdict": RESULTS,
    "kvpage.EditCost": RESULTS,
    "kvpage.Ending": RESULTS,
    "kvpage.Throughput": RESULTS,
    "kvpage.TransferEvent": "a protocol",
    "kvpage.TransferStream": "a protocol",
    "kvpage.calibrate": "takes a CUDA device",
    "kvpage.OutOfBlocks": "an exception",
    "kvpage.HotPrefix": RESULTS,
    "kvpage.TreeEntry": RESULTS,
    "kvpage.__version__": "a text",
    "kvpage.build_info": "takes nothing",
    "kvpage.register_backend": "a registry of the whole process, which every call would grow",
    "kvpage._C.HotPrefix": RESULTS,
    "kvpage._C.TreeEntry": RESULTS,
    "kvpage._C.RecordWalk": RESULTS,
    "kvpage._C.RecordOrder": "places that it hands out; see tests/store/tiers/test_record_order.py",
    "kvpage._C.eviction_policies": "takes nothing",
    "kvpage._C.build_info": "takes nothing",
    "kvpage._C.attention_kernels": "takes nothing",
    "kvpage._C.exponent_kernels": "takes nothing",
    "kvpage._C.encode_exponents": "addresses of a codec's own; see tests/store/records/test_split_codec.py",
    "kvpage._C.decode_exponents": "addresses of a codec's own; see tests/store/records/test_split_codec.py",
    "kvpage._C.most_payload_bytes": "two numbers of a codec; see tests/store/records/test_split_codec.py",
    "kvpage._C.share_prefixes": "arrays of ops.shared_prefixes, which is fuzzed",
    "kvpage._C.cuda_error": "takes nothing",
    "kvpage._C.cuda_machine": "takes nothing",
    "kvpage._C.OutOfBlocks": "an exception",
    "kvpage._C.KVPart": "addresses; its numbers are checked where they are used, see tests/native/test_native_kinds.py",
    "kvpage._C._codecs": "takes nothing",
    "kvpage._C._codec_row": "addresses and sizes of tests, which nothing can check",
    "kvpage._C._codec_row_by_table": "addresses and sizes of tests, which nothing can check",
    "kvpage._C._codec_int8_rows": "addresses and sizes of tests, which nothing can check",
    "kvpage._C._transpose": "addresses and sizes of tests, which nothing can check",
    "kvpage._C._transpose_past_cache": "addresses and sizes of tests, which nothing can check",
    "kvpage._C._Xxh3": "addresses and sizes of tests, which nothing can check",
    "kvpage._C.ChunkPlan": "addresses of a store's own; its refusals are in tests/store/test_store_blocks.py",
    "kvpage._C.copy_and_xxh3_128": "addresses of a store's own, which nothing can check",
    "kvpage._C.write_stretches": "addresses of a store's own; see tests/store/tiers/test_stretch_writer.py",
    "kvpage._C.xxh3_128_of_stretches": "addresses of a store's own, which nothing can check",
    "kvpage.StepInputs": RESULTS,
    "kvpage._C.SequenceRows": "the rows of a BlockManager, which is fuzzed; see tests/blocks/test_sequence_rows.py",
    "kvpage._C.TokenRules": "the rules of a request; its refusals are in tests/serving/sampling/test_native_rows.py",
    "kvpage._C._multiply_adds": "a benchmark's bound",
    "kvpage._C.gather_stretches": "addresses of a store's own; see tests/store/tiers/test_stretch_copy.py",
    "kvpage._C.scatter_stretches": "addresses of a store's own; see tests/store/tiers/test_stretch_copy.py",
    "kvpage._C.read_stretches": "addresses of a store's own; see tests/store/tiers/test_stretch_reader.py",
    "kvpage._C.prefault": "addresses of a tier's own memory; see tests/layout/test_prefault.py",
    "kvpage._C.has_fast_linear": "takes a number of a dtype; see tests/ops/test_linear.py",
    "kvpage._C.linear_kernels": "takes nothing",
    "kvpage._C.product_tiles": "takes nothing",
    "kvpage._C.norm_kernels": "takes nothing",
    "kvpage._C.recurrence_kernels": "takes nothing",
    "kvpage._C.turned_kernels": "takes nothing",
    "kvpage._C.sampling_kernels": "takes nothing",
    "kvpage._C.ids_below": "token ids of an engine's request; see tests/checks/test_tokens.py",
    "kvpage._C.small_ints": "token ids of BlockManager, which is fuzzed",
    "kvpage.ops.SAMPLING_RECORD": "the form of a record",
    "kvpage.ops.SAMPLING_RECORD_WORDS": "a number",
    "kvpage.ops.SamplingMemory": "memory of kernels; its refusals are in tests/kernels/test_sampling_kernels.py",
    "kvpage.ops.can_sample_rows": "a question about a tensor",
    "kvpage.LayerEvents": "a protocol",
    "kvpage.serving.BranchAdapter": RESULTS,
    "kvpage.serving.AsyncEngine": "a thread; its refusals are in tests/serving/live/test_async_engine.py",
    "kvpage.serving.AsyncEngineConfig": "its refusals are in tests/serving/live/test_live_parts.py",
    "kvpage.serving.AsyncEngineStats": RESULTS,
    "kvpage.serving.LiveRequest": RESULTS,
    "kvpage.serving.BranchState": RESULTS,
    "kvpage.serving.WeightsChanged": "an exception",
    "kvpage.serving.EngineClosed": "an exception",
    "kvpage.serving.QueueFull": "an exception",
    "kvpage.serving.TokenLogprobs": RESULTS,
    "kvpage.serving.Detokenizer": "takes a tokenizer; see tests/serving/text/test_detokenizer.py",
    "kvpage.serving.Guide": "texts of grammars; its refusals are in tests/serving/text/test_guides.py",
    "kvpage.store.BlockStore": "the base of stores; see tests/store/test_block_store.py",
    "kvpage.store.ArrivingStore": "a store and a clock; see tests/store/test_arriving_store.py",
    "kvpage.store.LayerwiseStore": "a store and a cache; see tests/store/test_layerwise_store.py",
    "kvpage.LayerCaches": "a protocol",
    "kvpage.LayerSlice": "a cache and two numbers; see tests/store/test_layerwise_store.py",
    "kvpage.store.Expectation": RESULTS,
    "kvpage.serving.RankLost": "an exception",
    "kvpage.ops.has_fast_linear": "a question about a dtype; see tests/ops/test_linear.py",
    "kvpage.integrations.lmcache.BlendExecutor": "an abstract class",
    "kvpage.integrations.lmcache.BlendOutput": RESULTS,
    "kvpage.integrations.lmcache.BlendRetriever": "an abstract class",
    "kvpage.integrations.lmcache.BlendRetrieverResult": RESULTS,
    "kvpage.integrations.lmcache.BlendRetrieverTask": "an abstract class",
    "kvpage.blend.METRICS": "texts",
    "kvpage.blend.Reuse": RESULTS,
    "kvpage.blend.SegmentCache": "a protocol",
    "kvpage.integrations.lmcache.SegmentSource": "a protocol",
    "kvpage.blend.Selection": RESULTS,
    "kvpage.Arrival": RESULTS,
    "kvpage.LayeredMoves": "made by CacheEngine.layered_moves of a block manager's moves",
    "kvpage.ops.attends_in_place": "a question about a CUDA device",
    "kvpage.ops.check_device": "takes a CUDA device",
    "kvpage.serving.Beam": RESULTS,
    "kvpage.serving.BeamSearchOutput": RESULTS,
    "kvpage.serving.EngineStats": RESULTS,
    "kvpage.serving.LogitsNotFinite": RESULTS,
    "kvpage.serving.RequestOutput": RESULTS,
    "kvpage.serving.RequestState": RESULTS,
    "kvpage.serving.Sample": RESULTS,
    "kvpage.serving.StepOutput": RESULTS,
    "kvpage.serving.TokenStream": RESULTS,
    "kvpage.integrations.vllm_ops.register_caches": "a registry of the whole process; what it names is fuzzed",
    "kvpage.integrations.vllm_ops.unregister_caches": "a registry of the whole process; what it names is fuzzed",
    "kvpage.store.ByteRecords": "of a KVStore, which makes it; ByteStore has the same calls, which are fuzzed",
    "kvpage.store.Placed": "what a tier's factory gives",
    "kvpage.store.RecordSummary": RESULTS,
    "kvpage.store.SealedTier": "a tier and keys; see tests/store/sealed/test_sealed_tier.py",
    "kvpage.store.Tier": "an abstract class",
    "kvpage.store.TierError": "an exception",
    "kvpage.store.TierRests": "an exception",
    "kvpage.store.TierStats": RESULTS,
    "kvpage.store.register_tier": "a registry of the whole process, which every call would grow",
}


def public_names() -> set[str]:
    names = set()
    for module_name in (
        "kvpage",
        "kvpage.blend",
        "kvpage.observe.events",
        "kvpage.ops",
        "kvpage.serving",
        "kvpage.store",
        "kvpage.integrations.lmcache",
        "kvpage.integrations.vllm_ops",
    ):
        names |= {f"{module_name}.{name}" for name in importlib.import_module(module_name).__all__}
    extension = importlib.import_module("kvpage._C")
    names |= {
        f"kvpage._C.{name}" for name, value in vars(extension).items() if not name.startswith("__") and callable(value)
    }
    return names


@pytest.mark.parametrize("name", sorted(public_names()))
def test_every_public_name_is_fuzzed_or_excused(name):
    """A native call takes addresses, which nothing can check: the arguments of its operation are fuzzed."""
    names = {name, name.replace("kvpage._C.", "kvpage."), name.replace("kvpage._C.", "kvpage.ops.")}
    covered = not COVERED.isdisjoint(names)
    assert covered != (name in EXCEPTIONS), f"{name} must have a target, or a reason in EXCEPTIONS, and not both"


def test_exceptions_are_names():
    assert not set(EXCEPTIONS) - public_names()
