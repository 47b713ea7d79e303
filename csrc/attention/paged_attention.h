// Attention over the blocks of a cache in host memory, read in place: for decoding and for short chunks of a prompt.
//
// The queries of a batch follow each other by sequence; those of a sequence are its last tokens. Work is cut into
// tasks (attention_plan.h), which threads take as they come. The sums of a query are the same whatever else is in the
// batch (attention_kernel.h).
#pragma once

#include "attention/attention_call.h"

namespace kvpage {

// Throws InvalidArgument for lengths that disagree and for a table entry that is needed and out of range, before
// anything is written.
void paged_attention(const PagedAttention& args);

}  // namespace kvpage
