// QuantizeKernel: turns the elements of a row into codes of 8 bits, and codes into elements.
//
//   fp8    code = round(x / scale), to nearest even, saturating; a NaN stays one        x = code * scale
//   int8   scale = largest magnitude of the row / 127;  code = round(x / scale)         x = code * scale
//
// It computes in fp32 and equals kvpage.ops.reference bit for bit. One source is compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "simd/kernel_family.h"

namespace kvpage {

struct EncodeTable;
struct DecodeTable;

// Rows of `size` elements, and the place of their codes. `ahead`: the distance in bytes from a row to the memory that
// is read soon after, which is fetched meanwhile; 0 fetches nothing.
struct RowBatch {
  const std::byte* rows;
  int64_t row_stride;
  std::byte* codes;
  int64_t code_stride, num_rows, size, ahead = 0;

  const std::byte* row(int64_t i) const { return rows + i * row_stride; }
  std::byte* codes_of(int64_t i) const { return codes + i * code_stride; }
  RowBatch part(int64_t first, int64_t num) const {
    return {row(first), row_stride, codes_of(first), code_stride, num, size, ahead};
  }
};

// `streaming`: whole vectors are stored past the processor's cache where they can be; the caller fences.
struct QuantizeKernel {
  const char* name;
  // Encodes `size` elements. `scale` is given for fp8. Returns the row's scale, which int8 computes.
  float (*encode)(CodeType code_type, RowType type, const std::byte* row, int64_t size, float scale, std::byte* codes,
                  bool streaming);
  void (*decode)(CodeType code_type, RowType type, const std::byte* codes, int64_t size, float scale, std::byte* row,
                 bool streaming);
  // Encodes several rows of bf16 at once as int8, and computes the scale of each.
  void (*encode_int8_bf16)(const RowBatch& batch, float* scales);
  // Encode rows of bf16, or decode rows of bf16 or fp16, by the tables of one scale (code_table.h). Null for an
  // instruction set without such lookups.
  void (*encode_by_table)(const EncodeTable& table, const std::byte* row, int64_t size, std::byte* codes,
                          bool streaming);
  void (*decode_by_table)(const DecodeTable& table, const std::byte* codes, int64_t size, std::byte* row,
                          bool streaming);
};

const KernelFamily<QuantizeKernel>& quantize_kernels();

// quantize_kernels().best(), for files that are compiled once for each instruction set: they must not contain a
// template's code, of which the linker keeps one copy for all.
const QuantizeKernel& best_quantize_kernel();

KVPAGE_DECLARE_KERNELS(QuantizeKernel, quantize_kernel);
#if defined(__x86_64__)
extern const QuantizeKernel quantize_kernel_avx512bf16;
#endif

}  // namespace kvpage
