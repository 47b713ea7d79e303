#include "recurrence/recurrence.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kGrain = 32 << 10;  // elements of states, each passed once for a token

void check_args(const Recurrence& args) {
  const int decays = static_cast<int>(args.decays);
  check(decays >= 0 && decays <= static_cast<int>(Decay::kOfElement), "decay must be 0, 1 or 2, got ", decays);
  const int64_t least = std::min({args.num_sequences, args.num_tokens, args.num_keys, args.num_columns});
  check(least >= 0, "sizes must be at least 0, got ", least);
  check(args.num_key_heads > 0 && args.num_heads >= 0 && args.num_heads % args.num_key_heads == 0,
        "num_heads must be a multiple of num_key_heads, got ", args.num_heads, " and ", args.num_key_heads);
}

// A thread's own: the state of some columns, as steps need it.
class Slab {
 public:
  explicit Slab(const Recurrence& args)
      : args_(args),
        state_(static_cast<size_t>(args.num_keys * kRecurrenceColumns)),
        rates_(args.decays == Decay::kOfElement ? state_.size() : 0),
        decays_(static_cast<size_t>(args.num_keys)) {}

  // All tokens of one sequence, for the columns of a head from `first` on.
  void pass(int64_t sequence, int64_t head, int64_t first) {
    const RecurrentState& all = args_.state;
    const int64_t count = std::min(kRecurrenceColumns, args_.num_columns - first);
    float* const at = all.data + sequence * all.sequence_stride + head * all.head_stride + first * all.column_stride;
    for_each(count, [&](int64_t key, int64_t column, float& kept) {
      kept = at[key * all.key_stride + column * all.column_stride];
    });
    fill_rates(head, first, count);
    for (int64_t token = 0; token < args_.num_tokens; ++token)
      step(sequence * args_.num_tokens + token, head, first, count);
    for_each(count, [&](int64_t key, int64_t column, float& kept) {
      at[key * all.key_stride + column * all.column_stride] = kept;
    });
  }

 private:
  // each(key, column, where it is in scratch), for `count` columns.
  template <typename Each>
  void for_each(int64_t count, const Each& each) {
    for (int64_t key = 0; key < args_.num_keys; ++key)
      for (int64_t column = 0; column < count; ++column) each(key, column, state_[key * kRecurrenceColumns + column]);
  }

  void fill_rates(int64_t head, int64_t first, int64_t count) {
    if (args_.decays != Decay::kOfElement) return;
    for (int64_t key = 0; key < args_.num_keys; ++key) {
      const float* const from = args_.rates + (head * args_.num_keys + key) * args_.num_columns + first;
      std::copy_n(from, count, rates_.begin() + key * kRecurrenceColumns);
    }
  }

  void step(int64_t row, int64_t head, int64_t first, int64_t count) {
    const int64_t of_head = row * args_.num_heads + head;
    const int64_t key_head = row * args_.num_key_heads + head / (args_.num_heads / args_.num_key_heads);
    const int64_t at = of_head * args_.num_columns + first;
    const int64_t decay = args_.decays == Decay::kOfHead  ? of_head
                          : args_.decays == Decay::kOfKey ? of_head * args_.num_keys
                                                          : at;
    args_.kernel->step(args_.decays, args_.factor != nullptr,
                       {state_.data(), rates_.data(), decays_.data(), args_.query + key_head * args_.num_keys,
                        args_.key + key_head * args_.num_keys, args_.decay + decay, args_.value + at, args_.out + at,
                        args_.num_keys, count, args_.factor ? args_.factor[of_head] : 1.0f});
  }

  const Recurrence& args_;
  std::vector<float> state_, rates_, decays_;  // columns past the last one stay what they are: they reach no other
};

}  // namespace

void recurrence(const Recurrence& args) {
  check_args(args);
  const int64_t num_slabs = (args.num_columns + kRecurrenceColumns - 1) / kRecurrenceColumns;
  const int64_t num_items = args.num_sequences * args.num_heads * num_slabs;
  if (num_items == 0 || args.num_tokens == 0) return;
  const int64_t work = num_items * args.num_tokens * args.num_keys * kRecurrenceColumns;
  parallel_for(num_items, useful_threads(work, kGrain, args.max_threads), [&](int64_t begin, int64_t end) {
    Slab slab(args);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t unit = item / num_slabs;
      slab.pass(unit / args.num_heads, unit % args.num_heads, item % num_slabs * kRecurrenceColumns);
    }
  });
}

}  // namespace kvpage
