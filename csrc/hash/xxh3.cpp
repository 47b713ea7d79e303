#include "hash/xxh3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"
#include "hash/xxh3_constants.h"

namespace kvpage {
namespace {

static_assert(std::endian::native == std::endian::little, "XXH3 reads little-endian words");

struct Wide {
  uint64_t low, high;
};

uint64_t read64(const std::byte* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

uint32_t read32(const std::byte* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

uint64_t secret64(int64_t at) { return read64(kXxh3Secret + at); }
uint32_t secret32(int64_t at) { return read32(kXxh3Secret + at); }

Wide multiply(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}

uint64_t fold(uint64_t a, uint64_t b) {
  const Wide product = multiply(a, b);
  return product.low ^ product.high;
}

uint64_t avalanche(uint64_t x) {
  x = (x ^ (x >> 37)) * kMix1;
  return x ^ (x >> 32);
}

uint64_t avalanche_64(uint64_t x) {  // that of XXH64
  x = (x ^ (x >> 33)) * kPrime64_2;
  x = (x ^ (x >> 29)) * kPrime64_3;
  return x ^ (x >> 32);
}

Wide hash_none() { return {avalanche_64(secret64(64) ^ secret64(72)), avalanche_64(secret64(80) ^ secret64(88))}; }

Wide hash_1_to_3(const std::byte* data, uint64_t length) {
  const auto byte = [&](uint64_t at) { return std::to_integer<uint32_t>(data[at]); };
  const uint32_t low = byte(0) << 16 | byte(length >> 1) << 24 | byte(length - 1) | static_cast<uint32_t>(length) << 8;
  const uint32_t high = std::rotl(__builtin_bswap32(low), 13);
  return {avalanche_64(low ^ uint64_t{secret32(0) ^ secret32(4)}),
          avalanche_64(high ^ uint64_t{secret32(8) ^ secret32(12)})};
}

Wide hash_4_to_8(const std::byte* data, uint64_t length) {
  const uint64_t both = read32(data) + (uint64_t{read32(data + length - 4)} << 32);
  Wide hash = multiply(both ^ secret64(16) ^ secret64(24), kPrime64_1 + (length << 2));
  hash.high += hash.low << 1;
  hash.low ^= hash.high >> 3;
  hash.low = (hash.low ^ (hash.low >> 35)) * kMix2;
  return {hash.low ^ (hash.low >> 28), avalanche(hash.high)};
}

Wide hash_9_to_16(const std::byte* data, uint64_t length) {
  const uint64_t first = read64(data), last = read64(data + length - 8);
  Wide mixed = multiply(first ^ last ^ secret64(32) ^ secret64(40), kPrime64_1);
  mixed.low += (length - 1) << 54;
  const uint64_t keyed = last ^ secret64(48) ^ secret64(56);
  mixed.high += keyed + uint64_t{static_cast<uint32_t>(keyed)} * (kPrime32_2 - 1);
  mixed.low ^= __builtin_bswap64(mixed.high);
  const Wide hash = multiply(mixed.low, kPrime64_2);
  return {avalanche(hash.low), avalanche(hash.high + mixed.high * kPrime64_2)};
}

uint64_t mix_16(const std::byte* data, int64_t at) {
  return fold(read64(data) ^ secret64(at), read64(data + 8) ^ secret64(at + 8));
}

void mix_32(Wide& sum, const std::byte* first, const std::byte* second, int64_t at) {
  sum.low = (sum.low + mix_16(first, at)) ^ (read64(second) + read64(second + 8));
  sum.high = (sum.high + mix_16(second, at + 16)) ^ (read64(first) + read64(first + 8));
}

Wide finish_mixed(const Wide& sum, uint64_t length) {
  return {avalanche(sum.low + sum.high),
          0 - avalanche(sum.low * kPrime64_1 + sum.high * kPrime64_4 + length * kPrime64_2)};
}

Wide hash_17_to_128(const std::byte* data, uint64_t length) {
  Wide sum = {length * kPrime64_1, 0};
  for (int64_t i = static_cast<int64_t>((length - 1) / 32); i >= 0; --i)
    mix_32(sum, data + 16 * i, data + length - 16 * (i + 1), 32 * i);
  return finish_mixed(sum, length);
}

Wide hash_129_to_240(const std::byte* data, uint64_t length) {
  Wide sum = {length * kPrime64_1, 0};
  for (int64_t i = 0; i < 4; ++i) mix_32(sum, data + 32 * i, data + 32 * i + 16, 32 * i);
  sum = {avalanche(sum.low), avalanche(sum.high)};
  for (int64_t i = 4; i < static_cast<int64_t>(length / 32); ++i)
    mix_32(sum, data + 32 * i, data + 32 * i + 16, 3 + 32 * (i - 4));
  mix_32(sum, data + length - 16, data + length - 32, 103);
  return finish_mixed(sum, length);
}

Wide hash_short(const std::byte* data, uint64_t length) {
  if (length > 128) return hash_129_to_240(data, length);
  if (length > 16) return hash_17_to_128(data, length);
  if (length > 8) return hash_9_to_16(data, length);
  if (length > 3) return hash_4_to_8(data, length);
  return length > 0 ? hash_1_to_3(data, length) : hash_none();
}

uint64_t merge(const uint64_t* sums, int64_t at, uint64_t start) {
  for (int64_t i = 0; i < 8; i += 2)
    start += fold(sums[i] ^ secret64(at + 8 * i), sums[i + 1] ^ secret64(at + 8 * i + 8));
  return avalanche(start);
}

Digest canonical(const Wide& hash) {
  const uint64_t words[2] = {__builtin_bswap64(hash.high), __builtin_bswap64(hash.low)};
  Digest digest;
  std::memcpy(digest.data(), words, sizeof(words));
  return digest;
}

// Calls add(data, number of blocks, ahead) once or twice: the last of the bytes fetch those that are next. How far
// ahead was measured: a page, whose address the processor has to look up as well, and it does not by itself go on to
// the next.
template <typename Add>
void add_fetching(const std::byte* data, int64_t num_blocks, const std::byte* next, const Add& add) {
  constexpr int64_t kAheadBytes = 4096, kBlockBytes = 1024;
  const int64_t last = next ? std::min(num_blocks, kAheadBytes / kBlockBytes) : 0;
  add(data, num_blocks - last, data + kAheadBytes);
  if (last > 0) add(data + (num_blocks - last) * kBlockBytes, last, next);
}

}  // namespace

Xxh3::Xxh3(const Xxh3Kernel& kernel)
    : kernel_(kernel),
      sums_{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1} {}

// add_blocks(data, number, how far into the given bytes): of blocks that are whole and not the last.
template <typename AddBlocks>
void Xxh3::add(const std::byte* data, int64_t num_bytes, const AddBlocks& add_blocks) {
  num_bytes_ += static_cast<uint64_t>(num_bytes);
  const std::byte* const begin = data;
  const std::byte* const end = data + num_bytes;
  std::byte* const rest = rest_.data() + kStripe;
  if (num_rest_ > 0) {
    const int64_t count = std::min(kBlock - num_rest_, num_bytes);
    std::memcpy(rest + num_rest_, data, static_cast<size_t>(count));
    num_rest_ += count, data += count;
    if (data == end) return;
    kernel_.add_blocks(sums_.data(), rest, 1, data);
    std::memcpy(rest_.data(), rest + kBlock - kStripe, kStripe);
    num_rest_ = 0;
  }
  if (end - data > kBlock) {
    const int64_t num_blocks = (end - data - 1) / kBlock;
    add_blocks(data, num_blocks, data - begin);
    data += num_blocks * kBlock;
    std::memcpy(rest_.data(), data - kStripe, kStripe);
  }
  num_rest_ = end - data;
  if (num_rest_ > 0) std::memcpy(rest, data, static_cast<size_t>(num_rest_));
}

void Xxh3::update(const std::byte* data, int64_t num_bytes, const std::byte* next) {
  add(data, num_bytes, [&](const std::byte* blocks, int64_t num_blocks, int64_t) {
    add_fetching(blocks, num_blocks, next, [&](const std::byte* some, int64_t count, const std::byte* ahead) {
      kernel_.add_blocks(sums_.data(), some, count, ahead);
    });
  });
}

void Xxh3::update_and_copy(const std::byte* data, int64_t num_bytes, std::byte* to, bool streaming,
                           const std::byte* next) {
  int64_t first = num_bytes, last = num_bytes;  // of the bytes that go with the blocks
  add(data, num_bytes, [&](const std::byte* blocks, int64_t num_blocks, int64_t at) {
    first = at, last = at + num_blocks * kBlock;
    const bool streams = streaming && reinterpret_cast<uintptr_t>(to + at) % kStripe == 0;
    const auto add_and_copy = streams ? kernel_.add_and_stream_blocks : kernel_.add_and_copy_blocks;
    add_fetching(blocks, num_blocks, next, [&](const std::byte* some, int64_t count, const std::byte* ahead) {
      add_and_copy(sums_.data(), some, count, ahead, to + (some - data));
    });
  });
  copy_bytes(to, data, first, streaming);
  copy_bytes(to + last, data + last, num_bytes - last, streaming);
}

Digest Xxh3::digest() const {
  const std::byte* const rest = rest_.data() + kStripe;
  if (num_bytes_ <= 240) return canonical(hash_short(rest, num_bytes_));
  alignas(64) std::array<uint64_t, 8> sums = sums_;
  kernel_.add_stripes(sums.data(), rest, (num_rest_ - 1) / kStripe, kXxh3Secret);
  kernel_.add_stripes(sums.data(), rest + num_rest_ - kStripe, 1, kXxh3Secret + kXxh3SecretBytes - kStripe - 7);
  return canonical({merge(sums.data(), 11, num_bytes_ * kPrime64_1),
                    merge(sums.data(), kXxh3SecretBytes - kStripe - 11, ~(num_bytes_ * kPrime64_2))});
}

void hash_stretches(const std::byte* data, int64_t num_bytes, int64_t stretch_bytes, int max_threads, Digest* digests) {
  check(stretch_bytes > 0, "stretch_bytes must be positive, got ", stretch_bytes);
  constexpr int64_t kGrainBytes = 4 << 20;  // a thread: starting one costs as much as hashing a tenth of it
  const int64_t num_stretches = num_bytes / stretch_bytes + (num_bytes % stretch_bytes != 0);
  parallel_for(num_stretches, useful_threads(num_bytes, kGrainBytes, max_threads), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Xxh3 hash;
      hash.update(data + i * stretch_bytes, std::min(stretch_bytes, num_bytes - i * stretch_bytes));
      digests[i] = hash.digest();
    }
  });
}

}  // namespace kvpage
