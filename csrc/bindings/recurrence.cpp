// Tokens through linear recurrences.
#include "recurrence/recurrence.h"
#include "bindings/addresses.h"
#include "bindings/bindings.h"

namespace kvpage {

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
