// The only file that knows Python: every class and function of kvpage._C, and nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "block_copier.h"
#include "check.h"
#include "copy_blocks.h"
#include "gather_cache.h"
#include "host_copy.h"
#include "paged_attention.h"
#include "reshape_cache.h"
#ifdef KVPAGE_HAS_CUDA
#include "cuda_devices.h"
#include "swap_blocks.h"
#endif

namespace py = pybind11;
using namespace kvpage;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = KVPAGE_VERSION;
#ifdef __clang__
  info["compiler"] = __VERSION__;
#else
  info["compiler"] = "GCC " __VERSION__;
#endif
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
         const std::array<int64_t, 6>& tables, int64_t seq_starts, int64_t seq_lens, const Pair& offsets,
         int64_t num_heads, int max_threads) {
        gather_cache({block_view(key_cache), block_view(value_cache), row_view(key), row_view(value), num_bytes[0],
                      num_bytes[1], block_tables(tables), pointer<const int64_t>(seq_starts),
                      pointer<const int64_t>(seq_lens), pointer<const int64_t>(offsets[0]),
                      pointer<const int64_t>(offsets[1]), num_heads, max_threads});
      },
      py::call_guard<py::gil_scoped_release>(), "See kvpage.ops.gather_cache, which checks what needs a tensor.");
  m.def(
      "paged_attention",
      [](const Rows& query, const Rows& out, const View& key_cache, const View& value_cache, const Pair& types,
         const std::array<int64_t, 6>& tables, const Pair& lengths, const std::array<int64_t, 5>& sizes, int64_t window,
         float scale, float softcap, int64_t sinks, int max_threads, const std::string& kernel) {
        auto type = [](int64_t code) { return static_cast<ElementType>(code); };
        paged_attention({row_view(query), row_view(out), block_view(key_cache), block_view(value_cache), type(types[0]),
                         type(types[1]), block_tables(tables), pointer<const int64_t>(lengths[0]),
                         pointer<const int64_t>(lengths[1]), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], window,
                         scale, softcap, pointer<const float>(sinks), max_threads, kernel});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("kernel") = "",
      "See kvpage.ops.paged_attention, which checks what needs a tensor.");
  m.def("attention_kernels", &attention_kernels, "The attention kernels that this machine runs, the best first.");
}

// --- blocks: moving them --------------------------------------------------------------------------------------------

using LayerTuple = std::pair<Address, std::vector<int64_t>>;

CacheView cache_view(const std::vector<LayerTuple>& layers, int64_t num_blocks) {
  CacheView view{{}, num_blocks};
  for (const auto& [address, strides] : layers) view.layers.push_back({address, strides});
  return view;
}

const int64_t* pairs_pointer(uintptr_t address) { return reinterpret_cast<const int64_t*>(address); }

std::vector<std::tuple<Address, Address, int64_t>> extents(const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs) {
  const CopyPlan plan(copier.geometry(), pairs_pointer(pairs), num_pairs);
  std::vector<std::tuple<Address, Address, int64_t>> out;
  plan.for_each(0, plan.num_bytes(), [&](Address src, Address dst, int64_t bytes) { out.emplace_back(src, dst, bytes); });
  return out;
}

py::object cuda_machine() {
#ifdef KVPAGE_HAS_CUDA
  const CudaMachine machine = find_cuda_machine();
  py::list devices;
  for (const CudaDevice& device : machine.devices) {
    devices.append(py::dict(py::arg("name") = device.name,
                            py::arg("compute_capability") = py::make_tuple(device.major, device.minor),
                            py::arg("num_copy_engines") = device.num_copy_engines));
  }
  return py::dict(py::arg("driver_version") = machine.driver_version, py::arg("devices") = devices,
                  py::arg("batched_copy") = has_batched_copy());
#else
  return py::none();
#endif
}

// None where the native part can use CUDA.
std::optional<std::string> cuda_error() {
#ifdef KVPAGE_HAS_CUDA
  return find_cuda_error();
#else
  return "kvpage was built without CUDA";
#endif
}

void bind_block_copies(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<BlockCopier>(m, "BlockCopier", "Moves blocks between two caches of one shape; see kvpage.block_copy.")
      .def(py::init([](std::vector<int64_t> sizes, int block_dim, int64_t element_bytes,
                       const std::vector<LayerTuple>& srcs, const std::vector<LayerTuple>& dsts, int64_t num_src_blocks,
                       int64_t num_dst_blocks, int src_device, int dst_device, bool pinned) {
             return std::make_unique<BlockCopier>(BlockShape{std::move(sizes), block_dim, element_bytes},
                                                  cache_view(srcs, num_src_blocks), cache_view(dsts, num_dst_blocks),
                                                  Placement{src_device, dst_device, pinned});
           }),
           py::kw_only(), py::arg("sizes"), py::arg("block_dim"), py::arg("element_bytes"), py::arg("srcs"),
           py::arg("dsts"), py::arg("num_src_blocks"), py::arg("num_dst_blocks"), py::arg("src_device"),
           py::arg("dst_device"), py::arg("pinned"))
      .def_property_readonly("num_pieces", [](const BlockCopier& copier) { return copier.geometry().pieces().size(); })
      .def_property_readonly("block_bytes", [](const BlockCopier& copier) { return copier.geometry().block_bytes(); })
      .def(
          "run",
          [](BlockCopier& copier, uintptr_t pairs, int64_t num_pairs, uintptr_t stream, int max_threads) {
            copier.run(pairs_pointer(pairs), num_pairs, stream, max_threads);
          },
          NoGil(), py::arg("pairs"), py::arg("num_pairs"), py::arg("stream"), py::arg("max_threads"))
      .def(
          "check",
          [](const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs) {
            CopyPlan(copier.geometry(), pairs_pointer(pairs), num_pairs);
          },
          py::arg("pairs"), py::arg("num_pairs"))
      .def("extents", &extents, py::arg("pairs"), py::arg("num_pairs"));
  m.def(
      "_copy_kernel_on_host",
      [](const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs, int64_t vector_bytes, int64_t max_threads) {
        const CopyPlan plan(copier.geometry(), pairs_pointer(pairs), num_pairs);
        run_copy_kernel_on_host(plan, vector_bytes ? vector_bytes : plan_vector_bytes(plan), max_threads);
      },
      NoGil(), py::arg("copier"), py::arg("pairs"), py::arg("num_pairs"), py::arg("vector_bytes") = 0,
      py::arg("max_threads") = int64_t{1} << 30);
  m.def("cuda_error", &cuda_error, "Why the native part cannot use CUDA here, or None.");
  m.def("cuda_machine", &cuda_machine, "Driver and devices, or None in a build without CUDA.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native core of kvpage: addresses, sizes and stream handles in; no torch.";
  register_errors(m);
  m.def("build_info", &build_info, "What this extension was built with.");
  bind_token_ops(m);
  bind_block_copies(m);
}
