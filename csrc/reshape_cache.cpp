#include "reshape_cache.h"

#include <bit>
#include <cstring>
#include <vector>

#include "check.h"
#include "parallel.h"

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

// Copies the heads of one token; one memcpy where they lie side by side on both ends.
void copy_heads(std::byte* dst, int64_t dst_stride, const std::byte* src, int64_t src_stride, int64_t bytes,
                int64_t num_heads) {
  if (dst_stride == bytes && src_stride == bytes) {
    std::memcpy(dst, src, static_cast<size_t>(bytes * num_heads));
    return;
  }
  for (int64_t head = 0; head < num_heads; ++head)
    std::memcpy(dst + head * dst_stride, src + head * src_stride, static_cast<size_t>(bytes));
}

}  // namespace

void reshape_and_cache(const ReshapeCache& args) {
  check_slots(args);
  const int64_t work = args.num_tokens * args.num_heads * (args.key_bytes + args.value_bytes);
  parallel_for(args.num_tokens, useful_threads(work, kGrainBytes, args.max_threads), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slot_mapping[token];
      if (slot == kPadSlot) continue;
      const int64_t block_id = slot / args.block_size, offset = slot % args.block_size;
      copy_heads(args.key_cache.row(block_id, offset), args.key_cache.head_stride, args.key.row(token),
                 args.key.head_stride, args.key_bytes, args.num_heads);
      copy_heads(args.value_cache.row(block_id, offset), args.value_cache.head_stride, args.value.row(token),
                 args.value.head_stride, args.value_bytes, args.num_heads);
    }
  });
}

}  // namespace kvpage
