// Methods of CPython's own kind, for calls that take less time than pybind11 takes to make them. A method's descriptor
// checks the type of `self`, which has no subclasses; a `self` without __init__ is refused here.
#pragma once

#include <new>
#include <stdexcept>
#include <string>

#include "base/check.h"
#include "bindings/bindings.h"

namespace kvpage {

// Returns the C++ object of `self`.
template <typename T>
T& held_by_self(PyObject* self) {
  const auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  if (!held.holder_constructed())
    throw py::type_error(py::type::of(self).attr("__name__").cast<std::string>() + ".__init__() must be called first");
  return *held.value_ptr<T>();
}

// Returns the result of the call; null, with Python's error set, if it throws.
template <typename Call>
PyObject* as_method(Call call) noexcept {
  try {
    return call();
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const py::builtin_exception& e) {
    e.set_error();
  } catch (const OutOfBlocks& e) {
    set_out_of_blocks(e);
  } catch (const InvalidArgument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::length_error&) {  // more than any memory has
    PyErr_NoMemory();
  }
  return nullptr;
}

// The one argument of a vector call, by its place or by its name.
inline py::object only_argument(PyObject* const* args, Py_ssize_t num_args, PyObject* names, const char* name) {
  const bool is_named = names && PyTuple_GET_SIZE(names) == 1 && num_args == 0 &&
                        PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), name) == 0;
  if (!is_named && (num_args != 1 || names)) throw py::type_error(std::string("the one argument must be ") + name);
  return py::reinterpret_borrow<py::object>(args[0]);
}

// Raises TypeError for anything but an integer, InvalidArgument beyond 64 bits.
inline int64_t int64_from(py::handle number, const char* name) {
  py::object converted;
  if (!PyLong_Check(number.ptr())) {
    converted = py::reinterpret_steal<py::object>(PyNumber_Index(number.ptr()));
    if (!converted) throw py::error_already_set();
    number = converted;
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) fail(name, " must fit into 64 bits, got ", py::str(number).cast<std::string>());
  return value;
}

// A method whose arguments cannot be named.
inline PyCFunction fast_call(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// `method` and its text must live as long as the process.
inline void add_method(py::handle type, PyMethodDef& method) {
  auto* owner = reinterpret_cast<PyTypeObject*>(type.ptr());
  const auto descriptor = py::reinterpret_steal<py::object>(PyDescr_NewMethod(owner, &method));
  if (!descriptor) throw py::error_already_set();
  py::setattr(type, method.ml_name, descriptor);
}

}  // namespace kvpage
