// The body of Xxh3Kernel, compiled once for each instruction set (simd/kernel.cpp.in): stripes in vectors of words of
// 64 bits. Everything here has internal linkage.
#pragma once

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "hash/xxh3_constants.h"
#include "hash/xxh3_kernel.h"

// Words of 64 bits in a register.
#define KVPAGE_WORDS (KVPAGE_REGISTER_BYTES / 8)

namespace kvpage {
namespace {

constexpr int kLanes = KVPAGE_WORDS, kVectors = 8 / kLanes;  // of a stripe
constexpr int64_t kStripeBytes = 64, kStripesPerBlock = 16;

typedef uint64_t Words __attribute__((vector_size(8 * KVPAGE_WORDS)));

inline Words load(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

inline void store(void* to, Words words) { std::memcpy(to, &words, sizeof(words)); }

// The product of each word's low 32 bits and the other's.
inline Words multiply_low(Words a, Words b) {
#if KVPAGE_WORDS == 8 && defined(__AVX512F__)
  // With a mask of all lanes, the same instruction: GCC warns of an uninitialized operand in its own unmasked form.
  return reinterpret_cast<Words>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif KVPAGE_WORDS == 4 && defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif KVPAGE_WORDS == 2 && defined(__SSE2__)
  return reinterpret_cast<Words>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

inline Words swap_pairs(Words a) {
#if KVPAGE_WORDS == 8 && defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_maskz_shuffle_epi32(0xffff, reinterpret_cast<__m512i>(a), _MM_PERM_BADC));
#elif KVPAGE_WORDS == 4 && defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_shuffle_epi32(reinterpret_cast<__m256i>(a), 0x4e));
#elif KVPAGE_WORDS == 2 && defined(__SSE2__)
  return reinterpret_cast<Words>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(a), 0x4e));
#else
  Words swapped;
  for (int lane = 0; lane < kLanes; ++lane) swapped[lane] = a[lane ^ 1];
  return swapped;
#endif
}

inline void stream(std::byte* to, Words words) {
#if KVPAGE_WORDS == 8 && defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(words));
#elif KVPAGE_WORDS == 4 && defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(words));
#elif KVPAGE_WORDS == 2 && defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(words));
#else
  store(to, words);
#endif
}

enum class Copy { kNone, kCached, kStreamed };

struct Sums {
  Words at[kVectors];

  explicit Sums(const uint64_t* from) {
    for (int i = 0; i < kVectors; ++i) at[i] = load(from + i * kLanes);
  }
  void save(uint64_t* to) const {
    for (int i = 0; i < kVectors; ++i) store(to + i * kLanes, at[i]);
  }

  template <Copy kCopy>
  void add_stripe(const std::byte* data, const std::byte* secret, std::byte* to) {
    for (int i = 0; i < kVectors; ++i) {
      const Words words = load(data + i * sizeof(Words)), keyed = words ^ load(secret + i * sizeof(Words));
      if constexpr (kCopy == Copy::kCached) store(to + i * sizeof(Words), words);
      if constexpr (kCopy == Copy::kStreamed) stream(to + i * sizeof(Words), words);
      at[i] += swap_pairs(words) + multiply_low(keyed, keyed >> 32);
    }
  }

  void scramble() {
    const Words prime = kPrime32_1 - Words{};
    for (int i = 0; i < kVectors; ++i) {
      const Words key = load(kXxh3Secret + kXxh3SecretBytes - kStripeBytes + i * static_cast<int64_t>(sizeof(Words)));
      const Words mixed = at[i] ^ (at[i] >> 47) ^ key;
      at[i] = multiply_low(mixed, prime) + (multiply_low(mixed >> 32, prime) << 32);
    }
  }
};

template <Copy kCopy>
inline void add_all_blocks(uint64_t* sums, const std::byte* data, int64_t num_blocks, const std::byte* ahead,
                           std::byte* to) {
  Sums mine(sums);
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t stripe = 0; stripe < kStripesPerBlock; ++stripe, data += kStripeBytes, ahead += kStripeBytes) {
      __builtin_prefetch(ahead);
      mine.add_stripe<kCopy>(data, kXxh3Secret + 8 * stripe, to);
      if constexpr (kCopy != Copy::kNone) to += kStripeBytes;
    }
    mine.scramble();
  }
  mine.save(sums);
}

void add_blocks(uint64_t* sums, const std::byte* data, int64_t num_blocks, const std::byte* ahead) {
  add_all_blocks<Copy::kNone>(sums, data, num_blocks, ahead, nullptr);
}

void add_and_copy_blocks(uint64_t* sums, const std::byte* data, int64_t num_blocks, const std::byte* ahead,
                         std::byte* to) {
  add_all_blocks<Copy::kCached>(sums, data, num_blocks, ahead, to);
}

void add_and_stream_blocks(uint64_t* sums, const std::byte* data, int64_t num_blocks, const std::byte* ahead,
                           std::byte* to) {
  add_all_blocks<Copy::kStreamed>(sums, data, num_blocks, ahead, to);
}

void add_stripes(uint64_t* sums, const std::byte* data, int64_t num_stripes, const std::byte* secret) {
  Sums mine(sums);
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe)
    mine.add_stripe<Copy::kNone>(data + kStripeBytes * stripe, secret + 8 * stripe, nullptr);
  mine.save(sums);
}

}  // namespace

const Xxh3Kernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, add_blocks, add_and_copy_blocks, add_and_stream_blocks,
                                  add_stripes};

}  // namespace kvpage
