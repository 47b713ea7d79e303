// has_fast_linear: the types whose products are worth taking from torch, by instruction sets alone.
#pragma once

#include "quantize/code_type.h"

namespace kvpage {

// Returns whether `linear` is to compute this type on this machine: the instruction sets decide. Without AVX2 it does
// not. Where the processor has tiles of bf16 or arithmetic in fp16, torch's library uses them, and is taken. A caller
// who needs the same bits in every batch calls `linear` nevertheless.
bool has_fast_linear(RowType type);

}  // namespace kvpage
