"""Each promise of docs/security.md."""

import ast
import contextlib
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
import xxhash
from support.store_records import get, key, put, record, trailer

import kvpage
from kvpage import BlockManager, CacheConfig
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, TierError
from kvpage.store.disk.disk_tier import DiskTier
from kvpage.store.records.record import HEADER, CorruptRecord, RecordHead
from kvpage.store.remote.backend import Backend
from kvpage.store.remote.options import RemoteOptions
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.tiers.memory_tier import MemoryTier

ROOT = Path(kvpage.__file__).parent
CSRC = Path(__file__).parents[2] / "csrc"
TOKENS = list(range(100, 164))
DISK_BYTES = 4 << 20


def metadata() -> KVStoreMetadata:
    return KVStoreMetadata("model", kv_dtype=torch.float32)


def small_store(path: Path) -> KVStore:
    tiers = ("memory://?size=1MiB", f"disk://{path}?size=4MiB")
    return KVStore(KVStoreConfig(chunk_size=16, tiers=tiers), metadata())


def kv() -> torch.Tensor:
    return torch.randn(2, 2, len(TOKENS), 2, 8)


class DictBackend(Backend):
    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def get(self, keys, timeout):
        return [self.values.get(k) for k in keys]

    def put(self, items, timeout):
        self.values.update((k, bytes(v)) for k, v in items)
        return [True] * len(items)

    def contains(self, keys, timeout):
        return [k in self.values for k in keys]

    def remove(self, keys, timeout):
        return sum(self.values.pop(k, None) is not None for k in keys)


# --- tenants ----------------------------------------------------------------------------------------------------------


def num_found(manager: BlockManager, prompt: list[int], namespace: bytes) -> int:
    match = manager.tree.match(prompt, namespace)
    manager.tree.release(match)
    return match.num_tokens


def test_a_tenant_finds_nothing_of_another_in_either_tier_of_blocks():
    manager = BlockManager(8, 16, num_host_blocks=16)
    prompts = [[i * 1000 + j for j in range(65)] for i in range(4)]
    for i, prompt in enumerate(prompts):  # the later ones push the first onto the host
        manager.allocate(i, prompt, namespace=b"alice")
        manager.take_moves()
        manager.commit(i, prompt[:64])
        manager.release(i)
    manager.take_moves()
    assert manager.tree.num_host_cached > 0
    for prompt in prompts:
        for stranger in (b"", b"bob", b"alic", b"alice\0", b"ALICE"):
            assert num_found(manager, prompt, stranger) == 0
        assert num_found(manager, prompt, b"alice") == 64


def test_a_tenant_finds_nothing_of_another_in_a_store(tmp_path):
    with small_store(tmp_path / "disk") as store:
        mine = kv()
        store.store(TOKENS, mine, namespace=b"alice")
        for stranger in (b"", b"bob", b"alic", b"alice\0"):
            assert store.lookup(TOKENS, namespace=stranger) == 0
            found, mask = store.retrieve(TOKENS, namespace=stranger, return_tuple=False)
            assert not mask.any() and len(found) == 0
        assert store.remove(TOKENS, namespace=b"bob") == 0
        found, mask = store.retrieve(TOKENS, namespace=b"alice", return_tuple=False)
        assert mask.all() and torch.equal(found, mine)


# --- servers and disks that others can write to -----------------------------------------------------------------------


def signed(backend: Backend, mac_key: bytes | None) -> RemoteTier:
    return RemoteTier(backend, options=RemoteOptions(mac_key=mac_key))


def resealed(data: bytes, payload_bytes: int = 1000) -> bytes:
    """With the checksums that anybody can compute."""
    begin = len(data) - payload_bytes - 2 * 16
    return data[: begin + payload_bytes] + trailer(data[:begin], data[begin : begin + payload_bytes])


def test_a_mac_rejects_what_was_not_written_with_the_key():
    pytest.importorskip("blake3")
    backend = DictBackend()
    tier, names = signed(backend, b"k" * 32), [key(i) for i in range(6)]
    put(tier, {name: record(name) for name in names})
    assert get(tier, names) == [record(name) for name in names]
    right = dict(backend.values)
    whole = bytearray(right[names[1]])
    whole[200] ^= 1
    whole[: len(record(names[1]))] = resealed(bytes(whole[: len(record(names[1]))]))
    backend.values[names[0]] = right[names[0]][:-32] + bytes(32)
    backend.values[names[1]] = bytes(whole)
    backend.values[names[2]] = right[names[3]]  # another's, rightly signed
    backend.values[names[3]] = right[names[3]][:-32]  # as a store without a key writes it
    stranger = DictBackend()
    put(signed(stranger, b"x" * 32), {names[4]: record(names[4])})
    backend.values[names[4]] = stranger.values[names[4]]
    assert get(tier, names) == [None] * 5 + [record(names[5])]


HUGE = [2**31, 2**40, 2**62, 2**64 - 1]


