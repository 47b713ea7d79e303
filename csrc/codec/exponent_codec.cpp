#include "codec/exponent_codec.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"

namespace kvpage {
namespace {

// Elements from one whose exponent is counted to the next: odd, so that all channels of a head come up.
constexpr int64_t kSampleStep = 13;

// Bits that an escape counts in the choice, also where it takes four: escapes take time.
constexpr int kEscapeCost = 8;

// Of each block, in memory. has_nibbles: whether two escapes share a byte.
struct BlockHeader {
  uint8_t code_bits, base, has_nibbles, zero;
  uint32_t num_escapes;
};
static_assert(sizeof(BlockHeader) == 8);
constexpr int64_t kHeaderBytes = sizeof(BlockHeader);

// The sizes of a block's body.
struct BlockSizes {
  int64_t raw, num_groups, low, planes;

  BlockSizes(FloatKind kind, int64_t num_elements, int code_bits)
      : raw(num_elements * parts_of(kind).width),
        num_groups((num_elements + kGroupElements - 1) / kGroupElements),
        low(num_groups * kGroupElements * parts_of(kind).low_bytes),
        planes(num_groups * 8 * (parts_of(kind).rest_planes + code_bits)) {}

  int64_t body(int64_t num_escapes, bool has_nibbles) const {
    return low + planes + (has_nibbles ? num_escapes / 2 + num_escapes % 2 : num_escapes);
  }
};

// Whether a kind's escapes fit half a byte, and so are written.
constexpr bool has_nibbles(FloatKind kind) { return kind == FloatKind::kE4m3; }

// The escapes of a block, a byte each.
struct Escapes {
  std::byte bytes[kBlockElements];
};

// Two a byte, the first one in the lower half.
void pack_nibbles(const std::byte* escapes, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count / 2; ++i) out[i] = escapes[2 * i] | escapes[2 * i + 1] << 4;
  if (count % 2) out[count / 2] = escapes[count - 1];
}

void unpack_nibbles(const std::byte* packed, int64_t count, std::byte* escapes) {
  for (int64_t i = 0; i < count / 2; ++i) {
    escapes[2 * i] = packed[i] & std::byte{0xf};
    escapes[2 * i + 1] = packed[i] >> 4;
  }
  if (count % 2) escapes[count - 1] = packed[count / 2] & std::byte{0xf};
}

template <FloatKind kKind>
int exponent_of(const std::byte* element) {
  if constexpr (parts_of(kKind).width == 2) {
    uint16_t word;
    std::memcpy(&word, element, sizeof(word));
    return kKind == FloatKind::kBf16 ? word >> 7 & 0xff : word >> 10 & 0x1f;
  } else {
    const int byte = std::to_integer<int>(*element);
    return kKind == FloatKind::kE4m3 ? byte >> 3 & 0xf : byte >> 2 & 0x1f;
  }
}

constexpr int kMostWindow = 1 << kMostCodeBits;
// Beyond the last exponent there is room for a window that begins there.
using Counts = std::array<int32_t, 256 + kMostWindow>;

// The exponents of a sample. Neighbours are counted apart, since most are equal: a count need not wait for the last.
template <FloatKind kKind>
int64_t count_exponents(const std::byte* raw, int64_t num_elements, Counts& counts) {
  constexpr int64_t kStep = kSampleStep * parts_of(kKind).width;
  constexpr int kApart = 4;
  std::array<std::array<uint16_t, 256>, kApart> apart{};
  const int64_t num_samples = (num_elements + kSampleStep - 1) / kSampleStep;
  int64_t i = 0;
  for (; i + kApart <= num_samples; i += kApart, raw += kApart * kStep)
    for (int j = 0; j < kApart; ++j) ++apart[j][exponent_of<kKind>(raw + j * kStep)];
  for (; i < num_samples; ++i, raw += kStep) ++apart[0][exponent_of<kKind>(raw)];
  for (int e = 0; e < 256; ++e) counts[e] = apart[0][e] + apart[1][e] + apart[2][e] + apart[3][e];
  return num_samples;
}

int64_t count_exponents(FloatKind kind, const std::byte* raw, int64_t num_elements, Counts& counts) {
  switch (kind) {
    case FloatKind::kBf16: return count_exponents<FloatKind::kBf16>(raw, num_elements, counts);
    case FloatKind::kFp16: return count_exponents<FloatKind::kFp16>(raw, num_elements, counts);
    case FloatKind::kE4m3: return count_exponents<FloatKind::kE4m3>(raw, num_elements, counts);
    default: return count_exponents<FloatKind::kE5m2>(raw, num_elements, counts);
  }
}

struct Choice {
  int base = 0, code_bits = 0;
};

// The window of neighbouring exponents, and the bits of its codes, that take least by a sample of a block; 0 bits if it
// would be no smaller than the elements.
Choice choose(FloatKind kind, const std::byte* raw, int64_t num_elements) {
  Counts counts{};
  const int64_t num_samples = count_exponents(kind, raw, num_elements, counts);
  int first = 0, last = 255;
  while (first < last && counts[first] == 0) ++first;
  while (last > first && counts[last] == 0) --last;
  Choice best;
  int64_t least = INT64_MAX, outside = 0;
  for (int bits = 1; bits <= kMostCodeBits; ++bits) {
    const int size = (1 << bits) - 1;
    int64_t inside = 0;
    for (int i = 0; i < size; ++i) inside += counts[first + i];
    int64_t most = inside;
    int base = first;
    for (int begin = first + 1; begin <= last; ++begin) {
      inside += counts[begin + size - 1] - counts[begin - 1];
      if (inside > most) most = inside, base = begin;
    }
    const int64_t cost = bits * num_samples + kEscapeCost * (num_samples - most);
    if (cost < least) least = cost, best = {base, bits}, outside = num_samples - most;
  }
  const FloatParts parts = parts_of(kind);
  const int exponent_bits = 8 * (parts.width - parts.low_bytes) - parts.rest_planes;
  const int64_t coded_bits = best.code_bits * num_samples + (has_nibbles(kind) ? 4 : 8) * outside;
  return coded_bits < exponent_bits * num_samples ? best : Choice{};
}

// Elements of the block that begins with element `begin`.
int64_t elements_of(int64_t num_elements, int64_t begin) { return std::min(kBlockElements, num_elements - begin); }

int64_t whole_elements(FloatKind kind, int64_t raw_bytes) { return raw_bytes / parts_of(kind).width; }

// The last block's elements in whole groups, zeros after them.
struct Padded {
  std::byte bytes[kGroupElements * 2];
};

// Takes the elements apart, the last group padded. Returns the escapes, of which `room` at most are written.
int64_t encode_groups(const ExponentKernel& kernel, FloatKind kind, const Choice& choice, const std::byte* raw,
                      int64_t num_elements, std::byte* body, const BlockSizes& sizes, std::byte* escapes,
                      int64_t room) {
  const FloatParts parts = parts_of(kind);
  const int64_t whole = num_elements / kGroupElements;
  std::byte *low = body, *planes = body + sizes.low;
  int64_t count = kernel.encode({kind, whole, choice.base, choice.code_bits}, raw, low, planes, escapes, room);
  if (whole == sizes.num_groups) return count;
  Padded last{};
  const int64_t done = whole * kGroupElements;
  std::memcpy(last.bytes, raw + done * parts.width, static_cast<size_t>((num_elements - done) * parts.width));
  count += kernel.encode({kind, 1, choice.base, choice.code_bits}, last.bytes, low + done * parts.low_bytes,
                         planes + whole * 8 * (parts.rest_planes + choice.code_bits), escapes + std::min(count, room),
                         std::max<int64_t>(room - count, 0));
  return count;
}

// Writes the block's body, and returns its escapes; -1 for a body that would not be smaller than the elements.
int64_t encode_body(const ExponentKernel& kernel, FloatKind kind, const Choice& choice, const std::byte* raw,
                    int64_t num_elements, std::byte* body, const BlockSizes& sizes) {
  const int64_t left = sizes.raw - sizes.low - sizes.planes - 1;
  if (left < 0 || choice.code_bits == 0) return -1;
  std::byte* escapes = body + sizes.low + sizes.planes;
  if (!has_nibbles(kind)) {
    const int64_t count = encode_groups(kernel, kind, choice, raw, num_elements, body, sizes, escapes, left);
    return count <= left ? count : -1;
  }
  Escapes bytes;
  const int64_t room = std::min(2 * left, kBlockElements);
  const int64_t count = encode_groups(kernel, kind, choice, raw, num_elements, body, sizes, bytes.bytes, room);
  if (count > room) return -1;
  pack_nibbles(bytes.bytes, count, escapes);
  return count;
}

int64_t encode_block(const ExponentKernel& kernel, FloatKind kind, const std::byte* raw, int64_t num_elements,
                     std::byte* out) {
  const Choice choice = choose(kind, raw, num_elements);
  const BlockSizes sizes(kind, num_elements, choice.code_bits);
  BlockHeader header{};
  int64_t body = sizes.raw;
  const int64_t count = encode_body(kernel, kind, choice, raw, num_elements, out + kHeaderBytes, sizes);
  if (count >= 0) {
    header = {static_cast<uint8_t>(choice.code_bits), static_cast<uint8_t>(choice.base), has_nibbles(kind), 0,
              static_cast<uint32_t>(count)};
    body = sizes.body(count, has_nibbles(kind));
  } else {
    std::memcpy(out + kHeaderBytes, raw, static_cast<size_t>(sizes.raw));
  }
  std::memcpy(out, &header, sizeof(header));
  return kHeaderBytes + body;
}

// Returns the escapes that the codes ask for.
int64_t decode_groups(const ExponentKernel& kernel, FloatKind kind, const BlockHeader& header, const std::byte* body,
                      int64_t num_elements, const BlockSizes& sizes, std::byte* raw) {
  const FloatParts parts = parts_of(kind);
  const int64_t whole = num_elements / kGroupElements, num_escapes = header.num_escapes;
  const std::byte *low = body, *planes = body + sizes.low, *escapes = planes + sizes.planes;
  Escapes bytes;
  if (header.has_nibbles) {
    unpack_nibbles(escapes, num_escapes, bytes.bytes);
    escapes = bytes.bytes;
  }
  int64_t count = kernel.decode({kind, whole, header.base, header.code_bits}, low, planes, escapes, num_escapes, raw);
  if (whole == sizes.num_groups) return count;
  Padded last;
  const int64_t done = whole * kGroupElements, used = std::min(count, num_escapes);
  count += kernel.decode({kind, 1, header.base, header.code_bits}, low + done * parts.low_bytes,
                         planes + whole * 8 * (parts.rest_planes + header.code_bits), escapes + used,
                         num_escapes - used, last.bytes);
  std::memcpy(raw + done * parts.width, last.bytes, static_cast<size_t>((num_elements - done) * parts.width));
  return count;
}

// Returns the bytes of the payload that the block takes.
int64_t decode_block(const ExponentKernel& kernel, FloatKind kind, const std::byte* payload, int64_t num_bytes,
                     int64_t num_elements, std::byte* raw) {
  BlockHeader header;
  check(num_bytes >= kHeaderBytes, "payload must have a header of ", kHeaderBytes, " bytes for each block, got ",
        num_bytes);
  std::memcpy(&header, payload, sizeof(header));
  const int code_bits = header.code_bits;
  check(code_bits <= kMostCodeBits && header.zero == 0, "payload must have codes of at most ", kMostCodeBits,
        " bits, got ", code_bits);
  check(header.has_nibbles <= has_nibbles(kind), "payload must have escapes of a byte in this kind of floats");
  const BlockSizes sizes(kind, num_elements, code_bits);
  check(!header.has_nibbles || header.num_escapes <= sizes.num_groups * kGroupElements,
        "payload must have an escape an element at most, got ", header.num_escapes);
  const int64_t body = code_bits == 0 ? sizes.raw : sizes.body(header.num_escapes, header.has_nibbles);
  check(body <= sizes.raw && body <= num_bytes - kHeaderBytes, "payload must have ", body,
        " bytes after a block's header, got ", num_bytes - kHeaderBytes);
  if (code_bits == 0) {
    check(header.base == 0 && header.num_escapes == 0 && header.has_nibbles == 0,
          "payload must have no codes in a plain block");
    std::memcpy(raw, payload + kHeaderBytes, static_cast<size_t>(sizes.raw));
    return kHeaderBytes + body;
  }
  const int64_t count = decode_groups(kernel, kind, header, payload + kHeaderBytes, num_elements, sizes, raw);
  check(count == static_cast<int64_t>(header.num_escapes), "payload must have an exponent for each escape, got ",
        header.num_escapes, " for ", count);
  return kHeaderBytes + body;
}

void check_kind(FloatKind kind) {
  const auto number = static_cast<int>(kind);
  check(number >= 0 && number <= static_cast<int>(FloatKind::kE5m2), "kind must be in [0, 3], got ", number);
}

}  // namespace

