// Codecs and transpositions of an instruction set, for tests.
#include "bindings/bindings.h"

#include "bindings/addresses.h"
#include "quantize/code_table.h"
#include "copy/host/host_copy.h"
#include "quantize/row_codec.h"
#include "simd/transpose.h"

namespace kvpage {

namespace {

const RowCodec& codec_of(const std::string& name) { return name.empty() ? row_codec() : row_codec(name.c_str()); }

}  // namespace

// Rows through the codec of an instruction set, for tests.
void bind_codecs(py::module_& m) {
  m.def("_codecs", &row_codec_names);
  m.def("_codec_row", [](const std::string& name, bool encodes, int codec, int type, int64_t row, int64_t size,
                         float scale, int64_t codes, bool streaming) {
    const auto kind = static_cast<Codec>(codec);
    const auto row_type = static_cast<RowType>(type);
    const RowCodec& chosen = codec_of(name);
    if (encodes)
      return chosen.encode(kind, row_type, pointer<const std::byte>(row), size, scale, pointer<std::byte>(codes),
                           streaming);
    chosen.decode(kind, row_type, pointer<const std::byte>(codes), size, scale, pointer<std::byte>(row), streaming);
    return scale;
  });
  m.def("_codec_row_by_table", [](const std::string& name, bool encodes, int codec, int type, int64_t row, int64_t size,
                                  float scale, int64_t codes, bool streaming) {
    const auto kind = static_cast<Codec>(codec);
    const RowCodec& chosen = codec_of(name);
    const std::optional<EncodeTable> table = make_encode_table(kind, scale);
    if (!chosen.encode_by_table || (encodes && !table)) return false;
    if (encodes) {
      chosen.encode_by_table(*table, pointer<const std::byte>(row), size, pointer<std::byte>(codes), streaming);
    } else {
      const DecodeTable numbers = make_decode_table(kind, static_cast<RowType>(type), scale);
      chosen.decode_by_table(numbers, pointer<const std::byte>(codes), size, pointer<std::byte>(row), streaming);
    }
    return true;
  });
  m.def("_codec_int8_rows", [](const std::string& name, int64_t rows, int64_t row_stride, int64_t codes,
                               int64_t code_stride, int64_t num_rows, int64_t size, int64_t scales) {
    codec_of(name).encode_int8_bf16({pointer<const std::byte>(rows), row_stride, pointer<std::byte>(codes), code_stride,
                                     num_rows, size},
                                    pointer<float>(scales));
  });
}

// A transposition by the kernel of an instruction set, for tests.
void bind_transpose(py::module_& m) {
  m.def("_transpose", [](const std::string& name, int64_t element_bytes, int64_t to, int64_t to_stride, int64_t from,
                         int64_t from_stride, int64_t num_rows, int64_t num_columns) {
    check(can_transpose(element_bytes), "element_bytes must be 1, 2, 4, 8 or 16, got ", element_bytes);
    transpose_kernel(name.c_str())
        .transpose(element_bytes, {pointer<std::byte>(to), to_stride, pointer<const std::byte>(from), from_stride,
                                   num_rows, num_columns});
  });
  m.def("_transpose_past_cache", [](const std::string& name, int64_t element_bytes, int64_t to, int64_t to_stride,
                                    int64_t from, int64_t from_stride, int64_t num_rows, int64_t num_columns) {
    check(can_transpose(element_bytes), "element_bytes must be 1, 2, 4, 8 or 16, got ", element_bytes);
    const TransposeKernel& kernel = transpose_kernel(name.c_str());
    if (!kernel.stream) return false;
    const bool done = kernel.stream(element_bytes, {pointer<std::byte>(to), to_stride, pointer<const std::byte>(from),
                                                    from_stride, num_rows, num_columns});
    end_streaming();
    return done;
  });
}

}  // namespace kvpage
