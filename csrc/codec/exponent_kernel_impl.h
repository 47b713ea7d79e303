// The body of ExponentKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#include <cstring>
#include <type_traits>

#include "codec/exponent_kernel.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

constexpr int kBytes = KVPAGE_REGISTER_BYTES;
constexpr int kRegisters = kGroupElements / kBytes;  // of a group, a byte for each element

constexpr int kFewEscapes = 4;  // of a group, written and read without a branch

typedef uint8_t Bytes __attribute__((vector_size(KVPAGE_REGISTER_BYTES)));
typedef uint16_t Words __attribute__((vector_size(KVPAGE_REGISTER_BYTES)));

inline Bytes load(const std::byte* from) {
  Bytes to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

inline void store(std::byte* to, Bytes from) { std::memcpy(to, &from, sizeof(from)); }

inline Bytes splat(int value) { return Bytes{} + static_cast<uint8_t>(value); }

// Bits that leave a byte get into its neighbour: the callers mask them.
inline Bytes right(Bytes x, int bits) { return bit_cast<Bytes>(bit_cast<Words>(x) >> bits); }
inline Bytes left(Bytes x, int bits) { return bit_cast<Bytes>(bit_cast<Words>(x) << bits); }

inline Bytes least(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
  return bit_cast<Bytes>(_mm512_maskz_min_epu8(~__mmask64{0}, bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return bit_cast<Bytes>(_mm256_min_epu8(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return bit_cast<Bytes>(_mm_min_epu8(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  return a < b ? a : b;
#endif
}

constexpr uint64_t kLastBit = uint64_t{1} << 63;  // so that there is a lowest bit, whatever the others are

// One bit of each byte, that of the first byte lowest.
inline uint64_t plane_of(Bytes x, int bit) {
  const Bytes top = left(x, 7 - bit);
#if defined(__AVX512BW__)
  return _mm512_movepi8_mask(bit_cast<__m512i>(top));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_epi8(bit_cast<__m256i>(top)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_epi8(bit_cast<__m128i>(top)));
#else
  uint64_t plane = 0;
  for (int i = 0; i < kBytes; ++i) plane |= static_cast<uint64_t>(top[i] >> 7) << i;
  return plane;
#endif
}

// `value` in each byte whose bit is set.
inline Bytes spread(uint64_t plane, int value) {
#if defined(__AVX512BW__)
  return bit_cast<Bytes>(_mm512_maskz_set1_epi8(plane, static_cast<char>(value)));
#elif defined(__AVX2__)
  const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i words = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(plane)), places);
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(words, bits), bits);
  return bit_cast<Bytes>(is_set) & splat(value);
#else
  uint64_t words[kBytes / 8], bits[kBytes / 8];
  for (int i = 0; i < kBytes / 8; ++i)
    words[i] = (plane >> 8 * i & 0xff) * 0x0101010101010101u, bits[i] = 0x8040201008040201u;
  const Bytes wanted = bit_cast<Bytes>(bits);
  return bit_cast<Bytes>((bit_cast<Bytes>(words) & wanted) == wanted) & splat(value);
#endif
}

// `value` in the byte of this number, if there is such a byte; else x.
inline Bytes with_byte(Bytes x, int number, int value) {
  Bytes numbers;
  for (int i = 0; i < kBytes; ++i) numbers[i] = static_cast<uint8_t>(i);
  const Bytes is_it = bit_cast<Bytes>(numbers == splat(number));
  return (x & ~is_it) | (splat(value) & is_it);
}

// The number of the lowest bit; 64 of none.
inline int lowest(uint64_t bits) { return __builtin_ctzll(bits | kLastBit) + (bits == 0); }

// The lower and the upper byte of each of kBytes words.
inline void take_halves(const std::byte* from, Bytes& low, Bytes& high) {
  const Words a = bit_cast<Words>(load(from)), b = bit_cast<Words>(load(from + kBytes));
#if defined(__AVX512BW__)
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const auto pack = [&](Words x, Words y) {
    const __m512i packed = _mm512_maskz_packus_epi16(~__mmask64{0}, bit_cast<__m512i>(x), bit_cast<__m512i>(y));
    return bit_cast<Bytes>(_mm512_maskz_permutexvar_epi64(0xff, order, packed));
  };
#elif defined(__AVX2__)
  const auto pack = [](Words x, Words y) {
    return bit_cast<Bytes>(
        _mm256_permute4x64_epi64(_mm256_packus_epi16(bit_cast<__m256i>(x), bit_cast<__m256i>(y)), 0xd8));
  };
#elif defined(__SSE2__)
  const auto pack = [](Words x, Words y) {
    return bit_cast<Bytes>(_mm_packus_epi16(bit_cast<__m128i>(x), bit_cast<__m128i>(y)));
  };
#else
  const auto pack = [](Words x, Words y) {
    Bytes to;
    for (int i = 0; i < kBytes / 2; ++i)
      to[i] = static_cast<uint8_t>(x[i]), to[i + kBytes / 2] = static_cast<uint8_t>(y[i]);
    return to;
  };
#endif
  low = pack(a & 0xff, b & 0xff), high = pack(a >> 8, b >> 8);
}

inline void put_halves(Bytes low, Bytes high, std::byte* to) {
#if defined(__AVX512BW__)
  const __mmask64 all = ~__mmask64{0};
  const __m512i a = _mm512_maskz_unpacklo_epi8(all, bit_cast<__m512i>(low), bit_cast<__m512i>(high));
  const __m512i b = _mm512_maskz_unpackhi_epi8(all, bit_cast<__m512i>(low), bit_cast<__m512i>(high));
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  store(to, bit_cast<Bytes>(_mm512_permutex2var_epi64(a, first, b)));
  store(to + kBytes, bit_cast<Bytes>(_mm512_permutex2var_epi64(a, second, b)));
#elif defined(__AVX2__)
  const __m256i a = _mm256_unpacklo_epi8(bit_cast<__m256i>(low), bit_cast<__m256i>(high));
  const __m256i b = _mm256_unpackhi_epi8(bit_cast<__m256i>(low), bit_cast<__m256i>(high));
  store(to, bit_cast<Bytes>(_mm256_permute2x128_si256(a, b, 0x20)));
  store(to + kBytes, bit_cast<Bytes>(_mm256_permute2x128_si256(a, b, 0x31)));
#elif defined(__SSE2__)
  store(to, bit_cast<Bytes>(_mm_unpacklo_epi8(bit_cast<__m128i>(low), bit_cast<__m128i>(high))));
  store(to + kBytes, bit_cast<Bytes>(_mm_unpackhi_epi8(bit_cast<__m128i>(low), bit_cast<__m128i>(high))));
#else
  for (int i = 0; i < kBytes; ++i) to[2 * i] = std::byte{low[i]}, to[2 * i + 1] = std::byte{high[i]};
#endif
}

// --- kBytes elements of one kind ------------------------------------------------------------------------------------

// exponent: its bits. low: the whole byte of the rest, if there is one. rest: the bits of the planes, the lowest first.
struct Apart {
  Bytes exponent, low, rest;
};

template <FloatKind kKind>
inline Apart take_apart(const std::byte* from) {
  Bytes low{}, high;
  if constexpr (parts_of(kKind).width == 2)
    take_halves(from, low, high);
  else
    high = load(from);
  if constexpr (kKind == FloatKind::kBf16) {
    const Bytes exponent = (high + high) | (right(low, 7) & splat(1));
    return {exponent, (high & splat(0x80)) | (low & splat(0x7f)), Bytes{}};
  } else if constexpr (kKind == FloatKind::kE4m3) {
    return {right(high, 3) & splat(0xf), low, (high & splat(7)) | (right(high, 4) & splat(8))};
  } else {
    return {right(high, 2) & splat(0x1f), low, (high & splat(3)) | (right(high, 5) & splat(4))};
  }
}

template <FloatKind kKind>
inline void put_together(const Apart& parts, std::byte* to) {
  const Bytes exponent = parts.exponent, rest = parts.rest;
  if constexpr (kKind == FloatKind::kBf16) {
    const Bytes low = (parts.low & splat(0x7f)) | (left(exponent, 7) & splat(0x80));
    put_halves(low, (parts.low & splat(0x80)) | (right(exponent, 1) & splat(0x7f)), to);
  } else if constexpr (kKind == FloatKind::kE4m3) {
    store(to, (rest & splat(7)) | (left(rest, 4) & splat(0x80)) | (left(exponent, 3) & splat(0x78)));
  } else {
    const Bytes high = (rest & splat(3)) | (left(rest, 5) & splat(0x80)) | (left(exponent, 2) & splat(0x7c));
    if constexpr (kKind == FloatKind::kFp16)
      put_halves(parts.low, high, to);
    else
      store(to, high);
  }
}

// --- groups ---------------------------------------------------------------------------------------------------------

template <FloatKind kKind, int kCodeBits>
int64_t encode_groups(const ExponentGroups& groups, const std::byte* raw, std::byte* low, std::byte* planes,
                      std::byte* escapes, int64_t room) {
  constexpr FloatParts kParts = parts_of(kKind);
  constexpr int kPlanes = kParts.rest_planes + kCodeBits;
  const Bytes base = splat(groups.base), most = splat((1 << kCodeBits) - 1);
  int64_t num_escapes = 0;
  for (int64_t group = 0; group < groups.num_groups; ++group) {
    uint64_t words[kPlanes] = {}, escaped = ~uint64_t{0};
    std::byte exponents[kGroupElements];
    for (int r = 0; r < kRegisters; ++r) {
      const Apart parts = take_apart<kKind>(raw + r * kBytes * kParts.width);
      const Bytes codes = least(parts.exponent - base, most);
      store(exponents + r * kBytes, parts.exponent);
      if constexpr (kParts.low_bytes > 0) store(low + r * kBytes, parts.low);
      for (int p = 0; p < kParts.rest_planes; ++p) words[p] |= plane_of(parts.rest, p) << (r * kBytes % 64);
      for (int p = 0; p < kCodeBits; ++p) words[kParts.rest_planes + p] |= plane_of(codes, p) << (r * kBytes % 64);
    }
    for (int p = 0; p < kCodeBits; ++p) escaped &= words[kParts.rest_planes + p];
    // Word by word: a longer load would wait for the stores of its parts.
    for (int p = 0; p < kPlanes; ++p) std::memcpy(planes + p * sizeof(words[p]), &words[p], sizeof(words[p]));
    // Most groups have a few escapes at most: these are written without a branch, which nothing could foresee.
    if (num_escapes + kFewEscapes <= room) {
      const int count = __builtin_popcountll(escaped);
      for (int e = 0; e < kFewEscapes; ++e, escaped &= escaped - 1)
        escapes[num_escapes + e] = exponents[__builtin_ctzll(escaped | kLastBit)];
      num_escapes += count < kFewEscapes ? count : kFewEscapes;
    }
    for (; escaped; escaped &= escaped - 1, ++num_escapes)
      if (num_escapes < room) escapes[num_escapes] = exponents[__builtin_ctzll(escaped)];
    raw += kGroupElements * kParts.width, low += kGroupElements * kParts.low_bytes, planes += sizeof(words);
  }
  return num_escapes;
}

template <FloatKind kKind, int kCodeBits>
int64_t decode_groups(const ExponentGroups& groups, const std::byte* low, const std::byte* planes,
                      const std::byte* escapes, int64_t num_escapes, std::byte* raw) {
  constexpr FloatParts kParts = parts_of(kKind);
  constexpr int kPlanes = kParts.rest_planes + kCodeBits;
  const Bytes base = splat(groups.base);
  int64_t next = 0;
  for (int64_t group = 0; group < groups.num_groups; ++group) {
    uint64_t words[kPlanes], escaped = ~uint64_t{0};
    std::memcpy(words, planes, sizeof(words));
    for (int p = 0; p < kCodeBits; ++p) escaped &= words[kParts.rest_planes + p];
    Bytes exponents[kRegisters];
    for (int r = 0; r < kRegisters; ++r) {
      exponents[r] = base;
      for (int p = 0; p < kCodeBits; ++p)
        exponents[r] += spread(words[kParts.rest_planes + p] >> (r * kBytes % 64), 1 << p);
    }
    if (next + kFewEscapes <= num_escapes) {
      const int count = __builtin_popcountll(escaped);
      for (int e = 0; e < kFewEscapes; ++e, escaped &= escaped - 1) {
        const int number = lowest(escaped), value = std::to_integer<int>(escapes[next + e]);
        for (int r = 0; r < kRegisters; ++r) exponents[r] = with_byte(exponents[r], number - r * kBytes, value);
      }
      next += count < kFewEscapes ? count : kFewEscapes;
    }
    if (escaped) {
      std::byte patched[kGroupElements];
      std::memcpy(patched, exponents, sizeof(patched));
      for (; escaped; escaped &= escaped - 1, ++next)
        patched[__builtin_ctzll(escaped)] = next < num_escapes ? escapes[next] : std::byte{0};
      std::memcpy(exponents, patched, sizeof(patched));
    }
    for (int r = 0; r < kRegisters; ++r) {
      Apart parts{exponents[r], Bytes{}, Bytes{}};
      if constexpr (kParts.low_bytes > 0) parts.low = load(low + r * kBytes);
      for (int p = 0; p < kParts.rest_planes; ++p) parts.rest |= spread(words[p] >> (r * kBytes % 64), 1 << p);
      put_together<kKind>(parts, raw + r * kBytes * kParts.width);
    }
    raw += kGroupElements * kParts.width, low += kGroupElements * kParts.low_bytes, planes += sizeof(words);
  }
  return next;
}

// call(the kind, the bits of a code), both as constants.
template <typename Call>
int64_t with_constants(const ExponentGroups& groups, const Call& call) {
  const auto with_bits = [&](auto kind) -> int64_t {
    switch (groups.code_bits) {
      case 1: return call(kind, std::integral_constant<int, 1>{});
      case 2: return call(kind, std::integral_constant<int, 2>{});
      case 3: return call(kind, std::integral_constant<int, 3>{});
      default: return call(kind, std::integral_constant<int, 4>{});
    }
  };
  switch (groups.kind) {
    case FloatKind::kBf16: return with_bits(std::integral_constant<FloatKind, FloatKind::kBf16>{});
    case FloatKind::kFp16: return with_bits(std::integral_constant<FloatKind, FloatKind::kFp16>{});
    case FloatKind::kE4m3: return with_bits(std::integral_constant<FloatKind, FloatKind::kE4m3>{});
    default: return with_bits(std::integral_constant<FloatKind, FloatKind::kE5m2>{});
  }
}

int64_t encode(const ExponentGroups& groups, const std::byte* raw, std::byte* low, std::byte* planes,
               std::byte* escapes, int64_t room) {
  return with_constants(groups, [&](auto kind, auto bits) {
    return encode_groups<kind.value, bits.value>(groups, raw, low, planes, escapes, room);
  });
}

int64_t decode(const ExponentGroups& groups, const std::byte* low, const std::byte* planes, const std::byte* escapes,
               int64_t num_escapes, std::byte* raw) {
  return with_constants(groups, [&](auto kind, auto bits) {
    return decode_groups<kind.value, bits.value>(groups, low, planes, escapes, num_escapes, raw);
  });
}

}  // namespace

const ExponentKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, encode, decode};

}  // namespace kvpage
