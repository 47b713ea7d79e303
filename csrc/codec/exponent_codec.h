// Exponent codec: bytes of floats in fewer bytes, without loss. Nearly all exponents of a block are among a few
// neighbours, so a code of some bits tells which; the rest of an element is stored as it is.
//
//   payload    block 0 | block 1 | ... | bytes after the last whole element
//   block      header, 8 bytes: bits of a code, base, escapes | body         kBlockElements elements, the last one
//   fewer body       whole bytes of the rest | planes, group by group | escapes    see exponent_kernel.h
//              0 bits of a code: the elements as they are                    where that is no larger
//   escapes    a byte each; of e4m3 half a byte each, where the header says so: elder payloads have bytes
//
// Each block has bits and base of its own, and is decoded by itself. A payload takes at most 8 bytes a block more than
// the elements. Normally distributed bf16 takes 0.70 of its bytes, fp16 0.89, e4m3 0.89.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "codec/exponent_kernel.h"

namespace kvpage {

constexpr int64_t kBlockElements = 8192;

// Bytes that a payload of so many bytes of floats takes at most. Throws InvalidArgument for a negative number.
int64_t most_payload_bytes(FloatKind kind, int64_t raw_bytes);

// Writes the payload, and returns its bytes. out: room for most_payload_bytes. kernel: the name of one of
// exponent_kernels(); empty: the best.
int64_t encode_exponents(FloatKind kind, const std::byte* raw, int64_t raw_bytes, std::byte* out,
                         const std::string& kernel);

// Writes raw_bytes bytes. Throws InvalidArgument for a payload that encode_exponents does not write, whatever its bytes
// are: nothing beyond it is read, and nothing beyond raw_bytes written; part of them may be.
void decode_exponents(FloatKind kind, const std::byte* payload, int64_t num_bytes, std::byte* raw, int64_t raw_bytes,
                      const std::string& kernel);

}  // namespace kvpage
