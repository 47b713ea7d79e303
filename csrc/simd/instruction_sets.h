// The instruction sets that some sources are compiled for, by name: "base", "avx2", "avx512", "avx512bf16", "amx".
// Others are only asked for: "amx_bf16", where the processor has AMX but maybe not the system, and "avx512_fp16".
//
// KVPAGE_MAX_CPU_ISA in the environment names the best set that may be taken, as if the processor had no more. It is
// read once.
#pragma once

#include <string>

namespace kvpage {

constexpr char kCapVariable[] = "KVPAGE_MAX_CPU_ISA";

// Throws InvalidArgument where the environment names no set with code of its own.
void check_instruction_cap();

// Returns whether this machine's processor runs code of that instruction set, and the environment allows it. Every
// machine has "base".
bool has_instruction_set(const char* name);

// Returns why this process does not have "amx"; empty where it does. The first call that gets so far asks the system
// for permission to use tiles.
std::string amx_refusal();

}  // namespace kvpage
