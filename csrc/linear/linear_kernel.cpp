#include "linear/linear_kernel.h"

namespace kvpage {
namespace {

#if defined(KVPAGE_HAS_AMX)
TileVerdict judge_tiles() {
  const std::string refusal = amx_refusal();
  return refusal.empty() ? check_tiles(linear_kernel_amx, linear_kernel_amx_model) : TileVerdict{"", refusal};
}

// Null where they are not taken.
const LinearKernel* taken_tiles() { return tile_verdict().name.empty() ? nullptr : &linear_kernel_amx; }
#else
TileVerdict judge_tiles() { return {"", "this build has no code for tiles"}; }

const LinearKernel* taken_tiles() { return nullptr; }
#endif

}  // namespace

const TileVerdict& tile_verdict() {
  static const TileVerdict verdict = judge_tiles();
  return verdict;
}

const KernelFamily<LinearKernel>& linear_kernels() {
  static const KernelFamily<LinearKernel> family{taken_tiles(),
#if defined(__x86_64__)
                                                 &linear_kernel_avx512bf16,
#endif
                                                 KVPAGE_COMPILED_KERNELS(linear_kernel), &linear_kernel_pairs_model,
                                                 &linear_kernel_amx_model};
  return family;
}

}  // namespace kvpage
