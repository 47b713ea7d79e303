"""Which tests are asked about a file's mutants: those of that part, the ones that take long left out."""

MANAGER = [
    "tests/blocks/test_block_manager.py",
    "tests/blocks/test_block_manager_edges.py",
    "tests/blocks/test_block_manager_refusals.py",
    "tests/blocks/test_block_manager_swaps.py",
    "tests/blocks/test_block_manager_interrupts.py",
    "tests/blocks/test_companions.py",
    "tests/blocks/test_load_or_compute.py",
    "tests/blocks/test_block_space.py",
    "tests/native/test_left_over.py",
]
GROUPS = [
    "tests/blocks/hybrid/test_checkpoint.py",
    "tests/blocks/hybrid/test_hybrid_edges.py",
    "tests/blocks/hybrid/test_held.py",
    "tests/blocks/hybrid/test_hybrid_manager.py",
    "tests/blocks/hybrid/test_hybrid_refusals.py",
    "tests/blocks/hybrid/test_hybrid_tiers.py",
    "tests/blocks/hybrid/test_checkpoint_budget.py",
    "tests/blocks/hybrid/test_marks_together.py",
    "tests/blocks/hybrid/test_parting.py",
    "tests/blocks/test_explain.py",
    "tests/blocks/groups/test_group_life.py",
    "tests/blocks/groups/test_windowed_manager.py",
]
ENGINE_STATES = ["tests/serving/states/test_state_pass.py", "tests/serving/states/test_engine_states.py"]
MODEL_STATES = [
    "tests/serving/states/test_state_pass.py",
    "tests/serving/states/test_model_states.py",
    "tests/serving/states/test_packed_rows.py",
]
SCHEDULER = [
    "tests/serving/loop/test_scheduler_edges.py",
    "tests/serving/loop/test_scheduler_queue.py",
    "tests/serving/loop/test_scheduler.py",
]
STORE = [
    "tests/store/load/test_known_dtype.py",
    "tests/store/test_kv_store_edges.py",
    "tests/store/test_kv_store.py",
    "tests/store/test_kv_store_closing.py",
    "tests/store/test_several_tiers.py",
    "tests/store/test_store_blocks.py",
    "tests/store/load/test_layer_load.py",
    "tests/store/test_store_life.py",
]
RECORD = [
    "tests/store/records/test_record.py",
    "tests/store/records/test_codec.py",
    "tests/store/sealed/test_sealed_tier.py",
]
STATES = ["tests/store/states/test_state_records.py", "tests/store/states/test_state_index.py"]
TREE = [
    "tests/blocks/test_tree_edges.py",
    "tests/blocks/test_prefix_tree.py",
    "tests/blocks/test_prefix_tree_eviction.py",
    "tests/blocks/test_tree_hits.py",
    "tests/blocks/test_tree_life.py",
    "tests/blocks/test_tree_log.py",
    "tests/native/test_left_over.py",
]
COPIES = ["tests/ops/test_copy_plan_edges.py", "tests/ops/test_copy_plan_overlap.py", "tests/ops/test_copy_plan.py"]
LAUNCHES = ["tests/kernels/test_attention_plan.py", "tests/kernels/test_attention_arguments.py"]
SLOTS = ["tests/extras/test_slots.py"]
TOKENS = ["tests/native/test_native_kinds.py"]

