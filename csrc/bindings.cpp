// The only file that knows Python: every class and function of kvpage._C, and nothing else.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
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

#include "blend_rows.h"
#include "block_copier.h"
#include "block_pool.h"
#include "check.h"
#include "chunk_copy.h"
#include "chunk_plan.h"
#include "code_table.h"
#include "copy_blocks.h"
#include "gather_cache.h"
#include "host_copy.h"
#include "paged_attention.h"
#include "prefix_tree.h"
#include "reshape_cache.h"
#include "slot_allocator.h"
#include "slot_tree.h"
#include "token_view.h"
#include "transpose.h"
#include "xxh3.h"
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

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Address, four strides in bytes, run size, element bytes; then of the scales address and three strides.
using Blocks = std::array<int64_t, 11>;

KVPart kv_part(const int64_t* v) {
  return {pointer<std::byte>(v[0]), v[1], v[2], v[3], v[4], v[5], v[6], pointer<std::byte>(v[7]), v[8], v[9], v[10]};
}

// Blocks; then of the rows address and two strides in bytes, RowType, Codec, size; then the heads' scales and a stride.
using Part = std::array<int64_t, 19>;

TokenMove token_move(const Part& v) {
  return {kv_part(v.data()),
          {pointer<std::byte>(v[11]), v[12], v[13]},
          static_cast<RowType>(v[14]),
          static_cast<Codec>(v[15]),
          v[16],
          pointer<const float>(v[17]),
          v[18]};
}

std::vector<TokenMove> token_moves(const std::vector<Part>& parts) {
  std::vector<TokenMove> moves;
  for (const Part& part : parts) moves.push_back(token_move(part));
  return moves;
}

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

const RowCodec& codec_of(const std::string& name) { return name.empty() ? row_codec() : row_codec(name.c_str()); }

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
}

void bind_token_ops(py::module_& m) {
  using Rows = std::array<int64_t, 3>;
  m.def(
      "reshape_and_cache",
      [](const std::vector<Part>& parts, int64_t slot_mapping, int64_t num_tokens, int64_t num_heads, int64_t num_blocks,
         int64_t block_size, int max_threads) {
        const std::vector<TokenMove> moves = token_moves(parts);
        reshape_and_cache({moves.data(), static_cast<int>(moves.size()), pointer<const int64_t>(slot_mapping), num_tokens,
                           num_heads, num_blocks, block_size, max_threads});
      },
      py::call_guard<py::gil_scoped_release>(), "See kvpage.ops.reshape_and_cache, which checks what needs a tensor.");
  m.def(
      "gather_cache",
      [](const std::vector<Part>& parts, const std::array<int64_t, 6>& tables, const Numbers& seq_starts,
         const Numbers& seq_lens, const std::vector<Numbers>& row_offsets, int64_t num_heads, int max_threads) {
        const std::vector<TokenMove> moves = token_moves(parts);
        check(moves.size() <= 2 && row_offsets.size() >= moves.size(), "there must be row offsets for K and V");
        GatherCache args{moves.data(), static_cast<int>(moves.size()), block_tables(tables), numbers(seq_starts, tables),
                         numbers(seq_lens, tables), {}, num_heads, max_threads};
        for (size_t i = 0; i < moves.size(); ++i) args.row_offsets[i] = numbers(row_offsets[i], tables);
        gather_cache(args);
      },
      py::call_guard<py::gil_scoped_release>(), "See kvpage.ops.gather_cache, which checks what needs a tensor.");
  const auto bind_chunk = [&](const char* name, void (*copy)(const ChunkCopy&)) {
    m.def(
        name,
        [copy](const std::vector<Part>& parts, int64_t block_ids, int64_t num_block_ids, int64_t num_blocks,
               int64_t block_size, int64_t start, int64_t num_tokens, int64_t num_heads, int max_threads) {
          copy({token_moves(parts), pointer<const int32_t>(block_ids), num_block_ids, num_blocks, block_size, start,
                num_tokens, num_heads, max_threads});
        },
        py::call_guard<py::gil_scoped_release>(), "See kvpage.chunk_ops, which checks what needs a tensor.");
  };
  bind_chunk("store_chunk", &store_chunk);
  bind_chunk("load_chunk", &load_chunk);
  m.def(
      "paged_attention",
      [](const Rows& query, const Rows& out, const Blocks& key_cache, const Blocks& value_cache,
         const std::array<int64_t, 3>& types, const std::array<int64_t, 4>& scales, const std::array<int64_t, 6>& tables,
         const Numbers& seq_lens, const Numbers& query_lens, int64_t positions, const std::array<int64_t, 5>& sizes,
         int64_t window,
         float scale, float softcap, int64_t sinks, int max_threads, const std::string& kernel) {
        paged_attention({row_view(query), row_view(out), kv_part(key_cache.data()), kv_part(value_cache.data()),
                         static_cast<ElementType>(types[0]), static_cast<ElementType>(types[1]),
                         static_cast<Codec>(types[2]), pointer<const float>(scales[0]), scales[1],
                         pointer<const float>(scales[2]), scales[3], block_tables(tables), numbers(seq_lens, tables),
                         numbers(query_lens, tables), pointer<const int64_t>(positions), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], window, scale,
                         softcap, pointer<const float>(sinks), max_threads, kernel});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg("kernel") = "", "See kvpage.ops.paged_attention, which checks what needs a tensor.");
  bind_codecs(m);
  bind_transpose(m);
  m.def("attention_kernels", &attention_kernels, "The attention kernels that this machine runs, the best first.");
}

