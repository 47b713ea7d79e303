// The only file that knows Python: every class and function of kvpage._C, and nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "gather_cache.h"
#include "paged_attention.h"
#include "reshape_cache.h"

namespace py = pybind11;
using namespace kvpage;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = KVPAGE_VERSION;
  info["compiler"] = __VERSION__;
#ifdef KVPAGE_HAS_CUDA
  info["cuda"] = KVPAGE_CUDA_VERSION;
  info["cuda_archs"] = KVPAGE_CUDA_ARCHS;
#else
  info["cuda"] = py::none();
  info["cuda_archs"] = py::none();
#endif
  return info;
}

// InvalidArgument becomes ValueError by pybind11 itself; OutOfBlocks carries its two numbers over.
void register_errors(py::module_& m) {
  m.attr("OutOfBlocks") = py::module_::import("kvpage.errors").attr("OutOfBlocks");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const OutOfBlocks& e) {
      py::object type = py::module_::import("kvpage.errors").attr("OutOfBlocks");
      PyErr_SetObject(type.ptr(), type(e.needed, e.free).ptr());
    }
  });
}

// --- tokens: writing, gathering and attending -----------------------------------------------------------------------

using View = std::array<int64_t, 4>;  // address, then strides in bytes, outermost first; a RowView has two of them

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

BlockView block_view(const View& view) { return {pointer<std::byte>(view[0]), view[1], view[2], view[3]}; }

RowView row_view(const std::array<int64_t, 3>& view) { return {pointer<std::byte>(view[0]), view[1], view[2]}; }

// (address, row stride in elements, num_seqs, max_blocks, num_blocks, block_size)
BlockTables block_tables(const std::array<int64_t, 6>& table) {
  return {pointer<const int32_t>(table[0]), table[1], table[2], table[3], table[4], table[5]};
}

using Numbers = std::vector<int64_t>;  // one for each block table

const int64_t* numbers(const Numbers& list, const std::array<int64_t, 6>& table) {
  check(static_cast<int64_t>(list.size()) == table[2], "lists must have one entry for each of ", table[2],
        " block tables, got ", list.size());
  return list.data();
}

void bind_token_ops(py::module_& m) {
  using Rows = std::array<int64_t, 3>;
  using Pair = std::array<int64_t, 2>;
  m.def(
      "reshape_and_cache",
      [](const Rows& key, const Rows& value, const View& key_cache, const View& value_cache, const Pair& num_bytes,
         int64_t slot_mapping, int64_t num_tokens, int64_t num_heads, int64_t num_blocks, int64_t block_size,
         int max_threads) {
        reshape_and_cache({row_view(key), row_view(value), block_view(key_cache), block_view(value_cache), num_bytes[0],
                           num_bytes[1], pointer<const int64_t>(slot_mapping), num_tokens, num_heads, num_blocks,
                           block_size, max_threads});
      },
      py::call_guard<py::gil_scoped_release>(), "See kvpage.ops.reshape_and_cache, which checks what needs a tensor.");
  m.def(
      "gather_cache",
      [](const View& key_cache, const View& value_cache, const Rows& key, const Rows& value, const Pair& num_bytes,
         const std::array<int64_t, 6>& tables, const Numbers& seq_starts, const Numbers& seq_lens,
         const Numbers& key_offsets, const Numbers& value_offsets, int64_t num_heads, int max_threads) {
        gather_cache({block_view(key_cache), block_view(value_cache), row_view(key), row_view(value), num_bytes[0],
                      num_bytes[1], block_tables(tables), numbers(seq_starts, tables), numbers(seq_lens, tables),
                      numbers(key_offsets, tables), numbers(value_offsets, tables), num_heads, max_threads});
      },
      py::call_guard<py::gil_scoped_release>(), "See kvpage.ops.gather_cache, which checks what needs a tensor.");
  m.def(
      "paged_attention",
      [](const Rows& query, const Rows& out, const View& key_cache, const View& value_cache, const Pair& types,
         const std::array<int64_t, 6>& tables, const Numbers& seq_lens, const Numbers& query_lens,
         const std::array<int64_t, 5>& sizes, int64_t window, float scale, float softcap, int64_t sinks,
         int max_threads, const std::string& kernel) {
        auto type = [](int64_t code) { return static_cast<ElementType>(code); };
        paged_attention({row_view(query), row_view(out), block_view(key_cache), block_view(value_cache), type(types[0]),
                         type(types[1]), block_tables(tables), numbers(seq_lens, tables), numbers(query_lens, tables),
                         sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], window, scale, softcap,
                         pointer<const float>(sinks), max_threads, kernel});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("kernel") = "",
      "See kvpage.ops.paged_attention, which checks what needs a tensor.");
  m.def("attention_kernels", &attention_kernels, "The attention kernels that this machine runs, the best first.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native core of kvpage: addresses, sizes and stream handles in; no torch.";
  register_errors(m);
  m.def("build_info", &build_info, "What this extension was built with.");
  bind_token_ops(m);
}
