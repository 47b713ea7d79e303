// Blocks: who has which.
#include "bindings.h"

#include "block_pool.h"
#include "integers.h"

namespace kvpage {

namespace {

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

}  // namespace

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

}  // namespace kvpage
