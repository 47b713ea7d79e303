"""Which tests are asked about a file's mutants: those of that part, the ones that take long left out."""

MANAGER = [
    "tests/test_block_manager.py",
    "tests/test_block_manager_edges.py",
    "tests/test_block_manager_refusals.py",
    "tests/test_block_manager_swaps.py",
    "tests/test_block_space.py",
    "tests/test_left_over.py",
]
SCHEDULER = [
    "tests/serving/test_scheduler_edges.py",
    "tests/serving/test_scheduler_queue.py",
    "tests/serving/test_scheduler.py",
]
STORE = [
    "tests/store/test_known_dtype.py",
    "tests/store/test_kv_store_edges.py",
    "tests/store/test_kv_store.py",
    "tests/store/test_store_blocks.py",
    "tests/store/test_layer_load.py",
]
RECORD = ["tests/store/test_record.py", "tests/store/test_codec.py"]
TREE = [
    "tests/test_tree_edges.py",
    "tests/test_prefix_tree.py",
    "tests/test_tree_hits.py",
    "tests/test_tree_log.py",
    "tests/test_left_over.py",
]
COPIES = ["tests/test_copy_plan_edges.py", "tests/test_copy_plan_overlap.py", "tests/test_copy_plan.py"]
TOKENS = ["tests/test_native_kinds.py"]

SUITES = {
    "kvpage/block_manager.py": MANAGER,
    "kvpage/serving/scheduler.py": SCHEDULER,
    "kvpage/store/record.py": RECORD,
    "kvpage/store/kv_store.py": STORE,
    "csrc/prefix_tree.cpp": TREE,
    "csrc/prefix_tree_tiers.cpp": TREE,
    "csrc/prefix_tree_log.cpp": TREE,
    "csrc/copy_plan.cpp": COPIES,
    "csrc/token_move.cpp": TOKENS,
}
