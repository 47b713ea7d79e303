// Whole-sequence slots.
#include "bindings.h"

#include "integers.h"
#include "slot_allocator.h"
#include "slot_tree.h"

namespace kvpage {

namespace {

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

}  // namespace

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

}  // namespace kvpage
