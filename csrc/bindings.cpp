// The only file that knows Python: every class and function of kvpage._C, and nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "check.h"

namespace py = pybind11;
using namespace kvpage;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = KVPAGE_VERSION;
  info["compiler"] = __VERSION__;
#ifdef KVPAGE_HAS_CUDA
  info["cuda"] = KVPAGE_CUDA_VERSION;
  info["cuda_archs"] = KVPAGE_CUDA_ARCHS;
#else
  info["cuda"] = py::none();
  info["cuda_archs"] = py::none();
#endif
  return info;
}

// InvalidArgument becomes ValueError by pybind11 itself; OutOfBlocks carries its two numbers over.
void register_errors(py::module_& m) {
  m.attr("OutOfBlocks") = py::module_::import("kvpage.errors").attr("OutOfBlocks");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const OutOfBlocks& e) {
      py::object type = py::module_::import("kvpage.errors").attr("OutOfBlocks");
      PyErr_SetObject(type.ptr(), type(e.needed, e.free).ptr());
    }
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native core of kvpage: addresses, sizes and stream handles in; no torch.";
  register_errors(m);
  m.def("build_info", &build_info, "What this extension was built with.");
}
