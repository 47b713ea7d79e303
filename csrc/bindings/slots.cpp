// Whole-sequence slots.
#include "bindings/bindings.h"

#include "bindings/integers.h"
#include "bindings/methods.h"
#include "docs.h"
#include "slots/slot_allocator.h"
#include "slots/slot_tree.h"

namespace kvpage {

namespace {

// (prefix_len, slot, slot_ver); None for both where no slot has a prefix.
py::tuple as_tuple(const SlotMatch& match) {
  if (match.num_tokens == 0) return py::make_tuple(0, py::none(), py::none());
  return py::make_tuple(match.num_tokens, match.slot, match.version);
}

// A walk that may take long gives the GIL up. Giving it up costs threads that all do so more than a short one does.
template <typename Call>
auto maybe_without_gil(int64_t num_tokens, Call call) {
  constexpr int64_t kShort = 1 << 16;
  if (num_tokens < kShort) return call();
  py::gil_scoped_release released;
  return call();
}

// Returns the result of a call of the tree with `token_ids`.
template <typename Call>
auto with_tokens(const py::object& token_ids, Call call) {
  const Integers integers(token_ids, "token_ids");
  const TokenView view = integers.tokens();
  return maybe_without_gil(view.size(), [&] { return call(view); });
}

PyObject* alloc_slot(PyObject* self, PyObject*) {
  return as_method([&] {
    auto& allocator = held_by_self<SlotAllocator>(self);
    const int64_t slot = allocator.alloc();
    PyObject* number = PyLong_FromLongLong(slot);
    if (!number) allocator.free(slot);  // -1 needs no memory
    return number;
  });
}

PyObject* free_slot(PyObject* self, PyObject* slot) {
  return as_method([&] {
    auto& allocator = held_by_self<SlotAllocator>(self);
    const int64_t number = PyLong_AsLongLong(slot);
    if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
    allocator.free(number);
    return py::none().release().ptr();
  });
}

void add_fast_slot_methods(py::handle type) {
  static const std::string texts[] = {
      std::string("alloc($self, /)\n--\n\n") + doc("SlotAllocator.alloc"),
      std::string("free($self, slot, /)\n--\n\n") + doc("SlotAllocator.free"),
  };
  static PyMethodDef methods[] = {
      {"alloc", &alloc_slot, METH_NOARGS, texts[0].c_str()},
      {"free", &free_slot, METH_O, texts[1].c_str()},
  };
  for (PyMethodDef& method : methods) add_method(type, method);
}

void bind_slot_tree(py::module_& m) {
  py::class_<SlotTree>(m, "SlotTree", "Which slots hold which sequences; see kvpage.extras.slots.PrefixCacheManager.")
      .def(py::init<int64_t>(), py::arg("max_capacity"))
      .def("insert",
           [](SlotTree& tree, const py::object& token_ids, int64_t slot, int64_t version) {
             return with_tokens(token_ids, [&](const TokenView& view) { return tree.insert(view, slot, version); });
           })
      .def("find",
           [](SlotTree& tree, const py::object& token_ids, const SlotAllocator* allocator) {
             return as_tuple(with_tokens(token_ids, [&](const TokenView& view) { return tree.find(view, allocator); }));
           })
      .def("pin",
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
  py::class_<SlotAllocator> allocator(m, "SlotAllocator", py::is_final(), doc("SlotAllocator"));
  add_fast_slot_methods(allocator);
  allocator.def(py::init<int64_t>(), py::arg("max_slots"), doc("SlotAllocator.__init__"))
      .def("occupy", &SlotAllocator::occupy, py::arg("slot"), doc("SlotAllocator.occupy"))
      .def("is_free", &SlotAllocator::is_free, py::arg("slot"), doc("SlotAllocator.is_free"))
      .def("version", &SlotAllocator::version, py::arg("slot"), doc("SlotAllocator.version"))
      .def_property_readonly("free_count", &SlotAllocator::free_count, doc("SlotAllocator.free_count"))
      .def_property_readonly("max_slots", &SlotAllocator::max_slots, doc("SlotAllocator.max_slots"));
  bind_slot_tree(m);
}

}  // namespace kvpage
