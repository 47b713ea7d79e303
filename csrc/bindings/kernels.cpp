// Quantization and transposition by the kernel of one instruction set, for tests.
#include "bindings/bindings.h"

#include "base/copy_bytes.h"
#include "bindings/addresses.h"
#include "quantize/code_table.h"
#include "quantize/quantize_kernel.h"
#include "simd/transpose_kernel.h"

namespace kvpage {

// Rows to codes and back.
void bind_quantization(py::module_& m) {
  m.def("_codecs", [] { return quantize_kernels().names(); });
  m.def("_codec_row", [](const std::string& name, bool encodes, int code_type, int row_type, int64_t row, int64_t size,
                         float scale, int64_t codes, bool streaming) {
    const auto code = static_cast<CodeType>(code_type);
    const auto type = static_cast<RowType>(row_type);
    const QuantizeKernel& kernel = quantize_kernels().named(name);
    if (encodes)
      return kernel.encode(code, type, pointer<const std::byte>(row), size, scale, pointer<std::byte>(codes),
                           streaming);
    kernel.decode(code, type, pointer<const std::byte>(codes), size, scale, pointer<std::byte>(row), streaming);
    return scale;
  });
  m.def("_codec_row_by_table", [](const std::string& name, bool encodes, int code_type, int row_type, int64_t row,
                                  int64_t size, float scale, int64_t codes, bool streaming) {
    const auto code = static_cast<CodeType>(code_type);
    const QuantizeKernel& kernel = quantize_kernels().named(name);
    const std::optional<EncodeTable> table = make_encode_table(code, scale);
    if (!kernel.encode_by_table || (encodes && !table)) return false;
    if (encodes) {
      kernel.encode_by_table(*table, pointer<const std::byte>(row), size, pointer<std::byte>(codes), streaming);
    } else {
      const DecodeTable numbers = make_decode_table(code, static_cast<RowType>(row_type), scale);
      kernel.decode_by_table(numbers, pointer<const std::byte>(codes), size, pointer<std::byte>(row), streaming);
    }
    return true;
  });
  m.def("_codec_int8_rows", [](const std::string& name, int64_t rows, int64_t row_stride, int64_t codes,
                               int64_t code_stride, int64_t num_rows, int64_t size, int64_t scales) {
    quantize_kernels().named(name).encode_int8_bf16(
        {pointer<const std::byte>(rows), row_stride, pointer<std::byte>(codes), code_stride, num_rows, size},
        pointer<float>(scales));
  });
}

// Matrices transposed.
void bind_transpose(py::module_& m) {
  m.def("_transpose", [](const std::string& name, int64_t element_bytes, int64_t to, int64_t to_stride, int64_t from,
                         int64_t from_stride, int64_t num_rows, int64_t num_columns) {
    check(can_transpose(element_bytes), "element_bytes must be 1, 2, 4, 8 or 16, got ", element_bytes);
    transpose_kernels().named(name).transpose(
        element_bytes,
        {pointer<std::byte>(to), to_stride, pointer<const std::byte>(from), from_stride, num_rows, num_columns});
  });
  m.def("_transpose_past_cache", [](const std::string& name, int64_t element_bytes, int64_t to, int64_t to_stride,
                                    int64_t from, int64_t from_stride, int64_t num_rows, int64_t num_columns) {
    check(can_transpose(element_bytes), "element_bytes must be 1, 2, 4, 8 or 16, got ", element_bytes);
    const TransposeKernel& kernel = transpose_kernels().named(name);
    if (!kernel.stream) return false;
    const bool done = kernel.stream(element_bytes, {pointer<std::byte>(to), to_stride, pointer<const std::byte>(from),
                                                    from_stride, num_rows, num_columns});
    end_streaming();
    return done;
  });
}

}  // namespace kvpage
