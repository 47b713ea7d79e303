// Products of rows with weights, norms of rows, and tokens through recurrences.
#include "linear/linear.h"
#include "bindings/addresses.h"
#include "bindings/bindings.h"
#include "linear/experts/grouped_linear.h"
#include "linear/fast_types.h"
#include "linear/norms/rms_norm.h"
#include "recurrence/recurrence.h"

namespace kvpage {

namespace {

using Rows = std::array<int64_t, 2>;  // address, row stride in bytes

Matrix matrix(const Rows& rows) { return {pointer<std::byte>(rows[0]), rows[1]}; }

using Weights = std::array<int64_t, 3>;  // address, strides of group and row in bytes

GroupWeights group_weights(const Weights& w) { return {pointer<std::byte>(w[0]), w[1], w[2]}; }

}  // namespace

void bind_linear(py::module_& m) {
  m.def(
      "linear",
      [](const Rows& x, const Rows& w, const Rows& up, int64_t bias, const Rows& out,
         const std::array<int64_t, 3>& sizes, int type, int activation, int max_threads, const std::string& kernel) {
        linear({matrix(x), matrix(w), matrix(up), matrix(out), pointer<const std::byte>(bias), sizes[0], sizes[1],
                sizes[2], static_cast<RowType>(type), static_cast<Activation>(activation), max_threads,
                &linear_kernels().named(kernel)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg("kernel") = "",
      "See kvpage.ops.linear, which checks what needs a tensor.");
  m.def(
      "grouped_linear",
      [](const Rows& x, const std::array<int64_t, 2>& order, const Weights& w, const Weights& up, int64_t bias,
         const Rows& out, const std::array<int64_t, 4>& sizes, int type, int activation, bool is_turned,
         int max_threads, const std::string& kernel) {
        grouped_linear({matrix(x), matrix(out), pointer<const int64_t>(order[0]), pointer<const int64_t>(order[1]),
                        group_weights(w), group_weights(up), pointer<const std::byte>(bias), sizes[0], sizes[1],
                        sizes[2], sizes[3], static_cast<RowType>(type), static_cast<Activation>(activation), is_turned,
                        max_threads, is_turned ? nullptr : &linear_kernels().named(kernel),
                        is_turned ? &turned_kernels().named(kernel) : nullptr});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("kernel") = "",
      "See kvpage.ops.cpu.experts, which checks what needs a tensor.");
  m.def(
      "turned_kernels", [] { return turned_kernels().names(); },
      "The kernels for products with turned weights that this machine runs, the best first.");
  m.def(
      "rms_norm",
      [](const Rows& x, const Rows& residual, const Rows& sum, const Rows& out, int64_t weight,
         const std::array<int64_t, 2>& sizes, int type, float eps, float offset, int order, int max_threads,
         const std::string& kernel) {
        rms_norm({matrix(x), matrix(residual), matrix(sum), matrix(out), pointer<const std::byte>(weight), sizes[0],
                  sizes[1], static_cast<RowType>(type), eps, offset, static_cast<NormOrder>(order), max_threads,
                  &norm_kernels().named(kernel)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("kernel") = "",
      "See kvpage.ops.rms_norm, which checks what needs a tensor.");
  m.def("_multiply_adds", [](int64_t num_rounds) { return linear_kernels().best().multiply_adds(num_rounds); });
  m.def(
      "linear_kernels", [] { return linear_kernels().names(); },
      "The kernels for products that this machine runs, the best first.");
  m.def(
      "product_tiles", [] { return std::make_pair(tile_verdict().name, tile_verdict().refusal); },
      "The name of the bits of products by tiles, and why no tiles are taken: one of them is empty.");
  m.def(
      "norm_kernels", [] { return norm_kernels().names(); },
      "The kernels for norms that this machine runs, the best first.");
  m.def(
      "has_fast_linear", [](int type) { return has_fast_linear(static_cast<RowType>(type)); },
      "Whether `linear` is to compute this type on this machine.");
}

void bind_recurrence(py::module_& m) {
  m.def(
      "recurrence",
      [](const std::array<int64_t, 7>& addresses, const std::array<int64_t, 5>& state,
         const std::array<int64_t, 6>& sizes, int decay, int max_threads, const std::string& kernel) {
        const auto floats = [&](int place) { return pointer<const float>(addresses[place]); };
        recurrence({floats(0),
                    floats(1),
                    floats(2),
                    floats(3),
                    floats(4),
                    floats(5),
                    pointer<float>(addresses[6]),
                    {pointer<float>(state[0]), state[1], state[2], state[3], state[4]},
                    sizes[0],
                    sizes[1],
                    sizes[2],
                    sizes[3],
                    sizes[4],
                    sizes[5],
                    static_cast<Decay>(decay),
                    max_threads,
                    &recurrence_kernels().named(kernel)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg("kernel") = "", "See kvpage.ops.cpu.recurrence, which checks what needs a tensor.");
  m.def(
      "recurrence_kernels", [] { return recurrence_kernels().names(); },
      "The kernels for recurrences that this machine runs, the best first.");
}

}  // namespace kvpage
