// recurrence: the tokens of some sequences through a linear recurrence, one by one, over threads.
#pragma once

#include "recurrence/recurrence_kernel.h"

namespace kvpage {

// A state of each sequence and head, [num_keys, num_columns]. Strides in elements.
struct RecurrentState {
  float* data;
  int64_t sequence_stride, head_stride, key_stride, column_stride;
};

// Each is one run of memory, [num_sequences, num_tokens, ...].
struct Recurrence {
  const float *query, *key;  // [num_key_heads, num_keys]: num_heads / num_key_heads heads read the same one
  const float* value;        // [num_heads, num_columns]
  const float* decay;        // [num_heads], [num_heads, num_keys] or [num_heads, num_columns], as Decay says
  const float* rates;        // [num_heads, num_keys, num_columns] of all, for Decay::kOfElement
  const float* factor;       // [num_heads] of the delta rule, or null
  float* out;                // as value
  RecurrentState state;      // before the first token; after the last one when the call is over
  int64_t num_sequences, num_tokens, num_key_heads, num_heads, num_keys, num_columns;
  Decay decays;
  int max_threads;
  const RecurrenceKernel* kernel;
};

// `out` and `state` share no memory with the others. Throws InvalidArgument before anything is written.
void recurrence(const Recurrence& args);

}  // namespace kvpage
