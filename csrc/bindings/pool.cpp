// Blocks and state slots allocated and released; policies of eviction, and the order of a store's records.
#include "bindings/bindings.h"

#include "bindings/integers.h"
#include "bindings/methods.h"
#include "bindings/new_arrays.h"
#include "docs.h"
#include "pool/block_pool.h"
#include "pool/eviction/eviction_policies.h"
#include "pool/eviction/record_order.h"
#include "states/slot_pool.h"

namespace kvpage {

namespace {

PyObject* allocate(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
  return as_method([&] {
    auto& pool = held_by_self<BlockPool>(self);
    const int64_t n = int64_from(only_argument(args, num_args, names, "n"), "n");
    check(n >= 0, "n must not be negative, got ", n);
    if (n > pool.num_blocks())  // no memory for what cannot be
      throw OutOfBlocks(static_cast<size_t>(n), static_cast<size_t>(pool.num_free()));
    py::object ids = new_ids(n);
    pool.allocate({values_of<int32_t>(ids), static_cast<size_t>(n)});
    return ids.release().ptr();
  });
}

PyObject* allocate_one(PyObject* self, PyObject*) {
  return as_method([&] {
    auto& pool = held_by_self<BlockPool>(self);
    int32_t id;
    pool.allocate({&id, 1});
    PyObject* number = PyLong_FromLong(id);
    if (!number) pool.release({&id, 1});
    return number;
  });
}

PyObject* share(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
  return as_method([&] {
    auto& pool = held_by_self<BlockPool>(self);
    pool.share(Integers(only_argument(args, num_args, names, "ids"), "ids").ids());
    return py::none().release().ptr();
  });
}

PyObject* release(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* names) {
  return as_method([&] {
    auto& pool = held_by_self<BlockPool>(self);
    pool.release(Integers(only_argument(args, num_args, names, "ids"), "ids").ids());
    return py::none().release().ptr();
  });
}

PyObject* release_one(PyObject* self, PyObject* block_id) {
  return as_method([&] {
    auto& pool = held_by_self<BlockPool>(self);
    const int64_t wide = int64_from(block_id, "block_id");
    const auto id = static_cast<int32_t>(wide);
    check(id == wide, "block_id must fit into 32 bits, got ", wide);
    pool.release({&id, 1});
    return py::none().release().ptr();
  });
}

// A method whose one argument may be named, or one whose arguments cannot.
PyCFunction vector_call(_PyCFunctionFastWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

void add_fast_pool_methods(py::handle type) {
  constexpr int kOneArgument = METH_FASTCALL | METH_KEYWORDS;
  static const std::string texts[] = {
      std::string("allocate($self, /, n)\n--\n\n") + doc("BlockPool.allocate"),
      std::string("allocate_one($self, /)\n--\n\n") + doc("BlockPool.allocate_one"),
      std::string("share($self, /, ids)\n--\n\n") + doc("BlockPool.share"),
      std::string("release($self, /, ids)\n--\n\n") + doc("BlockPool.release"),
      std::string("release_one($self, block_id, /)\n--\n\n") + doc("BlockPool.release_one"),
  };
  static PyMethodDef methods[] = {
      {"allocate", vector_call(&allocate), kOneArgument, texts[0].c_str()},
      {"allocate_one", &allocate_one, METH_NOARGS, texts[1].c_str()},
      {"share", vector_call(&share), kOneArgument, texts[2].c_str()},
      {"release", vector_call(&release), kOneArgument, texts[3].c_str()},
      {"release_one", &release_one, METH_O, texts[4].c_str()},
  };
  for (PyMethodDef& method : methods) add_method(type, method);
}

void check_slots(const SlotPool& pool, const py::object& owned) {
  if (owned.is_none()) return pool.check_invariants(std::nullopt);
  Integers integers(owned, "owned");
  pool.check_invariants(integers.wide());
}

int64_t victim(const SlotPool& pool, int64_t besides, const std::vector<int64_t>& kept) {
  return pool.victim(besides, kept);
}

PyObject* use_record(PyObject* self, PyObject* place) {
  return as_method([&] {
    held_by_self<RecordOrder>(self).use(int64_from(place, "place"));
    return py::none().release().ptr();
  });
}

PyObject* remove_record(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return as_method([&] {
    if (num_args < 1 || num_args > 2) throw py::type_error("the arguments must be place and is_evicted");
    const int is_evicted = num_args == 2 ? PyObject_IsTrue(args[1]) : 0;
    if (is_evicted < 0) throw py::error_already_set();
    held_by_self<RecordOrder>(self).remove(int64_from(args[0], "place"), is_evicted != 0);
    return py::none().release().ptr();
  });
}

PyObject* add_record(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return as_method([&] {
    if (num_args > 1) throw py::type_error("the one argument must be age");
    const double age = num_args == 1 ? PyFloat_AsDouble(args[0]) : 0.0;
    if (PyErr_Occurred()) throw py::error_already_set();
    auto& order = held_by_self<RecordOrder>(self);
    const int64_t place = order.add(age);
    PyObject* number = PyLong_FromLongLong(place);
    if (!number) order.remove(place);
    return number;
  });
}

void add_fast_order_methods(py::handle type) {
  static const std::string texts[] = {
      std::string("add($self, age=0.0, /)\n--\n\n") + doc("RecordOrder.add"),
      std::string("use($self, place, /)\n--\n\n") + doc("RecordOrder.use"),
      std::string("remove($self, place, is_evicted=False, /)\n--\n\n") + doc("RecordOrder.remove"),
  };
  static PyMethodDef methods[] = {
      {"add", fast_call(&add_record), METH_FASTCALL, texts[0].c_str()},
      {"use", &use_record, METH_O, texts[1].c_str()},
      {"remove", fast_call(&remove_record), METH_FASTCALL, texts[2].c_str()},
  };
  for (PyMethodDef& method : methods) add_method(type, method);
}

}  // namespace

void bind_pool(py::module_& m) {
  py::class_<BlockPool, std::shared_ptr<BlockPool>> pool(m, "BlockPool", doc("BlockPool"));
  add_fast_pool_methods(pool);
  pool.def(py::init<int64_t>(), py::arg("num_blocks"), doc("BlockPool.__init__"))
      .def("ref_count", &BlockPool::ref_count, py::arg("block_id"), doc("BlockPool.ref_count"))
      .def_property_readonly("num_free", &BlockPool::num_free, doc("BlockPool.num_free"))
      .def_property_readonly("num_blocks", &BlockPool::num_blocks, doc("BlockPool.num_blocks"))
      .def("check", &BlockPool::check_invariants, py::call_guard<py::gil_scoped_release>(), doc("BlockPool.check"));
}

void bind_eviction(py::module_& m) {
  m.def("eviction_policies", [] { return py::tuple(py::cast(eviction_policies())); }, doc("eviction_policies"));
  py::class_<RecordWalk>(m, "RecordWalk", doc("RecordWalk"))
      .def("take", &RecordWalk::take, py::arg("count"), doc("RecordWalk.take"));
  py::class_<RecordOrder> order(m, "RecordOrder", doc("RecordOrder"));
  add_fast_order_methods(order);
  order.def(py::init<std::string_view>(), py::arg("policy"), doc("RecordOrder.__init__"))
      .def("walk", &RecordOrder::walk, py::keep_alive<0, 1>(), doc("RecordOrder.walk"))
      .def("set_time", &RecordOrder::set_time, py::arg("seconds"), doc("RecordOrder.set_time"))
      .def("check", &RecordOrder::check_invariants, doc("RecordOrder.check"))
      .def("__len__", &RecordOrder::size, doc("RecordOrder.__len__"))
      .def_property_readonly("policy", &RecordOrder::policy, doc("RecordOrder.policy"));
}

void bind_states(py::module_& m) {
  py::class_<SlotPool>(m, "SlotPool", doc("SlotPool"))
      .def(py::init<int64_t>(), py::arg("num_slots"), doc("SlotPool.__init__"))
      .def("allocate", &SlotPool::allocate, doc("SlotPool.allocate"))
      .def("occupy", &SlotPool::occupy, py::arg("slot"), doc("SlotPool.occupy"))
      .def("share", &SlotPool::share, py::arg("slot"), doc("SlotPool.share"))
      .def("release", &SlotPool::release, py::arg("slot"), doc("SlotPool.release"))
      .def("ref_count", &SlotPool::ref_count, py::arg("slot"), doc("SlotPool.ref_count"))
      .def("rank", &SlotPool::rank, py::arg("slot"), py::arg("rank"), doc("SlotPool.rank"))
      .def("unrank", &SlotPool::unrank, py::arg("slot"), doc("SlotPool.unrank"))
      .def("victim", &victim, py::arg("besides") = SlotPool::kNone, py::arg("kept") = py::tuple(),
           doc("SlotPool.victim"))
      .def_property_readonly("num_slots", &SlotPool::num_slots, doc("SlotPool.num_slots"))
      .def_property_readonly("num_free", &SlotPool::num_free, doc("SlotPool.num_free"))
      .def_property_readonly("num_ranked", &SlotPool::num_ranked, doc("SlotPool.num_ranked"))
      .def_property_readonly("free_slots", &SlotPool::free_slots, doc("SlotPool.free_slots"))
      .def("check", &check_slots, py::arg("owned") = py::none(), doc("SlotPool.check"));
}

}  // namespace kvpage
