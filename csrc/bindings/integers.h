// Integers of Python: small ones, and arrays of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/token_view.h"
#include "bindings/bindings.h"

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

namespace kvpage {

// --- small ints: of one digit, less than 2^30 either side of 0. They are read without a call ------------------------

// Requires an exact int.
inline bool is_small(PyObject* number) {
#if PY_VERSION_HEX >= 0x030C0000
  return PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(number));
#else
  const Py_ssize_t signed_digits = reinterpret_cast<PyVarObject*>(number)->ob_size;
  return signed_digits >= -1 && signed_digits <= 1;
#endif
}

// Requires that it is small.
inline int64_t small_value(PyObject* number) {
#if PY_VERSION_HEX >= 0x030C0000
  return PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(number));
#else
  const auto* whole = reinterpret_cast<PyLongObject*>(number);
  return reinterpret_cast<PyVarObject*>(number)->ob_size * static_cast<int64_t>(whole->ob_digit[0]);
#endif
}

// --- arrays ---------------------------------------------------------------------------------------------------------

// A caller's integers: an int32 or int64 array or buffer is read in place, anything else is converted.
class Integers {
 public:
  Integers(const py::object& source, const char* name) : name_(name), array_(as_array(source, name)) {
    if (is_plain()) return;
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

  // Returns int32: in place, or narrowed into memory of this object.
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

  // Returns int64: in place, or widened into memory of this object.
  std::span<const int64_t> wide() {
    const auto size = static_cast<size_t>(array_.size());
    if (is_wide_) return {static_cast<const int64_t*>(array_.data()), size};
    const auto* narrow = static_cast<const int32_t*>(array_.data());
    widened_.assign(narrow, narrow + size);
    return widened_;
  }

  // For calls that give up the GIL: another thread may write to the caller's array meanwhile.
  std::span<const int32_t> copied_ids() {
    const auto read = ids();
    if (read.data() != narrowed_.data()) narrowed_.assign(read.begin(), read.end());
    return narrowed_;
  }

 private:
  // Returns whether it is an ordinary array, which needs no further check, and notes its width.
  bool is_plain() {
    const auto* array = py::detail::array_proxy(array_.ptr());
    const auto* type = py::detail::array_descriptor_proxy(array->descr);
    constexpr int kOrdinary = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
    const bool is_narrow = type->type_num == py::detail::npy_api::NPY_INT32_;
    is_wide_ = type->type_num == py::detail::npy_api::NPY_INT64_;
    if (array->nd == 1 && (is_narrow || is_wide_) && type->byteorder == '=' && (array->flags & kOrdinary) == kOrdinary)
      return true;
    is_wide_ = false;
    return false;
  }

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
      // torch has many reasons: a tensor on a device, with a gradient, negated, nested, ...
      if (!error.matches(PyExc_RuntimeError)) throw;
      fail(name, " must be readable as an array: ", error.what());
    }
  }

  // Returns nothing if a value is no plain int.
  static std::optional<py::array> from_list(PyObject* list, const char* name) {
    py::array_t<int64_t> array(PyList_GET_SIZE(list));
    int64_t* values = array.mutable_data();
    for (py::ssize_t i = 0; i < array.size(); ++i) {
      PyObject* item = PyList_GET_ITEM(list, i);
      if (PyLong_CheckExact(item) && is_small(item)) {
        values[i] = small_value(item);
        continue;
      }
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
  std::vector<int64_t> widened_;
};

}  // namespace kvpage