// --- tokens: blending them ------------------------------------------------------------------------------------------

// (address, row stride, head stride, address of slots or 0, num_blocks, block_size, block stride), strides in bytes.
RowPlace row_place(const std::array<int64_t, 7>& v) {
  return {pointer<std::byte>(v[0]), v[1], v[2], pointer<const int64_t>(v[3]), v[4], v[5], v[6]};
}

const BlendKernel& blend_kernel_of(const std::string& name) {
  return name.empty() ? blend_kernel() : blend_kernel(name.c_str());
}

void bind_blending(py::module_& m) {
  using Place = std::array<int64_t, 7>;
  m.def(
      "mix_rows",
      [](const Place& from, const Place& to, const Place& fresh, const std::array<int64_t, 2>& fresh_rows, int type,
         const std::array<int64_t, 3>& shape, const std::array<int64_t, 3>& turn, int64_t cos, int64_t sin,
         int max_threads, const std::string& kernel) {
        mix_rows({row_place(from), row_place(to), row_place(fresh), pointer<const int64_t>(fresh_rows[0]), fresh_rows[1],
                  static_cast<RowType>(type), shape[0], shape[1], shape[2], {turn[0], turn[1], turn[2] != 0},
                  pointer<const float>(cos), pointer<const float>(sin), max_threads, &blend_kernel_of(kernel)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg(), py::arg(), py::arg(), py::arg("kernel") = "",
      "See kvpage.ops.mix_rows, which checks what needs a tensor.");
  m.def(
      "row_deviation",
      [](const Place& a, const Place& b, int64_t valid, int64_t out, int type, const std::array<int64_t, 3>& shape,
         int max_threads, const std::string& kernel) {
        row_deviation({row_place(a), row_place(b), pointer<const uint8_t>(valid), pointer<float>(out),
                       static_cast<RowType>(type), shape[0], shape[1], shape[2], max_threads, &blend_kernel_of(kernel)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
      py::arg(), py::arg("kernel") = "", "See kvpage.ops.row_deviation, which checks what needs a tensor.");
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

void bind_block_copies(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<BlockCopier>(m, "BlockCopier", "Moves blocks between two caches of one shape; see kvpage.block_copy.")
      .def(py::init([](std::vector<int64_t> sizes, int block_dim, int64_t element_bytes,
                       const std::vector<LayerTuple>& srcs, const std::vector<LayerTuple>& dsts, int64_t num_src_blocks,
                       int64_t num_dst_blocks, int src_device, int dst_device, bool pinned, int64_t kernel_max_bytes,
                       int64_t max_groups) {
             return std::make_unique<BlockCopier>(BlockShape{std::move(sizes), block_dim, element_bytes},
                                                  cache_view(srcs, num_src_blocks), cache_view(dsts, num_dst_blocks),
                                                  Placement{src_device, dst_device, pinned},
                                                  KernelLimits{kernel_max_bytes, max_groups});
           }),
           py::kw_only(), py::arg("sizes"), py::arg("block_dim"), py::arg("element_bytes"), py::arg("srcs"),
           py::arg("dsts"), py::arg("num_src_blocks"), py::arg("num_dst_blocks"), py::arg("src_device"),
           py::arg("dst_device"), py::arg("pinned"), py::arg("kernel_max_bytes"), py::arg("max_groups"))
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
      .def(
          "executor",
          [](const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs) {
            return name(copier.executor(pairs_pointer(pairs), num_pairs));
          },
          py::arg("pairs"), py::arg("num_pairs"))
      .def("extents", &extents, py::arg("pairs"), py::arg("num_pairs"), py::arg("begin") = 0,
           py::arg("end") = std::numeric_limits<int64_t>::max());
  m.def(
      "_copy_kernel_on_host",
      [](const BlockCopier& copier, uintptr_t pairs, int64_t num_pairs, int64_t vector_bytes, int64_t max_threads,
         int64_t capacity) {
        const CopyPlan plan(copier.geometry(), pairs_pointer(pairs), num_pairs);
        run_copy_kernel_on_host(plan, vector_bytes ? vector_bytes : plan_vector_bytes(plan), max_threads,
                                capacity);
      },
      NoGil(), py::arg("copier"), py::arg("pairs"), py::arg("num_pairs"), py::arg("vector_bytes") = 0,
      py::arg("max_threads") = int64_t{1} << 30, py::arg("capacity") = int64_t{1} << 30);
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
      [](int64_t num_pieces, int64_t num_pairs, int64_t capacity) {
        std::vector<std::array<int64_t, 4>> out;
        for (const CopyTile& tile : split_for_launches(num_pieces, num_pairs, capacity)) {
          out.push_back({tile.first_piece, tile.num_pieces, tile.first_pair, tile.num_pairs});
        }
        return out;
      },
      py::arg("num_pieces"), py::arg("num_pairs"), py::arg("capacity"));
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
    try {
      return py::module_::import("numpy").attr("asarray")(is_tensor ? source.attr("numpy")() : source);
    } catch (py::error_already_set& error) {
      // Of torch's many reasons: a tensor on a device, with a gradient, negated, nested, ...
      if (!error.matches(PyExc_RuntimeError)) throw;
      fail(name, " must be readable as an array: ", error.what());
    }
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

py::int_ allocate_one(BlockPool& pool) {
  int32_t id;
  pool.allocate({&id, 1});
  try {
    return py::int_(id);
  } catch (...) {
    pool.release({&id, 1});
    throw;
  }
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

// A call that has changed the tree must not fail for lack of memory: its pins and pairs would be lost, and what they name
// would be read without ever having been copied. So the objects that it returns are made before it.

py::array_t<int64_t> room_for_pairs(int64_t most) { return py::array_t<int64_t>({py::ssize_t{most}, py::ssize_t{2}}); }

void fill_pairs(py::array_t<int64_t>& array, const std::vector<TierPair>& pairs) {
  int64_t* out = array.mutable_data();
  for (const auto& [from, to] : pairs) *out++ = from, *out++ = to;
  const auto num_pairs = static_cast<py::ssize_t>(pairs.size());
  if (num_pairs < array.shape(0)) array.resize({num_pairs, py::ssize_t{2}}, false);  // gives memory back: needs none
}

template <typename T>
T& held_by(const py::object& object) {
  return *reinterpret_cast<py::detail::instance*>(object.ptr())->get_value_and_holder().value_ptr<T>();
}

template <typename Call>
py::object new_match(Call call) {
  py::object match = py::cast(Match());
  held_by<Match>(match) = call();
  return match;
}

py::object match_part(PrefixTree& tree, const Match& match, const py::object& tokens) {
  const Integers integers(tokens, "tokens");
  py::object part = py::cast(PartMatch{});
  std::optional<PartMatch> found = tree.match_part(match, integers.tokens());
  if (!found) return py::none();
  held_by<PartMatch>(part) = std::move(*found);
  return part;
}

py::array_t<int64_t> promote(PrefixTree& tree, const Match& match, const py::object& block_ids) {
  Integers integers(block_ids, "block_ids");
  const auto ids = integers.ids();
  py::array_t<int64_t> pairs = room_for_pairs(static_cast<int64_t>(ids.size()));
  fill_pairs(pairs, tree.promote(match, ids));
  return pairs;
}

py::array_t<int64_t> write_out(PrefixTree& tree, const Match& match, int64_t min_hits) {
  py::array_t<int64_t> pairs = room_for_pairs(tree.has_host_tier() ? match.num_blocks() : 0);
  fill_pairs(pairs, tree.write_out(match, min_hits));
  return pairs;
}

py::tuple demote(PrefixTree& tree, int64_t num_blocks) {
  const int64_t most = std::min(num_blocks, tree.num_evictable());
  py::array_t<int64_t> pairs = room_for_pairs(tree.has_host_tier() ? std::max<int64_t>(most, 0) : 0);
  py::tuple result = py::make_tuple(most, pairs);
  const auto [num_freed, moved] = maybe_without_gil(num_blocks, [&] { return tree.demote(most); });
  fill_pairs(pairs, moved);
  if (num_freed != most) result[0] = num_freed;  // where another thread has pinned some meanwhile
  return result;
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
            return new_match(
                [&] { return maybe_without_gil(view.size(), [&] { return tree.match(view, space, priority); }); });
          },
          py::arg("tokens"), py::arg("namespace") = py::bytes(), py::arg("priority") = 0)
      .def("match_part", &match_part, py::arg("match"), py::arg("tokens"))
      .def(
          "insert",
          [](PrefixTree& tree, const py::object& tokens, const py::object& block_ids, const py::bytes& name,
             Match* after, int priority) {
            const Integers integers(tokens, "tokens");
            const TokenView view = integers.tokens();
            Integers ids(block_ids, "block_ids");
            const auto span = ids.copied_ids();
            const std::string_view space(name);
            return new_match([&] {
              return maybe_without_gil(view.size(), [&] { return tree.insert(view, span, space, after, priority); });
            });
          },
          py::arg("tokens"), py::arg("block_ids"), py::arg("namespace") = py::bytes(), py::arg("after") = nullptr,
          py::arg("priority") = 0)
      .def(
          "pin",
          [](PrefixTree& tree, const Match& match) { return new_match([&] { return tree.pin(match); }); },
          py::arg("match"))
      .def(
          "num_pinned_only_by",
          [](PrefixTree& tree, const std::vector<const Match*>& matches) {
            for (const Match* match : matches) check(match, "matches must be matches, got None");
            return tree.num_pinned_only_by(matches);
          },
          py::arg("matches"))
      .def("release", &PrefixTree::release, py::arg("match"))
      .def("trim", &PrefixTree::trim, py::arg("match"))
      .def("promote", &promote, py::arg("match"), py::arg("block_ids"))
      .def("write_out", &write_out, py::arg("match"), py::arg("min_hits") = 0)
      .def(
          "evict",
          [](PrefixTree& tree, int64_t num_blocks) {
            return maybe_without_gil(num_blocks, [&] { return tree.evict(num_blocks); });
          },
          py::arg("num_blocks"))
      .def("demote", &demote, py::arg("num_blocks"))
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

// --- whole-sequence slots -------------------------------------------------------------------------------------------

// (prefix_len, slot, slot_ver); None for both where no slot has a prefix.
py::tuple as_tuple(const SlotMatch& match) {
  if (match.num_tokens == 0) return py::make_tuple(0, py::none(), py::none());
  return py::make_tuple(match.num_tokens, match.slot, match.version);
}

// What a call of the tree with `token_ids` gives.
template <typename Call>
auto with_tokens(const py::object& token_ids, Call call) {
  const Integers integers(token_ids, "token_ids");
  const TokenView view = integers.tokens();
  return maybe_without_gil(view.size(), [&] { return call(view); });
}

void bind_slot_tree(py::module_& m) {
  py::class_<SlotTree>(m, "SlotTree", "Which slots hold which sequences; see kvpage.slots.PrefixCacheManager.")
      .def(py::init<int64_t>(), py::arg("max_capacity"))
      .def(
          "insert",
          [](SlotTree& tree, const py::object& token_ids, int64_t slot, int64_t version) {
            return with_tokens(token_ids, [&](const TokenView& view) { return tree.insert(view, slot, version); });
          })
      .def(
          "find",
          [](SlotTree& tree, const py::object& token_ids, const SlotAllocator* allocator) {
            return as_tuple(with_tokens(token_ids, [&](const TokenView& view) { return tree.find(view, allocator); }));
          })
      .def(
          "pin",
          [](SlotTree& tree, const py::object& token_ids, const SlotAllocator* allocator) {
            const Integers integers(token_ids, "token_ids");
            const TokenView view = integers.tokens();
            const SlotMatch match = maybe_without_gil(view.size(), [&] { return tree.pin(view, allocator); });
            try {
              return as_tuple(match);
            } catch (...) {
              tree.release(view.first(match.num_tokens));
              throw;
            }
          })
      .def("release",
           [](SlotTree& tree, const py::object& token_ids) {
             with_tokens(token_ids, [&](const TokenView& view) { tree.release(view); });
           })
      .def("withdraw", &SlotTree::withdraw)
      .def("check", &SlotTree::check_invariants, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("max_capacity", &SlotTree::max_capacity)
      .def_property_readonly("num_tokens", &SlotTree::num_tokens)
      .def_property_readonly("num_over", &SlotTree::num_over)
      .def_property_readonly("num_slots", &SlotTree::num_slots)
      .def_property_readonly("num_nodes", &SlotTree::num_nodes)
      .def_property_readonly("num_pins", &SlotTree::num_pins);
}

// alloc and free take less time than pybind11 takes to call them, so they are methods of CPython's own kind. A method's
// descriptor checks the type of `self`, which has no subclasses; what it lacks before __init__ is checked here.
SlotAllocator* slot_allocator(PyObject* self) {
  const auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  if (held.holder_constructed()) return held.value_ptr<SlotAllocator>();
  PyErr_SetString(PyExc_TypeError, "SlotAllocator.__init__() must be called first");
  return nullptr;
}

PyObject* alloc_slot(PyObject* self, PyObject*) {
  SlotAllocator* allocator = slot_allocator(self);
  if (!allocator) return nullptr;
  const int64_t slot = allocator->alloc();
  PyObject* number = PyLong_FromLongLong(slot);
  if (!number) allocator->free(slot);  // -1 needs no memory
  return number;
}

PyObject* free_slot(PyObject* self, PyObject* slot) {
  SlotAllocator* allocator = slot_allocator(self);
  const int64_t number = allocator ? PyLong_AsLongLong(slot) : -1;
  if (number == -1 && PyErr_Occurred()) return nullptr;
  try {
    allocator->free(number);
  } catch (const InvalidArgument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

void add_method(py::handle type, PyMethodDef& method) {
  auto* owner = reinterpret_cast<PyTypeObject*>(type.ptr());
  const auto descriptor = py::reinterpret_steal<py::object>(PyDescr_NewMethod(owner, &method));
  if (!descriptor) throw py::error_already_set();
  py::setattr(type, method.ml_name, descriptor);
}

void bind_slots(py::module_& m) {
  static PyMethodDef alloc{"alloc", alloc_slot, METH_NOARGS, nullptr};
  static PyMethodDef free{"free", free_slot, METH_O, nullptr};
  py::class_<SlotAllocator> allocator(m, "SlotAllocator", py::is_final(),
                                      "Hands out whole-sequence slots; see kvpage/_C.pyi.");
  add_method(allocator, alloc);
  add_method(allocator, free);
  allocator.def(py::init<int64_t>(), py::arg("max_slots"))
      .def("occupy", &SlotAllocator::occupy, py::arg("slot"))
      .def("is_free", &SlotAllocator::is_free, py::arg("slot"))
      .def("version", &SlotAllocator::version, py::arg("slot"))
      .def_property_readonly("free_count", &SlotAllocator::free_count)
      .def_property_readonly("max_slots", &SlotAllocator::max_slots);
  bind_slot_tree(m);
}

// --- all classes ----------------------------------------------------------------------------------------------------

PyObject* new_instance(PyTypeObject* type, PyObject*, PyObject*) { return py::detail::make_new_instance(type); }

// Every object of our classes has a C++ object behind it; pybind11 hands raw memory to the methods of one that has not.
// Python refuses `base.__new__(cls)`, of any base, for a class with a tp_new of its own: only calling the class makes
// objects, by its constructor. No subclass can override that, nor can an object be given another class.
void seal_classes(const py::module_& m) {
  for (const auto& entry : m.attr("__dict__").cast<py::dict>()) {
    auto* type = reinterpret_cast<PyTypeObject*>(entry.second.ptr());
    if (!PyType_Check(entry.second.ptr()) || !py::detail::get_type_info(type)) continue;
    type->tp_new = &new_instance;
    type->tp_flags &= ~Py_TPFLAGS_BASETYPE;
    type->tp_flags |= Py_TPFLAGS_IMMUTABLETYPE;
    PyType_Modified(type);
  }
}

// --- hashes ---------------------------------------------------------------------------------------------------------

py::bytes bytes_of(const Digest* digests, size_t count) {
  return {reinterpret_cast<const char*>(digests), count * sizeof(Digest)};
}

const Xxh3Kernel& xxh3_kernel_of(const std::string& name) { return name.empty() ? xxh3_kernel() : xxh3_kernel(name.c_str()); }

void bind_hashes(py::module_& m) {
  m.def(
      "xxh3_128_of_stretches",
      [](int64_t data, int64_t num_bytes, int64_t stretch_bytes, int max_threads) {
        check(num_bytes >= 0, "num_bytes must not be negative, got ", num_bytes);
        check(stretch_bytes > 0, "stretch_bytes must be positive, got ", stretch_bytes);
        std::vector<Digest> digests(static_cast<size_t>(num_bytes / stretch_bytes + (num_bytes % stretch_bytes != 0)));
        {
          py::gil_scoped_release release;
          hash_stretches(pointer<const std::byte>(data), num_bytes, stretch_bytes, max_threads, digests.data());
        }
        return bytes_of(digests.data(), digests.size());
      },
      "See kvpage.store.stretches.");
  m.def(
      "copy_and_xxh3_128",
      [](int64_t data, int64_t to, int64_t num_bytes, bool streaming) {
        Digest digest;
        {
          py::gil_scoped_release release;
          Xxh3 hash;
          hash.update_and_copy(pointer<const std::byte>(data), num_bytes, pointer<std::byte>(to), streaming);
          if (streaming) end_streaming();
          digest = hash.digest();
        }
        return bytes_of(&digest, 1);
      },
      "See kvpage.store.stretches.");
  // (address and number of block ids, start, max_threads, streaming)
  using Place = std::tuple<int64_t, int64_t, int64_t, int, bool>;
  const auto place_of = [](const Place& place) {
    const auto& [block_ids, num_block_ids, start, max_threads, streaming] = place;
    return ChunkPlace{pointer<const int32_t>(block_ids), num_block_ids, start, max_threads, streaming};
  };
  const auto digests_of = [](const ChunkPlan& plan, int64_t num_bytes) {
    check(num_bytes >= 0, "num_bytes must not be negative, got ", num_bytes);
    return std::vector<Digest>(static_cast<size_t>(num_bytes / plan.layer_bytes()));
  };
  py::class_<ChunkPlan>(m, "ChunkPlan", "See kvpage.store.block_io, which checks what needs a tensor.")
      .def(py::init([](const std::vector<Part>& parts, const std::array<int64_t, 7>& shape) {
        return ChunkPlan(token_moves(parts), {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]});
      }))
      .def("store", [=](const ChunkPlan& plan, const Place& place, int64_t first, int64_t payload, int64_t num_bytes) {
        std::vector<Digest> digests = digests_of(plan, num_bytes);
        {
          py::gil_scoped_release release;
          plan.store(place_of(place), first, pointer<std::byte>(payload), num_bytes, digests.data());
        }
        return bytes_of(digests.data(), digests.size());
      })
      .def("load", [=](const ChunkPlan& plan, const Place& place, int64_t first, int64_t payload, int64_t num_bytes,
                       int64_t first_token, int64_t last_token) {
        std::vector<Digest> digests = digests_of(plan, num_bytes);
        {
          py::gil_scoped_release release;
          plan.load(place_of(place), first, pointer<const std::byte>(payload), num_bytes, first_token, last_token,
                    digests.data());
        }
        return bytes_of(digests.data(), digests.size());
      });
  py::class_<Xxh3>(m, "_Xxh3", "The hash itself, with the kernel of an instruction set, for tests.")
      .def(py::init([](const std::string& name) { return Xxh3(xxh3_kernel_of(name)); }))
      .def("update", [](Xxh3& hash, const std::string& data) {
        const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
        hash.update(bytes, static_cast<int64_t>(data.size()), bytes);
      })
      .def("update_and_copy", [](Xxh3& hash, int64_t data, int64_t num_bytes, int64_t to, bool streaming) {
        const auto* bytes = pointer<const std::byte>(data);
        hash.update_and_copy(bytes, num_bytes, pointer<std::byte>(to), streaming, bytes);
        if (streaming) end_streaming();
      })
      .def("digest", [](const Xxh3& hash) {
        const Digest digest = hash.digest();
        return bytes_of(&digest, 1);
      });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native core of kvpage: addresses, sizes and stream handles in; no torch.";
  register_errors(m);
  m.def("build_info", &build_info, "What this extension was built with.");
  bind_token_ops(m);
  bind_blending(m);
  bind_hashes(m);
  bind_block_copies(m);
  bind_pool(m);
  bind_match(m);
  bind_tree(m);
  bind_slots(m);
  seal_classes(m);
}
