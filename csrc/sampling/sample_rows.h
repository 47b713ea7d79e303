// One token for each row of logits, by rules of its own. A row's token depends on nothing but the row and its rules:
// not on the other rows, nor on the number of threads.
#pragma once

#include <cstdint>
#include <string>

#include "sampling/row_rules.h"
#include "sampling/sampling_kernel.h"
#include "sampling/token_rules.h"

namespace kvpage {

// The rules of one row that name tokens, and the tokens that they are about.
struct RuledRow {
  TokenRules* rules;      // null: none
  const int32_t* tokens;  // the sequence so far; null unless rules->needs_tokens()
};

struct SampleRows {
  const std::byte* logits;  // [num_rows, vocab_size], not changed
  int64_t row_stride;       // bytes
  RowType type;
  int64_t num_rows, vocab_size;
  const RowRules* rules;  // [num_rows]
  const RuledRow* ruled;  // [num_rows]; null: no row has any
  int32_t* tokens;        // [num_rows]: the token of each row; -1 where none can be chosen
  int max_threads;
  std::string kernel;  // the name of an instruction set; empty: the best
};

// Throws InvalidArgument for numbers out of range, before anything is written.
void sample_rows(const SampleRows& args);

}  // namespace kvpage
