// Tokens read from lists, written to blocks, gathered from them, and copied to chunks and back.
#include "bindings/bindings.h"

#include <algorithm>
#include <span>

#include "bindings/addresses.h"
#include "bindings/integers.h"
#include "bindings/new_arrays.h"
#include "chunks/chunk_copy.h"
#include "docs.h"
#include "tokens/gather_cache.h"
#include "tokens/reshape_cache.h"

namespace kvpage {

namespace {

// Writes the numbers up to the first that is no plain one of at most 30 bits, and returns whether there is none. It
// runs no code of Python's, so the list stays as it is.
bool read_small(PyObject* list, int32_t* out) {
  const Py_ssize_t size = PyList_GET_SIZE(list);
  PyObject** items = reinterpret_cast<PyListObject*>(list)->ob_item;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = items[i];
    if (!PyLong_CheckExact(item) || !is_small(item)) return false;
    out[i] = static_cast<int32_t>(small_value(item));
  }
  return true;
}

py::object small_ints(const py::list& list) {
  const auto size = static_cast<Py_ssize_t>(list.size());
  py::object array = new_ids(size);
  if (PyList_GET_SIZE(list.ptr()) != size) return py::none();  // collecting garbage has changed it
  if (!read_small(list.ptr(), values_of<int32_t>(array))) return py::none();
  return array;
}

// Returns whether all are in [0, limit): neither an id nor its distance to the last one is negative.
bool all_below(std::span<const int32_t> ids, int64_t limit) {
  const auto last = static_cast<uint32_t>(std::clamp<int64_t>(limit, 0, INT64_C(1) << 31) - 1);
  uint32_t bits = 0;
  for (const int32_t id : ids) bits |= static_cast<uint32_t>(id) | (last - static_cast<uint32_t>(id));
  return ids.empty() || (limit > 0 && !(bits >> 31));
}

// Returns whether it is an ordinary array: no subclass, of int32, contiguous.
bool is_int32_row(const py::object& object) {
  if (Py_TYPE(object.ptr()) != py::detail::npy_api::get().PyArray_Type_) return false;
  const auto* array = py::detail::array_proxy(object.ptr());
  const auto* type = py::detail::array_descriptor_proxy(array->descr);
  constexpr int kOrdinary = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  return array->nd == 1 && type->type_num == py::detail::npy_api::NPY_INT32_ && type->byteorder == '=' &&
         (array->flags & kOrdinary) == kOrdinary;
}

py::object ids_below(const py::object& tokens, int64_t limit) {
  py::object ids = PyList_CheckExact(tokens.ptr()) ? small_ints(tokens) : tokens;
  if (!is_int32_row(ids)) return py::none();
  const auto size = static_cast<size_t>(py::detail::array_proxy(ids.ptr())->dimensions[0]);
  return all_below({values_of<int32_t>(ids), size}, limit) ? ids : py::none();
}

// Strides in elements: of block, token, head, run and element; and those of the scales, of block, token and head.
KVPart kv_part(int64_t data, const std::array<int64_t, 5>& strides, int64_t run_size, int64_t element_bytes,
               int64_t scales, const std::array<int64_t, 3>& scale_strides) {
  const auto bytes = [element_bytes](int64_t stride) { return stride * element_bytes; };
  const auto scale_bytes = [](int64_t stride) { return stride * int64_t{sizeof(float)}; };
  return {pointer<std::byte>(data),
          bytes(strides[0]),
          bytes(strides[1]),
          bytes(strides[2]),
          bytes(strides[3]),
          run_size,
          element_bytes,
          pointer<std::byte>(scales),
          scale_bytes(scale_strides[0]),
          scale_bytes(scale_strides[1]),
          scale_bytes(scale_strides[2])};
}

}  // namespace

void bind_tokens(py::module_& m) {
  py::class_<KVPart>(m, "KVPart", doc("KVPart"))
      .def(py::init(&kv_part), py::arg("data"), py::arg("strides"), py::arg("run_size"), py::arg("element_bytes"),
           py::arg("scales") = 0, py::arg("scale_strides") = std::array<int64_t, 3>{}, doc("KVPart.__init__"));
  m.def("small_ints", &small_ints, py::arg("numbers"), py::pos_only(), doc("small_ints"));
  m.def("ids_below", &ids_below, py::arg("tokens"), py::arg("limit"), py::pos_only(), doc("ids_below"));
  m.def(
      "reshape_and_cache",
      [](const std::vector<Part>& parts, int64_t slot_mapping, int64_t num_tokens, int64_t num_heads,
         int64_t num_blocks, int64_t block_size, int max_threads) {
        const std::vector<TokenMove> moves = token_moves(parts);
        reshape_and_cache({moves.data(), static_cast<int>(moves.size()), pointer<const int64_t>(slot_mapping),
                           num_tokens, num_heads, num_blocks, block_size, max_threads});
      },
      py::call_guard<py::gil_scoped_release>(), "See kvpage.ops.reshape_and_cache, which checks what needs a tensor.");
  m.def(
      "gather_cache",
      [](const std::vector<Part>& parts, const std::array<int64_t, 6>& tables, const Numbers& seq_starts,
         const Numbers& seq_lens, const std::vector<Numbers>& row_offsets, int64_t num_heads, int max_threads) {
        const std::vector<TokenMove> moves = token_moves(parts);
        check(moves.size() <= 2 && row_offsets.size() >= moves.size(), "there must be row offsets for K and V");
        GatherCache args{moves.data(),
                         static_cast<int>(moves.size()),
                         block_tables(tables),
                         numbers(seq_starts, tables),
                         numbers(seq_lens, tables),
                         {},
                         num_heads,
                         max_threads};
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
        py::call_guard<py::gil_scoped_release>(), "See kvpage.ops.chunks, which checks what needs a tensor.");
  };
  bind_chunk("store_chunk", &store_chunk);
  bind_chunk("load_chunk", &load_chunk);
}

}  // namespace kvpage
