#include "simd/instruction_sets.h"

#include <string_view>

namespace kvpage {
namespace {

#if defined(__x86_64__)
bool has_avx2() {  // F16C is older than both
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512bf16() { return false; }
#endif

}  // namespace

bool has_instruction_set(const char* name) {
  const std::string_view set = name;
  if (set == "base") return true;
  return (set == "avx2" && has_avx2()) || (set == "avx512" && has_avx512()) ||
         (set == "avx512bf16" && has_avx512bf16());
}

}  // namespace kvpage
