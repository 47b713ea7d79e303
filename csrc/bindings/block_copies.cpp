// Blocks copied: swaps and copies.
#include "bindings/bindings.h"

#include <limits>

#include "bindings/addresses.h"
#include "copy/copier/block_copier.h"
#include "copy/sm_kernel/kernel_on_host.h"
#include "copy/sm_kernel/launch_plan.h"
#ifdef KVPAGE_HAS_CUDA
#include "copy/copy_engine/copy_engine.h"
#include "cuda/cuda_devices.h"
#endif

namespace kvpage {

namespace {

using LayerTuple = std::pair<Address, std::vector<int64_t>>;
using ShapeTuple = std::pair<std::vector<int64_t>, int>;  // sizes, block_dim

CacheView cache_view(const std::vector<LayerTuple>& layers, int64_t num_blocks) {
  CacheView view{{}, num_blocks};
  for (const auto& [address, strides] : layers) view.layers.push_back({address, strides});
  return view;
}

// Returns one shape for all layers, unless `shapes` has one of each.
std::vector<BlockShape> block_shapes(std::vector<int64_t> sizes, int block_dim, const std::vector<ShapeTuple>& shapes,
                                     int64_t element_bytes) {
  if (shapes.empty()) return {{std::move(sizes), block_dim, element_bytes}};
  std::vector<BlockShape> each;
  for (const auto& [own_sizes, own_dim] : shapes) each.push_back({own_sizes, own_dim, element_bytes});
  return each;
}

const int64_t* pairs_pointer(uintptr_t address) { return reinterpret_cast<const int64_t*>(address); }

// Returns the extents of bytes [begin, end) of the plan, for tests: (source address, destination address, bytes).
std::vector<std::tuple<Address, Address, int64_t>> extents(const BlockCopier& copier, uintptr_t pairs,
                                                           int64_t num_pairs, int64_t begin, int64_t end) {
  const CopyPlan plan(copier.geometry(), pairs_pointer(pairs), num_pairs);
  std::vector<std::tuple<Address, Address, int64_t>> out;
  plan.for_each(begin, end, [&](Address src, Address dst, int64_t bytes) { out.emplace_back(src, dst, bytes); });
  return out;
}

const char* name(Executor executor) {
  switch (executor) {
    case Executor::kHostThreads: return "host";
    case Executor::kCopyEngine: return "engine";
    default: return "kernel";
  }
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

void bind_copier(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<BlockCopier>(m, "BlockCopier", "Moves blocks between two caches of one shape; see kvpage.ops.copies.")
      .def(py::init([](std::vector<int64_t> sizes, int block_dim, int64_t element_bytes,
                       const std::vector<LayerTuple>& srcs, const std::vector<LayerTuple>& dsts, int64_t num_src_blocks,
                       int64_t num_dst_blocks, int src_device, int dst_device, bool pinned, int64_t kernel_max_bytes,
                       int64_t max_groups, const std::vector<ShapeTuple>& shapes) {
             return std::make_unique<BlockCopier>(block_shapes(std::move(sizes), block_dim, shapes, element_bytes),
                                                  cache_view(srcs, num_src_blocks), cache_view(dsts, num_dst_blocks),
                                                  Placement{src_device, dst_device, pinned},
                                                  KernelLimits{kernel_max_bytes, max_groups});
           }),
           py::kw_only(), py::arg("sizes"), py::arg("block_dim"), py::arg("element_bytes"), py::arg("srcs"),
           py::arg("dsts"), py::arg("num_src_blocks"), py::arg("num_dst_blocks"), py::arg("src_device"),
           py::arg("dst_device"), py::arg("pinned"), py::arg("kernel_max_bytes"), py::arg("max_groups"),
           py::arg("shapes") = std::vector<ShapeTuple>{})
      .def_property_readonly("num_fragments",
                             [](const BlockCopier& copier) { return copier.geometry().fragments().size(); })
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
      .def(
          "executor",
          [](const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs) {
            return name(copier.executor(pairs_pointer(pairs), num_pairs));
          },
          py::arg("pairs"), py::arg("num_pairs"))
      .def("extents", &extents, py::arg("pairs"), py::arg("num_pairs"), py::arg("begin") = 0,
           py::arg("end") = std::numeric_limits<int64_t>::max());
}

}  // namespace

void bind_block_copies(py::module_& m) {
  bind_copier(m);
  m.def(
      "_copy_kernel_on_host",
      [](const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs, int64_t vector_bytes, int64_t max_threads,
         int64_t capacity) {
        const CopyPlan plan(copier.geometry(), pairs_pointer(pairs), num_pairs);
        run_copy_kernel_on_host(plan, vector_bytes ? vector_bytes : plan_vector_bytes(plan), max_threads, capacity);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("copier"), py::arg("pairs"), py::arg("num_pairs"),
      py::arg("vector_bytes") = 0, py::arg("max_threads") = int64_t{1} << 30, py::arg("capacity") = int64_t{1} << 30);
  m.def(
      "choose_executor",
      [](int src_device, int dst_device, bool pinned, int64_t extent_bytes, int64_t num_extents,
         int64_t kernel_max_bytes) {
        return name(choose_executor({src_device, dst_device, pinned}, extent_bytes, num_extents, kernel_max_bytes));
      },
      py::kw_only(), py::arg("src_device"), py::arg("dst_device"), py::arg("pinned"), py::arg("extent_bytes"),
      py::arg("num_extents"), py::arg("kernel_max_bytes"));
  m.def(
      "_split_for_launches",
      [](int64_t num_fragments, int64_t num_pairs, int64_t capacity) {
        std::vector<std::array<int64_t, 4>> out;
        for (const CopyTile& tile : split_for_launches(num_fragments, num_pairs, capacity)) {
          out.push_back({tile.first_fragment, tile.num_fragments, tile.first_pair, tile.num_pairs});
        }
        return out;
      },
      py::arg("num_fragments"), py::arg("num_pairs"), py::arg("capacity"));
  m.def("cuda_error", &cuda_error, "Why the native part cannot use CUDA here, or None.");
  m.def("cuda_machine", &cuda_machine, "Driver and devices, or None in a build without CUDA.");
}

}  // namespace kvpage
