// Matrices of small elements with rows and columns exchanged, in memory.
//
//   to[column * to_stride + row * element_bytes] = from[row * from_stride + column * element_bytes]
//
// On x86-64 by squares that fill registers; one source is compiled for each instruction set, the best is chosen at run
// time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

// Strides in bytes; the two matrices must not overlap.
struct Transposition {
  std::byte* to;
  int64_t to_stride;
  const std::byte* from;
  int64_t from_stride;
  int64_t num_rows, num_columns;  // of `from`

  // From a row and a column on, so many of them.
  Transposition part(int64_t element_bytes, int64_t row, int64_t column, int64_t rows, int64_t columns) const {
    return {to + column * to_stride + row * element_bytes, to_stride,
            from + row * from_stride + column * element_bytes, from_stride, rows, columns};
  }
};

// Whether there is a transposition of elements of this size: 1, 2, 4, 8 or 16.
inline bool can_transpose(int64_t element_bytes) {
  return element_bytes > 0 && element_bytes <= 16 && (element_bytes & (element_bytes - 1)) == 0;
}

struct TransposeKernel {
  const char* name;
  void (*transpose)(int64_t element_bytes, const Transposition& matrix);
  // The same past the processor's cache, after which the thread has to fence; false, and nothing is done, where whole
  // lines do not come out one by one. Null where the instruction set has no lines of its own.
  bool (*stream)(int64_t element_bytes, const Transposition& matrix);
};

// The best for this machine; or the one of that name, for tests (InvalidArgument if this machine lacks it).
const TransposeKernel& transpose_kernel();
const TransposeKernel& transpose_kernel(const char* name);

inline void transpose(int64_t element_bytes, const Transposition& matrix) {
  transpose_kernel().transpose(element_bytes, matrix);
}

inline bool transpose_past_cache(int64_t element_bytes, const Transposition& matrix) {
  const TransposeKernel& kernel = transpose_kernel();
  return kernel.stream && kernel.stream(element_bytes, matrix);
}

extern const TransposeKernel transpose_kernel_base;
#if defined(__x86_64__)
extern const TransposeKernel transpose_kernel_avx2, transpose_kernel_avx512;
#endif

}  // namespace kvpage