int64_t most_payload_bytes(FloatKind kind, int64_t raw_bytes) {
  check_kind(kind);
  check(raw_bytes >= 0 && raw_bytes <= INT64_MAX / 2, "raw_bytes must not be negative, got ", raw_bytes);
  const int64_t num_blocks = (whole_elements(kind, raw_bytes) + kBlockElements - 1) / kBlockElements;
  return raw_bytes + num_blocks * kHeaderBytes;
}

int64_t encode_exponents(FloatKind kind, const std::byte* raw, int64_t raw_bytes, std::byte* out,
                         const std::string& name) {
  const ExponentKernel& kernel = exponent_kernels().named(name);
  check_kind(kind);
  check(raw_bytes >= 0, "raw_bytes must not be negative, got ", raw_bytes);
  const int width = parts_of(kind).width;
  const int64_t num_elements = whole_elements(kind, raw_bytes);
  std::byte* to = out;
  for (int64_t begin = 0; begin < num_elements; begin += kBlockElements)
    to += encode_block(kernel, kind, raw + begin * width, elements_of(num_elements, begin), to);
  const int64_t rest = raw_bytes - num_elements * width;
  if (rest) std::memcpy(to, raw + num_elements * width, static_cast<size_t>(rest));
  return to + rest - out;
}

void decode_exponents(FloatKind kind, const std::byte* payload, int64_t num_bytes, std::byte* raw, int64_t raw_bytes,
                      const std::string& name) {
  const ExponentKernel& kernel = exponent_kernels().named(name);
  check_kind(kind);
  check(num_bytes >= 0 && raw_bytes >= 0, "bytes must not be negative, got ", num_bytes, " and ", raw_bytes);
  const int width = parts_of(kind).width;
  const int64_t num_elements = whole_elements(kind, raw_bytes), rest = raw_bytes - num_elements * width;
  const std::byte *from = payload, *end = payload + num_bytes;
  for (int64_t begin = 0; begin < num_elements; begin += kBlockElements)
    from += decode_block(kernel, kind, from, end - from, elements_of(num_elements, begin), raw + begin * width);
  check(end - from == rest, "payload must end with ", rest, " bytes, got ", end - from);
  if (rest) std::memcpy(raw + num_elements * width, from, static_cast<size_t>(rest));
}

}  // namespace kvpage
