// The instruction sets that some sources are compiled for, by name: "base", "avx2", "avx512", "avx512bf16". Others are
// only asked for: "amx_bf16", "avx512_fp16".
#pragma once

namespace kvpage {

// Returns whether this machine's processor runs code of that instruction set. Every machine has "base".
bool has_instruction_set(const char* name);

}  // namespace kvpage
