// A CUDA call that failed. Reaches Python as RuntimeError.
#pragma once

#include <stdexcept>
#include <string>

namespace kvpage {

struct CudaError : std::runtime_error {
  CudaError(const std::string& call, const std::string& name, const std::string& meaning)
      : std::runtime_error(call + " failed with " + name + ": " + meaning) {}
};

}  // namespace kvpage