@pytest.mark.parametrize("field", [2, 4, 5, 12])
@pytest.mark.parametrize("value", HUGE)
def test_no_length_in_a_record_reaches_outside_it(field, value):
    data = bytearray(record(key(0)))
    fields = list(HEADER.unpack_from(data))
    fields[field] = value % 2**32 if field == 2 else value
    HEADER.pack_into(data, 0, *fields)
    data[:] = resealed(bytes(data))
    if field in (2, 4):  # that of the decoded payload is the codec's to compare, and stretches may be long
        with pytest.raises(CorruptRecord):
            RecordHead.unpack(memoryview(data), len(data))
    backend = DictBackend()
    backend.values[key(0)] = bytes(data)
    with KVStore(
        KVStoreConfig(chunk_size=16, tiers=("memory://?size=1MiB",)), metadata(), [signed(backend, None)]
    ) as store:
        name = store.keys_of(TOKENS)[0]
        fields[3] = name
        HEADER.pack_into(data, 0, *fields)
        data[:] = resealed(bytes(data))
        backend.values[name] = bytes(data)
        tracemalloc.start()
        found, mask = store.retrieve(TOKENS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == () and not mask.any() and peak < 8 << 20


@pytest.mark.parametrize("at", [32, 40, 48, 56])
@pytest.mark.parametrize("value", HUGE)
def test_no_length_in_a_file_reaches_outside_it(tmp_path, at, value):
    """Slot, slots, generation and bytes of a record's header, with the right checksum."""
    tier = DiskTier([tmp_path], DISK_BYTES)
    put(tier, {key(0): record(key(0)), key(1): record(key(1))})
    tier.close()
    path = next(tmp_path.glob("*.segment"))
    data = bytearray(path.read_bytes())
    header = data.index(key(0), 4096) - 72
    struct.pack_into("<Q", data, header + at, value)
    data[header + 104 : header + 112] = xxhash.xxh3_64_digest(bytes(data[header : header + 104]))
    path.write_bytes(data)
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        tier = DiskTier([tmp_path], DISK_BYTES)
        assert get(tier, [key(0)]) in ([None], [record(key(0))])
        assert get(tier, [key(1)]) == [record(key(1))]
        tier.close()
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_compressed_record_decodes_to_no_more_than_it_says():
    zstd = pytest.importorskip("zstandard")
    from kvpage.store.records.codec import get_codec

    codec = get_codec("zstd", torch.float32)
    bomb = zstd.ZstdCompressor().compress(bytes(256 << 20))
    tracemalloc.start()
    with pytest.raises(CorruptRecord):
        codec.decode(memoryview(bomb), 1024, (1, 2, 1, 1, 128))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "diskcache"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load"}


def imports_errors_alone(node: ast.ImportFrom) -> bool:
    """Whether only errors are imported: who catches those of a module does not call it."""
    return all(alias.name.endswith("Error") for alias in node.names)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_data_becomes_code(path):
    """Imports by name are of our own modules and of a model's own, never of what data says: see the list."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not imports_errors_alone(node):
            names = [(node.module or "").split(".")[0]]
        assert not FORBIDDEN_MODULES.intersection(names), f"{path}:{node.lineno}"
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            is_allowed = (str(path.relative_to(ROOT)), call) in RUNS_OWN_TEXT
            assert call not in FORBIDDEN_CALLS or is_allowed, f"{path}:{node.lineno} calls {call}"
            if call.endswith("import_module"):
                assert path.name in IMPORTS_BY_NAME, f"{path}:{node.lineno} imports by name"


RUNS_OWN_TEXT = {
    ("ops/operation.py", "exec")
}  # while kvpage is imported: the body of an operator, from the annotated parameters in our source and nothing else

IMPORTS_BY_NAME = {
    "cli.py",
    "choice.py",
    "interface.py",
    "fill_triton_cache.py",
}  # names of benchmarks, of libraries in a table, of vLLM's modules in one, of Triton's in one


def test_configuration_files_make_no_objects(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "store.yaml"
    path.write_text("tiers: !!python/object/apply:os.system ['touch hacked']\n")
    with pytest.raises(ValueError):
        KVStoreConfig.from_yaml(path)
    assert not Path("hacked").exists()


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_their_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        with small_store(tmp_path / "a" / "b") as store:
            store.store(TOKENS, kv())
            for path in (tmp_path / "a").rglob("*"):
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["lock", "0000.segment"])
@pytest.mark.parametrize("is_there", [True, False])
def test_links_out_of_the_directory_are_refused(tmp_path, name, is_there):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    if is_there:
        outside.write_bytes(b"somebody's")
    inside.mkdir()
    (inside / name).symlink_to(outside)
    with pytest.raises(ValueError, match="symbolic link"):
        DiskTier([inside], DISK_BYTES)
    assert outside.read_bytes() == b"somebody's" if is_there else not outside.exists()


# --- flooding ---------------------------------------------------------------------------------------------------------


def test_hash_tables_over_what_others_choose_are_seeded():
    """Tables of tokens have a secret seed; the others have keys that callers do not choose."""
    chosen_by_us = {"int32_t", "int64_t", "const TreeNode*", "const SlotNode*"}
    for path in sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")]):
        for key_type, rest in re.findall(r"unordered_(?:map|set)<([^,>]+)([^;]*)", path.read_text()):
            assert key_type in chosen_by_us or "ChildHash" in rest, f"{path.name}: {key_type}"
    seeds = [path.name for path in CSRC.rglob("*.cpp") if "std::random_device" in path.read_text()]
    assert {"prefix_tree.cpp", "slot_tree.cpp"} <= set(seeds)


# --- processes --------------------------------------------------------------------------------------------------------


def in_child(work) -> str:
    """What `work` raised in a forked child, as text; it is killed after 120 s."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of the test run must go on here
        signal.alarm(120)
        try:
            work()
            os.write(write, b"nothing")
        except BaseException as error:  # any
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as answer:
        return answer.read()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_not_hang(tmp_path):
    with small_store(tmp_path / "disk") as store:
        expected = kv()
        store.store(TOKENS, expected)
        calls = {
            "lookup": lambda: store.lookup(TOKENS),
            "retrieve": lambda: store.retrieve(TOKENS),
            "store": lambda: store.store(TOKENS, expected),
            "flush": store.flush,
            "clear": store.clear,
            "stats": store.stats,
            "pin": lambda: store.pin(TOKENS),
        }
        for name, call in calls.items():
            assert in_child(call).startswith("RuntimeError: the store must be used in process"), name
        assert in_child(store.close) == "nothing"
        assert torch.equal(store.retrieve(TOKENS, return_tuple=False)[0], expected)
    remote = signed(DictBackend(), None)
    assert remote.contains([key(0)]) == [False]
    assert in_child(lambda: remote.contains([key(0)])).startswith("RuntimeError: remote must be used in process")
    remote.close()
    disk = DiskTier([tmp_path / "another"], DISK_BYTES)
    assert in_child(lambda: disk.contains([key(0)])).startswith(TierError.__name__)
    disk.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_engine_is_its_processs_own():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=16)))
    [before] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    for call in (
        lambda: engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4)),
        lambda: engine.beam_search([[1, 2, 3]], BeamSearchParams(num_beams=2)),
        lambda: engine.compute([]),
    ):
        assert in_child(call).startswith("RuntimeError: the engine must be used in process")
    [after] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert after.token_ids == before.token_ids


