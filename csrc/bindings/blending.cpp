// Rows of tokens: rotated, mixed, compared.
#include "bindings/bindings.h"

#include "bindings/addresses.h"
#include "blend/blend_rows.h"

namespace kvpage {

namespace {

// (address, row stride, head stride, address of slots or 0, num_blocks, block_size, block stride), strides in bytes.
RowPlace row_place(const std::array<int64_t, 7>& v) {
  return {pointer<std::byte>(v[0]), v[1], v[2], pointer<const int64_t>(v[3]), v[4], v[5], v[6]};
}

}  // namespace

void bind_blending(py::module_& m) {
  using Place = std::array<int64_t, 7>;
  m.def(
      "mix_rows",
      [](const Place& from, const Place& to, const Place& fresh, const std::array<int64_t, 2>& fresh_rows, int type,
         const std::array<int64_t, 3>& shape, const std::array<int64_t, 3>& rotated, int64_t cos, int64_t sin,
         int max_threads, const std::string& kernel) {
        mix_rows({row_place(from),
                  row_place(to),
                  row_place(fresh),
                  pointer<const int64_t>(fresh_rows[0]),
                  fresh_rows[1],
                  static_cast<RowType>(type),
                  shape[0],
                  shape[1],
                  shape[2],
                  {rotated[0], rotated[1], rotated[2] != 0},
                  pointer<const float>(cos),
                  pointer<const float>(sin),
                  max_threads,
                  &blend_kernels().named(kernel)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg("kernel") = "",
      "See kvpage.ops.mix_rows, which checks what needs a tensor.");
  m.def(
      "row_deviation",
      [](const Place& a, const Place& b, int64_t valid, int64_t out, int type, const std::array<int64_t, 3>& shape,
         int max_threads, const std::string& kernel) {
        row_deviation({row_place(a), row_place(b), pointer<const uint8_t>(valid), pointer<float>(out),
                       static_cast<RowType>(type), shape[0], shape[1], shape[2], max_threads,
                       &blend_kernels().named(kernel)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg("kernel") = "", "See kvpage.ops.row_deviation, which checks what needs a tensor.");
}

}  // namespace kvpage
