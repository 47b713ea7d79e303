// Xxh3: the 128-bit XXH3 hash with seed 0, of bytes that come in parts; for many bytes at the speed of memory.
//
//   input    [ block of 1024 bytes = 16 stripes | block | ... | 1 to 1024 bytes ]
//   state    8 sums of 64 bits; a stripe adds to each, scrambled after every block; the last stripe counts once more
//
// Written from the specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Inputs of up to 240 bytes have a way
// of their own, without stripes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "hash/xxh3_kernel.h"

namespace kvpage {

constexpr int64_t kDigestBytes = 16;
using Digest = std::array<std::byte, kDigestBytes>;  // canonical: big-endian, as the package xxhash gives it

class Xxh3 {
 public:
  explicit Xxh3(const Xxh3Kernel& kernel = xxh3_kernels().best());

  // Adds bytes. `next`: the address of the bytes that will be added afterwards, which are fetched meanwhile; or null.
  void update(const std::byte* data, int64_t num_bytes, const std::byte* next = nullptr);

  // Adds bytes and copies them, each byte read once. `streaming`: past the processor's cache where `to` allows; the
  // thread then calls end_streaming() before other threads may read.
  void update_and_copy(const std::byte* data, int64_t num_bytes, std::byte* to, bool streaming,
                       const std::byte* next = nullptr);

  // Returns the digest of all bytes so far; more may follow.
  Digest digest() const;

 private:
  static constexpr int64_t kStripe = 64, kBlock = 1024;

  template <typename AddBlocks>
  void add(const std::byte* data, int64_t num_bytes, const AddBlocks& add_blocks);

  const Xxh3Kernel& kernel_;
  alignas(64) std::array<uint64_t, 8> sums_;
  // The last stripe that was added to the sums; after it the bytes that were not: 1 to 1024 once there are any, since
  // the last block is treated in another way.
  alignas(64) std::array<std::byte, kStripe + kBlock> rest_;
  int64_t num_rest_ = 0;
  uint64_t num_bytes_ = 0;
};

// Hashes the stretches of `stretch_bytes` that make up `data`. The last one may be shorter.
void hash_stretches(const std::byte* data, int64_t num_bytes, int64_t stretch_bytes, int max_threads, Digest* digests);

}  // namespace kvpage
