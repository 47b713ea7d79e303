// New arrays: ids, integers and pairs that a call returns.
//
// A call that has changed the tree must not fail for lack of memory: its pins and pairs would be lost, and what they
// name would be read without ever having been copied. So the objects that it returns are made before it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "bindings/bindings.h"
#include "tree/prefix_tree.h"

namespace kvpage {

// Returns an uninitialised array, faster than py::array_t, which takes any shape and type.
inline py::object new_array(int type_num, std::initializer_list<Py_intptr_t> shape) {
  const auto& api = py::detail::npy_api::get();
  PyObject* type = api.PyArray_DescrFromType_(type_num);
  PyObject* array = api.PyArray_NewFromDescr_(api.PyArray_Type_, type, static_cast<int>(shape.size()), shape.begin(),
                                              nullptr, nullptr, 0, nullptr);
  if (!array) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(array);
}

template <typename T>
T* values_of(const py::object& array) {
  return reinterpret_cast<T*>(py::detail::array_proxy(array.ptr())->data);
}

// int32 [size] or [num_rows, width]
inline py::object new_ids(int64_t size) { return new_array(py::detail::npy_api::NPY_INT32_, {size}); }
inline py::object new_ids(int64_t num_rows, int64_t width) {
  return new_array(py::detail::npy_api::NPY_INT32_, {num_rows, width});
}

// int64 [size]
inline py::object new_integers(int64_t size) { return new_array(py::detail::npy_api::NPY_INT64_, {size}); }

// int64 [size, 2]
inline py::object new_pairs(int64_t size) { return new_array(py::detail::npy_api::NPY_INT64_, {size, 2}); }

inline py::object copy_of(std::span<const int32_t> ids) {
  py::object copy = new_ids(static_cast<int64_t>(ids.size()));
  std::copy(ids.begin(), ids.end(), values_of<int32_t>(copy));
  return copy;
}

// int64 [most, 2]
inline py::array_t<int64_t> room_for_pairs(int64_t most) {
  return py::array_t<int64_t>({py::ssize_t{most}, py::ssize_t{2}});
}

inline void fill_pairs(py::array_t<int64_t>& array, const std::vector<TierPair>& pairs) {
  int64_t* out = array.mutable_data();
  for (const auto& [from, to] : pairs) *out++ = from, *out++ = to;
  const auto num_pairs = static_cast<py::ssize_t>(pairs.size());
  if (num_pairs < array.shape(0)) array.resize({num_pairs, py::ssize_t{2}}, false);  // gives memory back: needs none
}

}  // namespace kvpage
