#include "tokens/reshape_cache.h"

#include <bit>
#include <vector>

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"
#include "tokens/move_tokens.h"
#include "tokens/tabled_moves.h"

namespace kvpage {
namespace {

constexpr int64_t kPadSlot = -1;
constexpr int64_t kGrainBytes = 1 << 20;  // a thread: starting one costs as much as copying a fifth of it

// The slots seen so far: open addressing, at most half full, so that its cost follows the tokens and not the cache.
class SlotSet {
 public:
  explicit SlotSet(int64_t num_slots)
      : table_(std::bit_ceil(static_cast<uint64_t>(2 * num_slots + 1)), kPadSlot), mask_(table_.size() - 1) {}

  bool insert(int64_t slot) {
    for (uint64_t i = static_cast<uint64_t>(slot) & mask_;; i = (i + 1) & mask_) {
      if (table_[i] == slot) return false;
      if (table_[i] == kPadSlot) return table_[i] = slot, true;
    }
  }

 private:
  std::vector<int64_t> table_;
  uint64_t mask_;
};

void check_slots(const ReshapeCache& args) {
  const int64_t num_slots = args.num_blocks * args.block_size;
  SlotSet seen(args.num_tokens);
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t slot = args.slot_mapping[token];
    if (slot == kPadSlot) continue;
    check(slot >= 0 && slot < num_slots, "slot_mapping[", token, "] must be -1 or in [0, ", num_slots, "), got ", slot);
    check(seen.insert(slot), "slot_mapping must name a slot once, got ", slot, " twice");
  }
}

// How many tokens from `token` on go to slots of one block that follow each other.
int64_t run_length(const ReshapeCache& args, int64_t token, int64_t end) {
  const int64_t slot = args.slot_mapping[token], most = args.block_size - slot % args.block_size;
  int64_t count = 1;
  while (count < most && token + count < end && args.slot_mapping[token + count] == slot + count) ++count;
  return count;
}

}  // namespace

void reshape_and_cache(const ReshapeCache& args) {
  check_moves({args.parts, static_cast<size_t>(args.num_parts)}, args.num_heads, args.num_tokens);
  check_blocks_of_cache(args.num_blocks, args.block_size);
  check_slots(args);
  int64_t work = 0;
  for (int i = 0; i < args.num_parts; ++i) work += args.num_tokens * args.num_heads * args.parts[i].row_bytes();
  const bool streaming = work >= streaming_threshold();
  const TabledMoves parts = TabledMoves::for_writes(args.parts, args.num_parts, args.num_heads, args.num_tokens);
  parallel_for(args.num_tokens, useful_threads(work, kGrainBytes, args.max_threads), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin, count; token < end; token += count) {
      const int64_t slot = args.slot_mapping[token];
      count = 1;
      if (slot == kPadSlot) continue;
      count = run_length(args, token, end);
      for (int i = 0; i < args.num_parts; ++i)
        write_tokens(parts[i], args.num_heads, slot / args.block_size, slot % args.block_size, count,
                     parts[i].rows.row(token), streaming);
    }
    if (streaming) end_streaming();
  });
}

}  // namespace kvpage
