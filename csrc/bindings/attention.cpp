// Attention over the blocks of a cache.
#include "bindings/bindings.h"

#include "attention/paged_attention.h"
#include "attention/shared_prefixes.h"
#include "bindings/addresses.h"

namespace kvpage {

void bind_attention(py::module_& m) {
  using Rows = std::array<int64_t, 3>;
  m.def(
      "paged_attention",
      [](const Rows& query, const Rows& out, const KVPart& key_cache, const KVPart& value_cache,
         const std::array<int64_t, 3>& types, const std::array<int64_t, 4>& scales,
         const std::array<int64_t, 6>& tables, const Numbers& seq_lens, const Numbers& query_lens, int64_t positions,
         const std::array<int64_t, 5>& sizes, int64_t window, float scale, float softcap, int64_t sinks,
         int max_threads, const std::string& kernel) {
        paged_attention({row_view(query),
                         row_view(out),
                         key_cache,
                         value_cache,
                         static_cast<ElementType>(types[0]),
                         static_cast<ElementType>(types[1]),
                         static_cast<CodeType>(types[2]),
                         pointer<const float>(scales[0]),
                         scales[1],
                         pointer<const float>(scales[2]),
                         scales[3],
                         block_tables(tables),
                         numbers(seq_lens, tables),
                         numbers(query_lens, tables),
                         pointer<const int64_t>(positions),
                         sizes[0],
                         sizes[1],
                         sizes[2],
                         sizes[3],
                         sizes[4],
                         window,
                         scale,
                         softcap,
                         pointer<const float>(sinks),
                         max_threads,
                         kernel});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg("kernel") = "", "See kvpage.ops.paged_attention, which checks what needs a tensor.");
  m.def(
      "share_prefixes",
      [](const std::array<int64_t, 6>& tables, int64_t lengths, const std::array<int64_t, 3>& rules, int64_t plan,
         int64_t num_rows) {
        return share_prefixes(block_tables(tables), pointer<const int64_t>(lengths), {rules[0], rules[1], rules[2]},
                              pointer<int64_t>(plan), num_rows);
      },
      py::call_guard<py::gil_scoped_release>(),
      "Plan which keys of several sequences are read once: see kvpage.ops.shared_prefixes.");
  m.def(
      "attention_kernels", [] { return attention_kernels().names(); },
      "The attention kernels that this machine runs, the best first.");
}

}  // namespace kvpage
