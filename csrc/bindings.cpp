// The only file that knows Python: every class and function of kvpage._C, and nothing else.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "block_copier.h"
#include "block_pool.h"
#include "check.h"
#include "copy_blocks.h"
#include "gather_cache.h"
#include "host_copy.h"
#include "paged_attention.h"
#include "prefix_tree.h"
#include "reshape_cache.h"
#include "token_view.h"
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

// --- blocks: moving them --------------------------------------------------------------------------------------------

using LayerTuple = std::pair<Address, std::vector<int64_t>>;

CacheView cache_view(const std::vector<LayerTuple>& layers, int64_t num_blocks) {
  CacheView view{{}, num_blocks};
  for (const auto& [address, strides] : layers) view.layers.push_back({address, strides});
  return view;
}

const int64_t* pairs_pointer(uintptr_t address) { return reinterpret_cast<const int64_t*>(address); }

// What bytes [begin, end) of the plan copy, for tests: (source address, destination address, bytes).
std::vector<std::tuple<Address, Address, int64_t>> extents(const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs,
                                                           int64_t begin, int64_t end) {
  const CopyPlan plan(copier.geometry(), pairs_pointer(pairs), num_pairs);
  std::vector<std::tuple<Address, Address, int64_t>> out;
  plan.for_each(begin, end, [&](Address src, Address dst, int64_t bytes) { out.emplace_back(src, dst, bytes); });
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
      .def("extents", &extents, py::arg("pairs"), py::arg("num_pairs"), py::arg("begin") = 0,
           py::arg("end") = std::numeric_limits<int64_t>::max());
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

// --- blocks: pool and prefix tree -----------------------------------------------------------------------------------

// A caller's integers: an int32 or int64 array or buffer is read in place, anything else is converted.
class Integers {
 public:
  Integers(const py::object& source, const char* name) : name_(name), array_(as_array(source, name)) {
    check(array_.ndim() == 1, name, " must be one-dimensional, got ", array_.ndim(), " dimensions");
    if (array_.size() == 0) return;
    const py::dtype type = array_.dtype();
    const bool is_readable =
        type.kind() == 'i' && type.byteorder() == '=' && (type.itemsize() == 4 || type.itemsize() == 8);
    if (!is_readable) fail(name, " must be int32 or int64, got ", py::str(type).cast<std::string>());
    check(array_.size() == 1 || array_.strides(0) == type.itemsize(), name, " must be contiguous");
    check(array_.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_, name, " must be aligned");
    is_wide_ = type.itemsize() == 8;
  }

  TokenView tokens() const {
    if (is_wide_) return {static_cast<const int64_t*>(array_.data()), array_.size()};
    return {static_cast<const int32_t*>(array_.data()), array_.size()};
  }

  // As int32: in place, or narrowed into memory of this object.
  std::span<const int32_t> ids() {
    const auto size = static_cast<size_t>(array_.size());
    if (!is_wide_) return {static_cast<const int32_t*>(array_.data()), size};
    const auto* wide = static_cast<const int64_t*>(array_.data());
    narrowed_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      check(wide[i] == static_cast<int32_t>(wide[i]), name_, " must fit into 32 bits, got ", wide[i]);
      narrowed_.push_back(static_cast<int32_t>(wide[i]));
    }
    return narrowed_;
  }

  // For calls that give up the GIL: another thread may write to the caller's array meanwhile.
  std::span<const int32_t> copied_ids() {
    const auto read = ids();
    if (read.data() != narrowed_.data()) narrowed_.assign(read.begin(), read.end());
    return narrowed_;
  }

 private:
  static py::array as_array(const py::object& source, const char* name) {
    if (py::isinstance<py::array>(source)) return py::reinterpret_borrow<py::array>(source);
    if (PyList_CheckExact(source.ptr())) {
      if (auto array = from_list(source.ptr(), name)) return *array;
    }
    // A torch CPU tensor gives its memory by numpy() in a third of the time that numpy takes to ask for it.
    const bool is_tensor = !PyObject_CheckBuffer(source.ptr()) && py::hasattr(source, "numpy");
    return py::module_::import("numpy").attr("asarray")(is_tensor ? source.attr("numpy")() : source);
  }

  // None if something else than plain ints is among them.
  static std::optional<py::array> from_list(PyObject* list, const char* name) {
    py::array_t<int64_t> array(PyList_GET_SIZE(list));
    int64_t* values = array.mutable_data();
    for (py::ssize_t i = 0; i < array.size(); ++i) {
      PyObject* item = PyList_GET_ITEM(list, i);
      if (!PyLong_Check(item)) return std::nullopt;
      int overflow = 0;
      values[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (overflow != 0) fail(name, " must fit into 32 bits, got ", py::str(item).cast<std::string>());
    }
    return array;
  }

  const char* name_;
  py::array array_;
  bool is_wide_ = false;
  std::vector<int32_t> narrowed_;
};

// Calls that may take long give the GIL up; a short one is over sooner than that.
template <typename Call>
auto maybe_without_gil(int64_t num_items, Call call) {
  constexpr int64_t kShort = 4096;
  if (num_items < kShort) return call();
  py::gil_scoped_release released;
  return call();
}

py::array_t<int32_t> allocate(BlockPool& pool, int64_t n) {
  check(n >= 0, "n must not be negative, got ", n);
  const int64_t num_free = pool.num_free();
  if (n > num_free) throw OutOfBlocks(static_cast<size_t>(n), static_cast<size_t>(num_free));
  py::array_t<int32_t> ids(n);
  pool.allocate({ids.mutable_data(), static_cast<size_t>(n)});
  return ids;
}

int32_t allocate_one(BlockPool& pool) {
  int32_t id;
  pool.allocate({&id, 1});
  return id;
}

void release_one(BlockPool& pool, int32_t block_id) { pool.release({&block_id, 1}); }

void bind_pool(py::module_& m) {
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(m, "BlockPool", "The block ids of one tier; see kvpage/_C.pyi.")
      .def(py::init<int64_t>(), py::arg("num_blocks"))
      .def("allocate", &allocate, py::arg("n"))
      .def("allocate_one", &allocate_one)
      .def("share", [](BlockPool& pool, const py::object& ids) { pool.share(Integers(ids, "ids").ids()); },
           py::arg("ids"))
      .def("release", [](BlockPool& pool, const py::object& ids) { pool.release(Integers(ids, "ids").ids()); },
           py::arg("ids"))
      .def("release_one", &release_one, py::arg("block_id"))
      .def("ref_count", &BlockPool::ref_count, py::arg("block_id"))
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def("check", &BlockPool::check_invariants, py::call_guard<py::gil_scoped_release>());
}

py::array_t<int32_t> block_ids_from(const Match& match, int64_t start_block) {
  check(start_block >= 0 && start_block <= match.num_blocks(), "start_block must be between 0 and num_blocks = ",
        match.num_blocks(), ", got ", start_block);
  const int64_t num_ids = match.num_blocks() - start_block;
  py::array_t<int32_t> ids(num_ids);
  match.tree().copy_block_ids(match, start_block, {ids.mutable_data(), static_cast<size_t>(num_ids)});
  return ids;
}

void check_tree(PrefixTree& tree, const py::object& owned_ids, const py::object& owned_host_ids) {
  std::optional<Integers> integers, host_integers;
  std::optional<std::span<const int32_t>> owned, host_owned;
  if (!owned_ids.is_none()) owned = integers.emplace(owned_ids, "owned_ids").copied_ids();
  if (!owned_host_ids.is_none()) host_owned = host_integers.emplace(owned_host_ids, "owned_host_ids").copied_ids();
  maybe_without_gil(tree.num_cached(), [&] { tree.check_invariants(owned, host_owned); });
}

py::array_t<int64_t> pair_array(const std::vector<TierPair>& pairs) {
  py::array_t<int64_t> array({static_cast<py::ssize_t>(pairs.size()), py::ssize_t{2}});
  int64_t* out = array.mutable_data();
  for (const auto& [from, to] : pairs) *out++ = from, *out++ = to;
  return array;
}

void bind_match(py::module_& m) {
  py::class_<Match>(m, "Match", "A pinned path of a PrefixTree; see kvpage/_C.pyi.")
      .def_property_readonly("num_blocks", &Match::num_blocks)
      .def_property_readonly("num_tokens", &Match::num_tokens)
      .def_property_readonly("priority", &Match::priority)
      .def_property_readonly("num_device_blocks",
                             [](const Match& match) { return match.tree().num_device_blocks(match); })
      .def_property_readonly("is_released", [](const Match& match) { return match.tree().is_released(match); })
      .def_property_readonly("block_ids", [](const Match& match) { return block_ids_from(match, 0); })
      .def("block_ids_from", &block_ids_from, py::arg("start_block"));
  py::class_<PartMatch>(m, "PartMatch", "The first tokens of a block of another path; see kvpage/_C.pyi.")
      .def_readonly("match", &PartMatch::match)
      .def_readonly("num_tokens", &PartMatch::num_tokens)
      .def_readonly("block_id", &PartMatch::block_id)
      .def_readonly("is_on_device", &PartMatch::is_on_device);
}

py::tuple change_arrays(const TreeChanges& taken, py::ssize_t block_size) {
  py::array_t<int64_t> changes({static_cast<py::ssize_t>(taken.changes.size()), py::ssize_t{3}});
  int64_t* out = changes.mutable_data();
  for (const auto& [kind, id, value] : taken.changes) *out++ = static_cast<int64_t>(kind), *out++ = id, *out++ = value;
  const auto num_tokens = static_cast<py::ssize_t>(taken.tokens.size());
  py::array_t<int32_t> tokens({num_tokens / block_size, block_size});
  std::copy(taken.tokens.begin(), taken.tokens.end(), tokens.mutable_data());
  py::list namespaces;
  for (const std::string& name : taken.namespaces) namespaces.append(py::bytes(name));
  return py::make_tuple(taken.is_restart, taken.now, changes, tokens, namespaces);
}

py::tuple take_changes(PrefixTree& tree) {
  const int64_t num_blocks = tree.num_cached() + tree.num_host_cached();
  const TreeChanges taken = maybe_without_gil(num_blocks, [&] { return tree.take_changes(); });
  try {
    return change_arrays(taken, tree.block_size());
  } catch (...) {  // what was taken is gone
    tree.lose_changes();
    throw;
  }
}

void bind_tree(py::module_& m) {
  py::class_<PrefixTree, std::shared_ptr<PrefixTree>>(m, "PrefixTree", "Cached blocks by tokens; see kvpage/_C.pyi.")
      .def(py::init<std::shared_ptr<BlockPool>, int64_t, std::shared_ptr<BlockPool>, uint64_t>(),
           py::arg("pool").none(false), py::arg("block_size"), py::arg("host_pool") = nullptr, py::kw_only(),
           py::arg("_hash_mask") = ~uint64_t{0})
      .def(
          "match",
          [](PrefixTree& tree, const py::object& tokens, const py::bytes& name, int priority) {
            const Integers integers(tokens, "tokens");
            const TokenView view = integers.tokens();
            const std::string_view space(name);
            return maybe_without_gil(view.size(), [&] { return tree.match(view, space, priority); });
          },
          py::arg("tokens"), py::arg("namespace") = py::bytes(), py::arg("priority") = 0)
      .def(
          "match_part",
          [](PrefixTree& tree, const Match& match, const py::object& tokens) {
            const Integers integers(tokens, "tokens");
            return tree.match_part(match, integers.tokens());
          },
          py::arg("match"), py::arg("tokens"))
      .def(
          "insert",
          [](PrefixTree& tree, const py::object& tokens, const py::object& block_ids, const py::bytes& name,
             Match* after, int priority) {
            const Integers integers(tokens, "tokens");
            const TokenView view = integers.tokens();
            Integers ids(block_ids, "block_ids");
            const auto span = ids.copied_ids();
            const std::string_view space(name);
            return maybe_without_gil(view.size(), [&] { return tree.insert(view, span, space, after, priority); });
          },
          py::arg("tokens"), py::arg("block_ids"), py::arg("namespace") = py::bytes(), py::arg("after") = nullptr,
          py::arg("priority") = 0)
      .def("pin", &PrefixTree::pin, py::arg("match"))
      .def("release", &PrefixTree::release, py::arg("match"))
      .def("trim", &PrefixTree::trim, py::arg("match"))
      .def(
          "promote",
          [](PrefixTree& tree, const Match& match, const py::object& block_ids) {
            Integers ids(block_ids, "block_ids");
            return pair_array(tree.promote(match, ids.ids()));
          },
          py::arg("match"), py::arg("block_ids"))
      .def(
          "write_out",
          [](PrefixTree& tree, const Match& match, int64_t min_hits) {
            return pair_array(tree.write_out(match, min_hits));
          },
          py::arg("match"), py::arg("min_hits") = 0)
      .def(
          "evict",
          [](PrefixTree& tree, int64_t num_blocks) {
            return maybe_without_gil(num_blocks, [&] { return tree.evict(num_blocks); });
          },
          py::arg("num_blocks"))
      .def(
          "demote",
          [](PrefixTree& tree, int64_t num_blocks) {
            const auto [num_freed, pairs] = maybe_without_gil(num_blocks, [&] { return tree.demote(num_blocks); });
            return py::make_tuple(num_freed, pair_array(pairs));
          },
          py::arg("num_blocks"))
      .def(
          "evict_host",
          [](PrefixTree& tree, int64_t num_blocks) {
            return maybe_without_gil(num_blocks, [&] { return tree.evict_host(num_blocks); });
          },
          py::arg("num_blocks"))
      .def(
          "drop",
          [](PrefixTree& tree, const py::object& tokens, const py::bytes& name) {
            const Integers integers(tokens, "tokens");
            return tree.drop(integers.tokens(), std::string_view(name));
          },
          py::arg("tokens"), py::arg("namespace") = py::bytes())
      .def("clear", &PrefixTree::clear, py::call_guard<py::gil_scoped_release>())
      .def("log_changes", &PrefixTree::log_changes, py::arg("max_bytes"))
      .def("take_changes", &take_changes)
      .def("lose_changes", &PrefixTree::lose_changes)
      .def("check", &check_tree, py::arg("owned_ids") = py::none(), py::arg("owned_host_ids") = py::none())
      .def_property_readonly("block_size", &PrefixTree::block_size)
      .def_property_readonly("has_host_tier", &PrefixTree::has_host_tier)
      .def_property_readonly("num_cached", &PrefixTree::num_cached)
      .def_property_readonly("num_evictable", &PrefixTree::num_evictable)
      .def_property_readonly("num_host_cached", &PrefixTree::num_host_cached)
      .def_property_readonly("num_host_evictable", &PrefixTree::num_host_evictable)
      .def_property_readonly("num_nodes", &PrefixTree::num_nodes)
      .def_property_readonly("num_matches", &PrefixTree::num_matches);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native core of kvpage: addresses, sizes and stream handles in; no torch.";
  register_errors(m);
  m.def("build_info", &build_info, "What this extension was built with.");
  bind_token_ops(m);
  bind_block_copies(m);
  bind_pool(m);
  bind_match(m);
  bind_tree(m);
}
