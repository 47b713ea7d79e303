// ExponentKernel: exponents of floats apart from the rest of their bits, 64 elements at a time.
//
//   element     exponent    the rest: whole bytes, and bits as planes of 64
//   bf16        8 bits      1 byte: sign, mantissa
//   fp16        5 bits      1 byte: the lower mantissa; 3 planes: the upper mantissa, sign
//   fp8 e4m3    4 bits      4 planes: mantissa, sign
//   fp8 e5m2    5 bits      3 planes: mantissa, sign
//
//   a plane     one bit of each of 64 elements, as a word of 64 bits; those of a group are neighbours, of the rest
//   first a code      exponent - base, or all ones where that is not below them: then the exponent follows as an escape
//
// One source is compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/kernel_family.h"

namespace kvpage {

enum class FloatKind { kBf16, kFp16, kE4m3, kE5m2 };

constexpr int64_t kGroupElements = 64;
constexpr int kMostCodeBits = 4;

// How the elements of one kind are taken apart. Plain numbers, for files that are compiled once per instruction set.
struct FloatParts {
  int width;  // bytes of an element
  int low_bytes;  // of the rest
  int rest_planes;
};

constexpr FloatParts parts_of(FloatKind kind) {
  switch (kind) {
    case FloatKind::kBf16: return {2, 1, 0};
    case FloatKind::kFp16: return {2, 1, 3};
    case FloatKind::kE4m3: return {1, 0, 4};
    default: return {1, 0, 3};
  }
}

// Groups of elements, whole and apart.
struct ExponentGroups {
  FloatKind kind;
  int64_t num_groups;
  int base, code_bits;  // 1 to kMostCodeBits
};

struct ExponentKernel {
  const char* name;
  // Takes groups apart. Returns how many escapes there are; those beyond `room` are not written.
  int64_t (*encode)(const ExponentGroups& groups, const std::byte* raw, std::byte* low, std::byte* planes,
                    std::byte* escapes, int64_t room);
  // Puts groups together. Returns how many escapes the codes ask for; those beyond `num_escapes` count as 0.
  int64_t (*decode)(const ExponentGroups& groups, const std::byte* low, const std::byte* planes,
                    const std::byte* escapes, int64_t num_escapes, std::byte* raw);
};

const KernelFamily<ExponentKernel>& exponent_kernels();

KVPAGE_DECLARE_KERNELS(ExponentKernel, exponent_kernel);

}  // namespace kvpage
