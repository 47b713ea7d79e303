// TransposeKernel: rows and columns of a matrix of small elements exchanged, in memory.
//
//   to[column * to_stride + row * element_bytes] = from[row * from_stride + column * element_bytes]
//
// On x86-64 by squares that fill registers; one source is compiled for each instruction set, the best is chosen at run
// time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/kernel_family.h"

namespace kvpage {

// Strides in bytes; the two matrices must not overlap.
struct Transposition {
  std::byte* to;
  int64_t to_stride;
  const std::byte* from;
  int64_t from_stride;
  int64_t num_rows, num_columns;  // of `from`

  // Returns the part from a row and a column on.
  Transposition part(int64_t element_bytes, int64_t row, int64_t column, int64_t rows, int64_t columns) const {
    return {to + column * to_stride + row * element_bytes,
            to_stride,
            from + row * from_stride + column * element_bytes,
            from_stride,
            rows,
            columns};
  }
};

// Returns whether elements of this size can be transposed: 1, 2, 4, 8 or 16 bytes.
inline bool can_transpose(int64_t element_bytes) {
  return element_bytes > 0 && element_bytes <= 16 && (element_bytes & (element_bytes - 1)) == 0;
}

struct TransposeKernel {
  const char* name;
  void (*transpose)(int64_t element_bytes, const Transposition& matrix);
  // Transposes past the processor's cache; the thread then fences. Returns false, and does nothing, where whole lines
  // do not come out one by one. Null for an instruction set whose registers are shorter than a line.
  bool (*stream)(int64_t element_bytes, const Transposition& matrix);
};

const KernelFamily<TransposeKernel>& transpose_kernels();

KVPAGE_DECLARE_KERNELS(TransposeKernel, transpose_kernel);

inline void transpose(int64_t element_bytes, const Transposition& matrix) {
  transpose_kernels().best().transpose(element_bytes, matrix);
}

inline bool transpose_past_cache(int64_t element_bytes, const Transposition& matrix) {
  const TransposeKernel& kernel = transpose_kernels().best();
  return kernel.stream && kernel.stream(element_bytes, matrix);
}

}  // namespace kvpage
