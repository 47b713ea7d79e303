// SamplingKernel: the choice of one row's token, compiled once for each instruction set.
//
// A score is (logit - the greatest) / temperature, so the likeliest token has 0. Its weight is e**score.
//
//   logits ─► survey: the maximum of each group of logits, and the sum of its weights, in one pass over memory
//          ─► candidates: the tokens above a bound that no kept token is below; most groups are passed over
//          ─► top_k, top_p, min_p: the last score that stays, by bisection among the candidates
//          ─► draw: the first token whose running sum of weights exceeds the drawn share of them
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "sampling/row_rules.h"
#include "simd/kernel_family.h"

namespace kvpage {

struct LogitsRow {
  const std::byte* data;
  RowType type;  // not kBits
  int64_t size;
};

struct Choice : RowRules {
  double point;  // in [0, 1): the share of the weights that the drawn token's running sum must exceed
};

// The weights of a list of tokens, in two parts: see sampling/whole_weights.h.
struct Weights {
  int32_t *coarse, *fine;
};

struct WorkList {
  int32_t* keys;
  Weights weights;
};

// Memory for one row at a time. Each is aligned to 64 bytes, and has kPadding elements more than named here.
struct SamplingScratch {
  static constexpr int64_t kPadding = 1024, kLeastBlock = 64, kMostLanes = 16;

  float* row;      // [vocab_size]: a row that rules have changed
  float* maxima;   // [groups(vocab_size)]
  float* tops;     // [blocks(vocab_size)], as the next
  int64_t* masses;
  int64_t* sums;   // [blocks(vocab_size)]: of runs of weights
  float* tail;     // [0]
  int32_t* keys;   // [vocab_size], as all that follow
  int32_t* ids;
  Weights weights;
  WorkList work;

  static int64_t groups(int64_t vocab_size) { return (vocab_size / kLeastBlock + 1) * kMostLanes; }
  static int64_t blocks(int64_t vocab_size) { return vocab_size / 32 + 1; }
};

struct SamplingKernel {
  const char* name;
  // Returns the row's token, or -1 where no token can be chosen: for NaN, +inf, or no finite logit.
  int64_t (*choose)(const LogitsRow& row, const Choice& choice, const SamplingScratch& scratch);
  // Copies a row to fp32. Returns whether a token can be chosen from it.
  bool (*widen)(const LogitsRow& row, float* to);
};

const KernelFamily<SamplingKernel>& sampling_kernels();

KVPAGE_DECLARE_KERNELS(SamplingKernel, sampling_kernel);

}  // namespace kvpage
