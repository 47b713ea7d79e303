// Blocks and state slots allocated and released.
#include "bindings/bindings.h"

#include "bindings/integers.h"
#include "bindings/methods.h"
#include "bindings/new_arrays.h"
#include "docs.h"
#include "pool/block_pool.h"
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
