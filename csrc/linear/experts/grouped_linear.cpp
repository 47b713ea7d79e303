#include "linear/experts/grouped_linear.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kGrain = 128 << 10;  // elements of w for a thread, as of `linear`

void check_args(const GroupedLinear& args) {
  const int type = static_cast<int>(args.type), activation = static_cast<int>(args.activation);
  check(type >= 0 && type <= static_cast<int>(RowType::kFloat16), "type must be 0, 1 or 2, got ", type);
  check(activation >= 0 && activation <= static_cast<int>(Activation::kGeluTanh), "activation must be 0, 1 or 2, got ",
        activation);
  check(!args.is_turned || activation == 0, "turned weights must have no activation, got ", activation);
  check(args.num_groups >= 0 && args.num_columns >= 0 && args.size >= 0, "sizes must be at least 0, got ",
        args.num_groups, ", ", args.num_columns, " and ", args.size);
  int64_t begin = 0;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    check(args.ends[group] >= begin, "ends must ascend, got ", args.ends[group], " after ", begin);
    begin = args.ends[group];
  }
  for (int64_t row = 0; row < begin; ++row)
    check(args.rows[row] >= 0 && args.rows[row] < args.num_x_rows, "rows must be in [0, ", args.num_x_rows, "), got ",
          args.rows[row]);
}

struct Group {
  int64_t number, begin, end;  // rows of out
};

std::vector<Group> groups_with_rows(const GroupedLinear& args) {
  std::vector<Group> groups;
  int64_t begin = 0;
  for (int64_t number = 0; number < args.num_groups; begin = args.ends[number++])
    if (begin < args.ends[number]) groups.push_back({number, begin, args.ends[number]});
  return groups;
}

const std::byte* bias_of(const GroupedLinear& args, const Group& group) {
  return args.bias ? args.bias + group.number * args.num_columns * row_element_bytes(args.type, 0) : nullptr;
}

// --- weights as layers keep them: `linear`, on copies of the rows ---------------------------------------------------

void multiply_group(const GroupedLinear& args, const Group& group, int max_threads) {
  const int64_t bytes = args.size * row_element_bytes(args.type, 0), num_rows = group.end - group.begin;
  std::vector<std::byte> x(static_cast<size_t>(num_rows * bytes));
  for (int64_t row = 0; row < num_rows; ++row)
    std::memcpy(x.data() + row * bytes, args.x.data + args.rows[group.begin + row] * args.x.row_stride,
                static_cast<size_t>(bytes));
  const auto of_group = [&](const GroupWeights& weights) {
    return Matrix{weights.data + group.number * weights.group_stride, weights.row_stride};
  };
  linear({{x.data(), bytes},
          of_group(args.w),
          args.activation == Activation::kNone ? Matrix{} : of_group(args.up),
          {args.out.data + group.begin * args.out.row_stride, args.out.row_stride},
          bias_of(args, group),
          num_rows,
          args.num_columns,
          args.size,
          args.type,
          args.activation,
          max_threads,
          args.kernel});
}

// --- turned weights: panels of columns, of one group after the other -------------------------------------------------

// A thread's own. Parts begin on a cache line.
class TurnedScratch {
 public:
  explicit TurnedScratch(int64_t size)
      : x_stride((size + kLine) / kLine * kLine),
        words_(static_cast<size_t>(kLine + kTurnedPacked + kTurnedRows * (kTurnedColumns + x_stride))),
        first_(words_.data()) {
    void* place = first_;
    size_t space = words_.size() * kTurnedWord;
    first_ = static_cast<float*>(std::align(64, (words_.size() - kLine) * kTurnedWord, place, space));
  }

  std::byte* packed() const { return reinterpret_cast<std::byte*>(first_); }
  float* sums() const { return first_ + kTurnedPacked; }
  std::byte* x(int64_t row) const {
    return reinterpret_cast<std::byte*>(sums() + kTurnedRows * kTurnedColumns + row * x_stride);
  }

  const int64_t x_stride;

 private:
  static constexpr int64_t kLine = 16;  // words
  std::vector<float> words_;
  float* first_;
};

void multiply_panel(const GroupedLinear& args, const Group& group, int64_t first, const TurnedScratch& scratch) {
  const int64_t element = row_element_bytes(args.type, 0);
  const std::byte* const bias = bias_of(args, group);
  for (int64_t begin = group.begin; begin < group.end; begin += kTurnedRows) {
    const int64_t num_rows = std::min(kTurnedRows, group.end - begin);
    for (int64_t row = 0; row < num_rows; ++row)
      args.turned->stage(args.type, args.x.data + args.rows[begin + row] * args.x.row_stride, args.size,
                         scratch.x(row));
    args.turned->multiply({args.type, scratch.x(0), scratch.x_stride, num_rows, args.size,
                           args.w.data + group.number * args.w.group_stride + first * element, args.w.row_stride,
                           std::min(kTurnedColumns, args.num_columns - first), bias ? bias + first * element : nullptr,
                           args.out.data + begin * args.out.row_stride + first * element, args.out.row_stride,
                           scratch.sums(), scratch.packed()});
  }
}

void multiply_turned(const GroupedLinear& args, const std::vector<Group>& groups, int num_threads) {
  const int64_t num_panels = (args.num_columns + kTurnedColumns - 1) / kTurnedColumns;
  parallel_for(static_cast<int64_t>(groups.size()) * num_panels, num_threads, [&](int64_t begin, int64_t end) {
    const TurnedScratch scratch(args.size);
    for (int64_t item = begin; item < end; ++item)
      multiply_panel(args, groups[item / num_panels], item % num_panels * kTurnedColumns, scratch);
  });
}

}  // namespace

void grouped_linear(const GroupedLinear& args) {
  check_args(args);
  const std::vector<Group> groups = groups_with_rows(args);
  if (groups.empty() || args.num_columns == 0) return;
  const int64_t num_groups = static_cast<int64_t>(groups.size());
  const int64_t work = args.num_columns * args.size * (num_groups + (groups.back().end - groups.front().begin) / 8);
  const int num_threads = useful_threads(work, kGrain, args.max_threads);
  if (args.is_turned) return multiply_turned(args, groups, num_threads);
  const bool shares_groups = num_groups >= 2 * num_threads;  // else threads share each group's product
  parallel_for(num_groups, shares_groups ? num_threads : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply_group(args, groups[i], shares_groups ? 1 : num_threads);
  });
}

}  // namespace kvpage
