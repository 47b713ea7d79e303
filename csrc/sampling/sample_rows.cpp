#include "sampling/sample_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "base/check.h"
#include "base/parallel.h"
#include "sampling/philox.h"

namespace kvpage {
namespace {

constexpr int64_t kGrain = 128 << 10;  // for a thread: logits of greedy rows, which take 20 us
constexpr int64_t kDrawnWork = 6;      // of a logit of a drawn row, beside one of a greedy row
constexpr int64_t kPartsPerThread = 8;

void check_row(const RowRules& rules, int64_t row) {
  check(rules.temperature >= 0 && std::isfinite(rules.temperature), "temperature must be finite and not negative, got ",
        rules.temperature, " in row ", row);
  check(rules.top_k >= 0, "top_k must not be negative, got ", rules.top_k, " in row ", row);
  check(rules.top_p > 0 && rules.top_p <= 1, "top_p must be in (0, 1], got ", rules.top_p, " in row ", row);
  check(rules.least_score <= 0, "least_score must be at most 0, got ", rules.least_score, " in row ", row);
  check(rules.position >= 0, "position must not be negative, got ", rules.position, " in row ", row);
}

void check_args(const SampleRows& args) {
  check(args.vocab_size > 0 && args.vocab_size < INT32_MAX - SamplingScratch::kPadding,
        "vocab_size must be positive and fit into 32 bits, got ", args.vocab_size);
  const auto type = static_cast<int>(args.type);
  check(type >= 0 && type <= 2, "type must be 0, 1 or 2, got ", type);
  for (int64_t row = 0; row < args.num_rows; ++row) check_row(args.rules[row], row);
}

// The scratch of several threads, in one piece of memory, of which only used pages cost anything.
class ScratchMemory {
 public:
  ScratchMemory(int64_t vocab_size, int num_threads)
      : vocab_size_(vocab_size),
        stride_(8 * part(vocab_size) + part(SamplingScratch::groups(vocab_size)) + part(0) +
                5 * part(SamplingScratch::blocks(vocab_size))),
        memory_(static_cast<float*>(
            ::operator new(static_cast<size_t>(stride_ * num_threads) * sizeof(float), std::align_val_t(64)))) {}

  SamplingScratch of_thread(int thread) const {
    float* next = memory_.get() + thread * stride_;
    const auto take = [&next](int64_t size) {
      float* taken = next;
      next += part(size);
      return taken;
    };
    const auto take_pairs = [&](int64_t size) {
      float* taken = next;
      next += 2 * part(size);
      return taken;
    };
    const auto take_keys = [&](int64_t size) { return reinterpret_cast<int32_t*>(take(size)); };
    const int64_t groups = SamplingScratch::groups(vocab_size_), blocks = SamplingScratch::blocks(vocab_size_);
    SamplingScratch scratch{};
    scratch.row = take(vocab_size_), scratch.maxima = take(groups), scratch.tops = take(blocks);
    scratch.masses = reinterpret_cast<int64_t*>(take_pairs(blocks));
    scratch.sums = reinterpret_cast<int64_t*>(take_pairs(blocks));
    scratch.tail = take(0), scratch.keys = take_keys(vocab_size_), scratch.ids = take_keys(vocab_size_);
    scratch.weights = {take_keys(vocab_size_), take_keys(vocab_size_)};
    scratch.work = {take_keys(vocab_size_), {take_keys(vocab_size_), take_keys(vocab_size_)}};
    return scratch;
  }

 private:
  static int64_t part(int64_t size) { return (size + SamplingScratch::kPadding + 15) / 16 * 16; }

  struct Delete {
    void operator()(float* memory) const { ::operator delete(memory, std::align_val_t(64)); }
  };
  int64_t vocab_size_, stride_;
  std::unique_ptr<float, Delete> memory_;
};

int32_t choose(const SampleRows& args, const SamplingKernel& kernel, int64_t row, const SamplingScratch& scratch) {
  const RowRules& rules = args.rules[row];
  LogitsRow logits{args.logits + row * args.row_stride, args.type, args.vocab_size};
  if (args.ruled && args.ruled[row].rules) {
    const auto [ruling, tokens] = args.ruled[row];
    if (!kernel.widen(logits, scratch.row)) return -1;
    ruling->apply(scratch.row, args.vocab_size, tokens, ruling->num_prompt_tokens() + rules.position);
    logits = {reinterpret_cast<const std::byte*>(scratch.row), RowType::kFloat32, args.vocab_size};
  }
  const double point = rules.temperature == 0 ? 0 : philox_uniform(rules.seed, static_cast<uint64_t>(rules.position));
  const Choice choice{rules, point};
  return static_cast<int32_t>(kernel.choose(logits, choice, scratch));
}

int num_threads_for(const SampleRows& args) {
  const auto is_drawn = [](const RowRules& rules) { return rules.temperature > 0; };
  const int64_t num_drawn = std::count_if(args.rules, args.rules + args.num_rows, is_drawn);
  const int64_t work = (args.num_rows + (kDrawnWork - 1) * num_drawn) * args.vocab_size;
  return static_cast<int>(std::min<int64_t>(useful_threads(work, kGrain, args.max_threads), args.num_rows));
}

}  // namespace

void sample_rows(const SampleRows& args) {
  const SamplingKernel& kernel = sampling_kernels().named(args.kernel);
  if (args.num_rows == 0) return;
  check_args(args);
  const int num_threads = num_threads_for(args);
  const ScratchMemory memory(args.vocab_size, num_threads);
  const int64_t num_parts = num_threads == 1 ? 1 : std::min(args.num_rows, kPartsPerThread * num_threads);
  std::atomic<int64_t> next = 0;
  run_shares(num_threads, [&](int share) {
    const SamplingScratch scratch = memory.of_thread(share);
    for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < num_parts;) {
      const int64_t end = args.num_rows * (part + 1) / num_parts;
      for (int64_t row = args.num_rows * part / num_parts; row < end; ++row)
        args.tokens[row] = choose(args, kernel, row, scratch);
    }
  });
}

}  // namespace kvpage
