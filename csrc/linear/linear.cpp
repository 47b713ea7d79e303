#include "linear/linear.h"

#include <algorithm>
#include <memory>
#include <new>

#include "base/check.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kMostStaged = 16 << 20;    // bytes of x in scratch at once
constexpr int64_t kGrain = 128 << 10;        // elements of w for a thread, read once for 8 rows of x
constexpr int64_t kGrainStaged = 512 << 10;  // of x for a thread

// Bytes on a cache line's boundary.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : data_(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), std::align_val_t(64)))) {}
  std::byte* data() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t(64)); }
  };
  std::unique_ptr<std::byte, Delete> data_;
};

void check_args(const Linear& args) {
  const int type = static_cast<int>(args.type), activation = static_cast<int>(args.activation);
  check(type >= 0 && type <= static_cast<int>(RowType::kFloat16), "type must be 0, 1 or 2, got ", type);
  check(activation >= 0 && activation <= static_cast<int>(Activation::kGeluTanh), "activation must be 0, 1 or 2, got ",
        activation);
  check(args.num_rows >= 0 && args.num_columns >= 0 && args.size >= 0, "sizes must be at least 0, got ", args.num_rows,
        ", ", args.num_columns, " and ", args.size);
}

LinearTask whole_task(const Linear& args, int64_t first_row, int64_t num_rows, const std::byte* staged) {
  return {args.type,
          args.activation,
          KBlocks(args.size),
          staged,
          num_rows,
          0,
          num_rows,
          args.w.data,
          args.up.data,
          args.w.row_stride,
          args.up.row_stride,
          args.num_columns,
          0,
          args.num_columns,
          args.bias,
          args.out.data + first_row * args.out.row_stride,
          args.out.row_stride};
}

void stage_rows(const Linear& args, const LinearTask& whole, int64_t first_row) {
  const int64_t bytes = whole.num_rows * args.size * 4;
  parallel_for(whole.num_rows, useful_threads(bytes, kGrainStaged, args.max_threads), [&](int64_t begin, int64_t end) {
    LinearTask task = whole;
    task.first_row = begin, task.end_row = end;
    args.kernel->stage(task, args.x.data + first_row * args.x.row_stride, args.x.row_stride);
  });
}

// A thread's own. The tile starts so far from a page's beginning that a load from x, whose rows lie half a page apart,
// does not look like one of what was just stored there.
class ThreadScratch {
 public:
  ThreadScratch() : bytes_((kSums + kGap + kTileScratch) * static_cast<int64_t>(sizeof(float))) {}
  LinearScratch place() const {
    float* const sums = reinterpret_cast<float*>(bytes_.data());
    return {sums, sums + kSums + kGap};
  }

 private:
  static constexpr int64_t kSums = kRowBlock * kPanelColumns, kGap = 272;
  Scratch bytes_;
};

// The first row of a block, which has at most kRowBlock of them. Blocks end where tiles of rows do, so that no tile is
// lower than it need be.
int64_t block_begin(int64_t num_rows, int64_t unit, int64_t block, int64_t num_blocks) {
  const int64_t num_units = (num_rows + unit - 1) / unit;
  return std::min(num_units * block / num_blocks * unit, num_rows);
}

// Columns in panels, rows in blocks: a thread takes one panel after the other, for a block of rows.
void multiply_rows(const Linear& args, const LinearTask& whole) {
  const int64_t columns_per_panel = args.activation == Activation::kNone ? kPanelColumns : kPanelColumns / 2;
  const int64_t num_panels = (args.num_columns + columns_per_panel - 1) / columns_per_panel;
  const int64_t num_blocks = (whole.num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t work = args.num_columns * args.size * (1 + whole.num_rows / 8);
  parallel_for(num_panels * num_blocks, useful_threads(work, kGrain, args.max_threads),
               [&](int64_t begin, int64_t end) {
                 const ThreadScratch scratch;
                 while (begin < end) {
                   const int64_t block = begin / num_panels, panel = begin % num_panels;
                   const int64_t count = std::min(end - begin, num_panels - panel);
                   LinearTask task = whole;
                   task.first_row = block_begin(whole.num_rows, args.kernel->row_unit, block, num_blocks);
                   task.end_row = block_begin(whole.num_rows, args.kernel->row_unit, block + 1, num_blocks);
                   task.first_column = panel * columns_per_panel;
                   task.end_column = std::min((panel + count) * columns_per_panel, args.num_columns);
                   args.kernel->multiply(task, scratch.place());
                   begin += count;
                 }
               });
}

}  // namespace

void linear(const Linear& args) {
  check_args(args);
  if (args.num_rows == 0 || args.num_columns == 0) return;
  const KBlocks blocks(args.size);
  const int64_t row_bytes = blocks.num_blocks * blocks.row_size() * 4;
  const int64_t most_rows = std::max(kRowBlock, kMostStaged / std::max<int64_t>(row_bytes, 1));
  const Scratch staged(std::min(most_rows, args.num_rows) * row_bytes);
  for (int64_t row = 0; row < args.num_rows; row += most_rows) {
    const LinearTask whole = whole_task(args, row, std::min(most_rows, args.num_rows - row), staged.data());
    stage_rows(args, whole, row);
    multiply_rows(args, whole);
  }
}

}  // namespace kvpage
