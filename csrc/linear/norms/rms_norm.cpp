#include "linear/norms/rms_norm.h"

#include "base/check.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 256 << 10;  // of rows for a thread

void check_args(const RmsNorm& args) {
  const int type = static_cast<int>(args.type), order = static_cast<int>(args.order);
  check(type >= 0 && type <= static_cast<int>(RowType::kFloat16), "type must be 0, 1 or 2, got ", type);
  check(order == 0 || order == 1, "order must be 0 or 1, got ", order);
  check(args.num_rows >= 0 && args.size >= 0, "sizes must be at least 0, got ", args.num_rows, " and ", args.size);
}

}  // namespace

void rms_norm(const RmsNorm& args) {
  check_args(args);
  const int64_t bytes = args.num_rows * args.size * row_element_bytes(args.type, 0);
  parallel_for(args.num_rows, useful_threads(bytes, kGrainBytes, args.max_threads), [&](int64_t begin, int64_t end) {
    const auto at = [](const Matrix& rows, int64_t row) {
      return rows.data ? rows.data + row * rows.row_stride : nullptr;
    };
    for (int64_t i = begin; i < end; ++i)
      args.kernel->normalize(args.type, {at(args.x, i), at(args.residual, i), args.weight, at(args.sum, i),
                                         at(args.out, i), args.size, args.eps, args.offset, args.order});
  });
}

}  // namespace kvpage
