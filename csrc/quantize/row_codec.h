// RowCodec: what is between the elements of a row and the 8 bits that a cache keeps of each.
//
//   fp8    code = round(x / scale), to nearest even, saturating; a NaN stays one        x = code * scale
//   int8   scale = largest magnitude of the row / 127;  code = round(x / scale)         x = code * scale
//
// All in fp32, as kvpage.ops.reference has it, and bit for bit the same. One source is compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpage {

enum class RowType { kFloat32, kBfloat16, kFloat16, kBits };  // kBits: as the cache has it
enum class Codec { kBits, kE4m3, kE5m2, kInt8 };

inline int64_t row_element_bytes(RowType type, int64_t cache_element_bytes) {
  return type == RowType::kBits ? cache_element_bytes : type == RowType::kFloat32 ? 4 : 2;
}

struct EncodeTable;
struct DecodeTable;

// Rows of `size` elements, and where their codes go. `ahead`: so many bytes behind each row lies what is read soon after,
// which is asked for meanwhile; 0 asks for nothing.
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
struct RowCodec {
  const char* name;
  // The codes of `size` elements. `scale` is given for fp8; returns the row's scale (int8's own).
  float (*encode)(Codec codec, RowType type, const std::byte* row, int64_t size, float scale, std::byte* codes,
                  bool streaming);
  void (*decode)(Codec codec, RowType type, const std::byte* codes, int64_t size, float scale, std::byte* row,
                 bool streaming);
  // The same for several rows of bf16 at once: int8, and the scale of each.
  void (*encode_int8_bf16)(const RowBatch& batch, float* scales);
  // The same for many rows with one scale, by code_table.h: rows of bf16 encoded, of bf16 or fp16 decoded. Null where
  // the instruction set has no such lookups.
  void (*encode_by_table)(const EncodeTable& table, const std::byte* row, int64_t size, std::byte* codes,
                          bool streaming);
  void (*decode_by_table)(const DecodeTable& table, const std::byte* codes, int64_t size, std::byte* row,
                          bool streaming);
};

// The best for this machine; or the one of that name, for tests (InvalidArgument if this machine lacks it).
const RowCodec& row_codec();
const RowCodec& row_codec(const char* name);
std::vector<const char*> row_codec_names();  // of all that this machine has, the best first

extern const RowCodec row_codec_base;
#if defined(__x86_64__)
extern const RowCodec row_codec_avx2, row_codec_avx512, row_codec_avx512bf16;
#endif

}  // namespace kvpage
