// kvpage._C: its errors, its classes as Python sees them, and the parts that the files of this folder add.
#include "bindings/bindings.h"

#include "base/build_facts.h"
#include "base/check.h"
#include "simd/instruction_sets.h"

using namespace kvpage;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = kBuildVersion;
  info["sources"] = kBuildSources;
  info["compiler"] = kBuildCompiler;
  info["cuda"] = kBuildCuda;
  info["cuda_archs"] = kBuildCudaArchs;
  return info;
}

// InvalidArgument becomes ValueError by pybind11 itself; OutOfBlocks carries its two numbers over.
void register_errors(py::module_& m) {
  m.attr("OutOfBlocks") = py::module_::import("kvpage.checks.errors").attr("OutOfBlocks");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const OutOfBlocks& e) {
      kvpage::set_out_of_blocks(e);
    }
  });
}

PyObject* new_instance(PyTypeObject* type, PyObject*, PyObject*) { return py::detail::make_new_instance(type); }

// Every object of our classes must have a C++ object: pybind11 passes raw memory to the methods of one without.
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

}  // namespace

void kvpage::set_out_of_blocks(const OutOfBlocks& error) {
  const char* name = dynamic_cast<const OutOfSlots*>(&error) ? "OutOfSlots" : "OutOfBlocks";
  py::object type = py::module_::import("kvpage.checks.errors").attr(name);
  PyErr_SetObject(type.ptr(), type(error.needed, error.free).ptr());
}

PYBIND11_MODULE(_C, m) {
  check_instruction_cap();
  m.doc() = "The native core of kvpage: addresses, sizes and stream handles in; no torch.";
  register_errors(m);
  m.def("build_info", &build_info, "What this extension was built with.");
  bind_tokens(m);
  bind_attention(m);
  bind_quantization(m);
  bind_transpose(m);
  bind_blending(m);
  bind_linear(m);
  bind_recurrence(m);
  bind_chunks(m);
  bind_block_copies(m);
  bind_pool(m);
  bind_eviction(m);
  bind_states(m);
  bind_match(m);
  bind_tree(m);
  bind_sequences(m);
  bind_slots(m);
  bind_sampling(m);
  seal_classes(m);
}
