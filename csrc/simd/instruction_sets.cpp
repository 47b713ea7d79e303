#include "simd/instruction_sets.h"

#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "simd/tile_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

// Of leaf 7's EDX. Older compilers lack their names.
bool has_extended_feature(int bit) {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> bit & 1u) != 0;
}

bool has_amx_bf16() { return has_avx512() && has_extended_feature(22); }
bool has_amx_tiles() { return has_amx_bf16() && has_extended_feature(24); }
bool has_avx512_fp16() { return has_avx512() && has_extended_feature(23); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512bf16() { return false; }
bool has_amx_bf16() { return false; }
bool has_amx_tiles() { return false; }
bool has_avx512_fp16() { return false; }
#endif

// Those with code of their own, each with the instructions of all before it. Others come after them.
constexpr std::string_view kSets[] = {"base", "avx2", "avx512", "avx512bf16", "amx"};
constexpr size_t kNumSets = sizeof(kSets) / sizeof(kSets[0]);

size_t rank_of(std::string_view set) {
  size_t rank = 0;
  while (rank < kNumSets && kSets[rank] != set) ++rank;
  return rank;
}

// The rank of the best set that the environment allows.
size_t read_cap() {
  const char* name = std::getenv(kCapVariable);
  if (name == nullptr || *name == '\0') return kNumSets;
  const size_t rank = rank_of(name);
  check(rank < kNumSets, kCapVariable, " must be base, avx2, avx512, avx512bf16 or amx, got ", name);
  return rank;
}

size_t cap() {
  static const size_t rank = read_cap();
  return rank;
}

}  // namespace

void check_instruction_cap() { cap(); }

std::string amx_refusal() {
  if (rank_of("amx") > cap()) return std::string(kCapVariable) + " is " + std::string(kSets[cap()]);
  if (!has_amx_tiles()) return "the processor has no tiles of bf16";
  if (!has_avx512bf16()) return "the processor has no AVX512_BF16";
  return tile_refusal();
}

bool has_instruction_set(const char* name) {
  const std::string_view set = name;
  if (set == "base" || set == "pairs_model" || set == "amx_model") return true;
  if (rank_of(set) > cap()) return false;
  return (set == "avx2" && has_avx2()) || (set == "avx512" && has_avx512()) ||
         (set == "avx512bf16" && has_avx512bf16()) || (set == "amx" && amx_refusal().empty()) ||
         (set == "amx_bf16" && has_amx_bf16()) || (set == "avx512_fp16" && has_avx512_fp16());
}

}  // namespace kvpage
