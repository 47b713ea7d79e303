// KernelFamily: one table of functions, compiled once for each instruction set; the machine decides which it takes.
//
//   attention_kernel_impl.h ──┬─► kernel.cpp.in for base     ─► attention_kernel_base   ─┐
//                             ├─► kernel.cpp.in for avx2     ─► attention_kernel_avx2   ─┼─► attention_kernels().best()
//                             └─► kernel.cpp.in for avx512   ─► attention_kernel_avx512 ─┘
//
// CMakeLists.txt lists the families and the instruction sets. A table is a struct of function pointers whose first
// member is `const char* name`, the name of its instruction set.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "base/check.h"
#include "simd/instruction_sets.h"

#if defined(__x86_64__)
#define KVPAGE_DECLARE_KERNELS(Kernel, name) extern const Kernel name##_base, name##_avx2, name##_avx512
#define KVPAGE_COMPILED_KERNELS(name) &name##_avx512, &name##_avx2, &name##_base
#else
#define KVPAGE_DECLARE_KERNELS(Kernel, name) extern const Kernel name##_base
#define KVPAGE_COMPILED_KERNELS(name) &name##_base
#endif

namespace kvpage {

template <typename Kernel>
class KernelFamily {
 public:
  // compiled: the best first, "base" last of those for machines. Null: not taken here.
  KernelFamily(std::initializer_list<const Kernel*> compiled) {
    for (const Kernel* kernel : compiled)
      if (kernel != nullptr && has_instruction_set(kernel->name)) supported_.push_back(kernel);
  }

  // The best kernel of this machine.
  const Kernel& best() const { return *supported_.front(); }

  // The kernel of an instruction set, for tests; the best for an empty name. Throws InvalidArgument if this machine
  // lacks it.
  const Kernel& named(const std::string& name) const {
    for (const Kernel* kernel : supported_)
      if (name.empty() || name == kernel->name) return *kernel;
    fail("kernel must be one that this machine has, got ", name);
  }

  // The names of the kernels that this machine runs, the best first.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const Kernel* kernel : supported_) all.push_back(kernel->name);
    return all;
  }

 private:
  std::vector<const Kernel*> supported_;
};

}  // namespace kvpage
