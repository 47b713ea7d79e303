// RecurrenceKernel: one token of a linear recurrence, for some columns of one head's state.
//
//   S[k, c] = S[k, c] * decay + key[k] * u[c]          u = value, or factor * (value - key @ decayed S), the delta rule
//   out[c]  = query @ S[:, c]
//
// Every token passes through the same code, and a column's sums run over the keys in their order. So what a token gives
// depends on the state before it and on itself alone, bit by bit, whatever portion of a prompt it is computed in.
#pragma once

#include <cstdint>

#include "simd/kernel_family.h"

namespace kvpage {

constexpr int64_t kRecurrenceColumns = 64;  // of a state in scratch, which stays in the first cache

// Of what a decay is e to the power: each power is 0 or less.
enum class Decay {
  kOfHead,  // decay[0]
  kOfKey,  // decay[k]
  kOfElement,  // decay[c] * rates[k, c]
};

// One run of memory each. Columns past `num_columns` of the state and the rates are zeros.
struct RecurrenceStep {
  float* state;  // [num_keys, kRecurrenceColumns]
  const float* rates;  // likewise, for kOfElement
  float* decays;  // scratch [num_keys], for kOfKey
  const float *query, *key, *decay, *value;
  float* out;
  int64_t num_keys, num_columns;
  float factor;  // of the delta rule
};

struct RecurrenceKernel {
  const char* name;
  void (*step)(Decay decay, bool corrects, const RecurrenceStep& step);  // corrects: by the delta rule
};

const KernelFamily<RecurrenceKernel>& recurrence_kernels();

KVPAGE_DECLARE_KERNELS(RecurrenceKernel, recurrence_kernel);

}  // namespace kvpage