SUITES = {
    "kvpage/blocks/manager.py": MANAGER,
    "kvpage/blocks/load_or_compute.py": ["tests/blocks/test_load_or_compute.py", "tests/blocks/test_explain.py"],
    "kvpage/blocks/drafted_manager.py": ["tests/blocks/groups/test_drafted_manager.py"],
    "kvpage/blocks/space.py": MANAGER,
    "kvpage/blocks/sequences/growth.py": MANAGER,
    "kvpage/blocks/sequences/sequences.py": MANAGER,
    "kvpage/blocks/groups/all_groups.py": GROUPS,
    "kvpage/blocks/groups/group.py": GROUPS,
    "kvpage/blocks/groups/window_group.py": GROUPS,
    "kvpage/blocks/groups/window_blocks.py": GROUPS,
    "kvpage/blocks/groups/window_table.py": GROUPS,
    "kvpage/blocks/groups/windows.py": GROUPS,
    "kvpage/blocks/groups/states/anchors.py": GROUPS,
    "kvpage/blocks/groups/states/sequence_states.py": GROUPS,
    "kvpage/blocks/groups/states/state_group.py": GROUPS,
    "kvpage/blocks/groups/states/state_space.py": GROUPS,
    "kvpage/blocks/groups/states/checkpoint.py": GROUPS,
    "kvpage/blocks/groups/states/evicted.py": GROUPS,
    "kvpage/blocks/groups/states/reach.py": GROUPS,
    "kvpage/blocks/groups/states/marks.py": GROUPS,
    "kvpage/blocks/groups/states/slot_tier.py": GROUPS,
    "kvpage/blocks/explain.py": ["tests/blocks/test_explain.py"],
    "kvpage/cache/state_cache.py": ["tests/cache/test_state_cache.py"],
    "kvpage/layout/groups.py": ["tests/layout/test_groups.py"],
    "kvpage/serving/loop/batch/request_blocks.py": ENGINE_STATES,
    "kvpage/serving/loop/batch/step_groups.py": ENGINE_STATES,
    "kvpage/serving/assembly/state_parts.py": ENGINE_STATES,
    "kvpage/serving/model/states/continuation.py": MODEL_STATES,
    "kvpage/serving/model/states/held_states.py": ["tests/serving/states/test_held_states.py", *MODEL_STATES],
    "kvpage/serving/model/states/mixer.py": MODEL_STATES,
    "kvpage/serving/model/states/mixer_forward.py": MODEL_STATES,
    "kvpage/serving/model/states/model_states.py": MODEL_STATES,
    "kvpage/serving/model/states/piece_cache.py": MODEL_STATES,
    "kvpage/serving/model/states/row_cuts.py": MODEL_STATES,
    "kvpage/serving/model/states/state_pass.py": MODEL_STATES,
    "kvpage/serving/model/states/scan_start.py": ["tests/serving/states/test_scan_start.py"],
    "kvpage/serving/model/states/scan_step.py": ["tests/serving/states/test_scan_step.py"],
    "kvpage/serving/loop/scheduler.py": SCHEDULER,
    "kvpage/kernels/attention_plan.py": LAUNCHES,
    "kvpage/kernels/attention_launch.py": LAUNCHES,
    "kvpage/kernels/attention_constants.py": LAUNCHES,
    "kvpage/store/records/record.py": RECORD,
    "kvpage/store/kv_store.py": STORE,
    "kvpage/store/states/state_index.py": STATES,
    "kvpage/store/states/state_records.py": STATES,
    "csrc/slots/slot_allocator.cpp": SLOTS,
    "csrc/slots/slot_tree.cpp": SLOTS,
    "csrc/states/slot_pool.cpp": ["tests/blocks/hybrid/test_slot_pool.py"],
    "csrc/tree/prefix_tree.cpp": TREE,
    "csrc/tree/prefix_tree_entries.cpp": [*TREE, "tests/blocks/test_tree_entries.py"],
    "csrc/tree/prefix_tree_insert.cpp": TREE,
    "csrc/tree/prefix_tree_forget.cpp": TREE,
    "csrc/tree/prefix_tree_tiers.cpp": TREE,
    "csrc/tree/prefix_tree_log.cpp": TREE,
    "csrc/copy/plan/copy_geometry.cpp": COPIES,
    "csrc/copy/plan/copy_plan.cpp": COPIES,
    "csrc/copy/plan/overlap.cpp": COPIES,
    "csrc/tokens/token_move.cpp": TOKENS,
}
