// Tables of kernels for the instruction sets that the experiments leave out: no machine has an instruction set of this
// name. "base" is the same source.
#include "attention/attention_kernel.h"
#include "codec/exponent_kernel.h"
#include "hash/xxh3_kernel.h"
#include "linear/linear_kernel.h"
#include "linear/norms/norm_kernel.h"
#include "quantize/quantize_kernel.h"
#include "sampling/sampling_kernel.h"
#include "simd/transpose_kernel.h"

namespace kvpage {

#if defined(__x86_64__)
const AttentionKernel attention_kernel_avx2 = {.name = "absent"}, attention_kernel_avx512 = {.name = "absent"};
const AttentionKernel attention_kernel_avx512bf16 = {.name = "absent"},
                      attention_kernel_pairs_model = {.name = "absent"};
const ExponentKernel exponent_kernel_avx2 = {.name = "absent"}, exponent_kernel_avx512 = {.name = "absent"};
const LinearKernel linear_kernel_avx2 = {.name = "absent"}, linear_kernel_avx512 = {.name = "absent"};
const LinearKernel linear_kernel_avx512bf16 = {.name = "absent"}, linear_kernel_pairs_model = {.name = "absent"};
const NormKernel norm_kernel_avx2 = {.name = "absent"}, norm_kernel_avx512 = {.name = "absent"};
const QuantizeKernel quantize_kernel_avx2 = {.name = "absent"}, quantize_kernel_avx512 = {.name = "absent"};
const QuantizeKernel quantize_kernel_avx512bf16 = {.name = "absent"};
const SamplingKernel sampling_kernel_avx2 = {.name = "absent"}, sampling_kernel_avx512 = {.name = "absent"};
const TransposeKernel transpose_kernel_avx2 = {.name = "absent"}, transpose_kernel_avx512 = {.name = "absent"};
const Xxh3Kernel xxh3_kernel_avx2 = {.name = "absent"}, xxh3_kernel_avx512 = {.name = "absent"};
#endif

}  // namespace kvpage