LISTENING = """
import os, sys
def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # a thread of the store has closed it meanwhile
        return None
def listening():
    mine = {target(fd) for fd in os.listdir("/proc/self/fd")}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in mine and (fields[3] == "0A" or table.startswith("udp")):
                found.append(f"{table} {fields[1]}")
    return found
from transformers import LlamaConfig, LlamaForCausalLM
from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
def make(**options):
    settings = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=16), **options)
    engine = Engine.from_model(LlamaForCausalLM(config).eval(), settings)
    tiers = ("memory://?size=1MiB", f"disk://{sys.argv[1]}/{len(options)}?size=4MiB")
    with KVStore(KVStoreConfig(chunk_size=4, tiers=tiers), metadata_of(engine.cache, "m")) as store:
        engine.use_store(store)
        engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=4))
        return engine, listening()
print(make()[1])
try:
    import zmq, msgpack
except ImportError:
    print([])
else:
    from kvpage.observe.events import EventConfig
    print(make(events=EventConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"))[1])
"""


def test_nothing_listens_unless_asked(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, "-c", LISTENING, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    without, with_events = (ast.literal_eval(line) for line in run.stdout.splitlines()[-2:])
    assert without == []
    assert all(place.startswith("tcp 0100007F:") for place in with_events)


# --- oversize input ---------------------------------------------------------------------------------------------------


def test_oversize_requests_are_refused_and_change_nothing():
    manager = BlockManager(4, 16)
    before = manager.stats()
    for tokens in ([2**31], [2**63], [-(2**40)]):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            manager.allocate("a", tokens)
    with pytest.raises(kvpage.OutOfBlocks):
        manager.allocate("a", list(range(10_000)))
    assert manager.stats() == before
    manager.check()
    with pytest.raises(ValueError):
        KVStore(KVStoreConfig(chunk_size=16), KVStoreMetadata("m" * (1 << 20)))
    with pytest.raises(ValueError):
        manager.allocate("a", [1, 2, 3], namespace=bytes(1 << 20))
    assert manager.stats() == before
    tier = MemoryTier(1 << 20)
    assert tier.create(key(0), 1 << 50) is None


WITHOUT_ASSERTS = """
import kvpage, torch
from kvpage import BlockManager
assert False, "asserts are on"
manager = BlockManager(4, 16)
manager.allocate("a", [1, 2, 3])
refused = 0
for call in (
    lambda: manager.allocate("a", [1]),
    lambda: manager.release("b"),
    lambda: manager.commit("a", [5] * 4),
    lambda: manager.allocate("b", [1], namespace="text"),
    lambda: kvpage.BlockPool(4).release([2]),
    lambda: kvpage.BlockPool(-1),
):
    try:
        call()
    except (ValueError, TypeError, KeyError):
        refused += 1
manager.check()
print(refused)
"""


def test_bad_input_is_refused_without_asserts(tmp_path):
    command = [sys.executable, "-O", "-c", WITHOUT_ASSERTS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert run.stdout.split() == ["6"], run.stdout + run.stderr
