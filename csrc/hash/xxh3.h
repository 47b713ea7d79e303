// Xxh3: the 128-bit XXH3 hash with seed 0, of bytes that come in pieces; for many bytes at the speed of memory.
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

namespace kvpage {

constexpr int64_t kDigestBytes = 16;
using Digest = std::array<std::byte, kDigestBytes>;  // canonical: big-endian, as the package xxhash gives it

// What differs between instruction sets; see xxh3_impl.h. ahead: as many bytes as are added, fetched meanwhile; they need
// not be there.
struct Xxh3Kernel {
  const char* name;
  // Whole blocks, each with its scrambling.
  void (*add_blocks)(uint64_t* sums, const std::byte* data, int64_t num_blocks, const std::byte* ahead);
  // The same, and the bytes copied.
  void (*add_and_copy_blocks)(uint64_t* sums, const std::byte* data, int64_t num_blocks, const std::byte* ahead,
                              std::byte* to);
  // Past the processor's cache, to a multiple of 64; the caller fences.
  void (*add_and_stream_blocks)(uint64_t* sums, const std::byte* data, int64_t num_blocks, const std::byte* ahead,
                                std::byte* to);
  // Stripes from the beginning of a block.
  void (*add_stripes)(uint64_t* sums, const std::byte* data, int64_t num_stripes, const std::byte* secret);
};

// The best for this machine; or the one of that name, for tests (InvalidArgument if this machine lacks it).
const Xxh3Kernel& xxh3_kernel();
const Xxh3Kernel& xxh3_kernel(const char* name);

extern const Xxh3Kernel xxh3_base;
#if defined(__x86_64__)
extern const Xxh3Kernel xxh3_avx2, xxh3_avx512;
#endif

class Xxh3 {
 public:
  explicit Xxh3(const Xxh3Kernel& kernel = xxh3_kernel());

  // next: where the bytes lie that will be added afterwards, which are fetched meanwhile; null if nobody knows.
  void update(const std::byte* data, int64_t num_bytes, const std::byte* next = nullptr);

  // As update and memcpy, each byte read once; `streaming`: past the processor's cache where `to` allows, after which the
  // thread has to call end_streaming() before others may read.
  void update_and_copy(const std::byte* data, int64_t num_bytes, std::byte* to, bool streaming,
                       const std::byte* next = nullptr);

  // Of all bytes so far; more may follow.
  Digest digest() const;

 private:
  static constexpr int64_t kStripe = 64, kBlock = 1024;

  template <typename AddBlocks>
  void add(const std::byte* data, int64_t num_bytes, const AddBlocks& add_blocks);

  const Xxh3Kernel& kernel_;
  alignas(64) std::array<uint64_t, 8> sums_;
  // The last stripe of what was added to the sums, and behind it what was not: 1 to 1024 bytes once there are any, since
  // the last block is another one.
  alignas(64) std::array<std::byte, kStripe + kBlock> rest_;
  int64_t num_rest_ = 0;
  uint64_t num_bytes_ = 0;
};

// Of the stretches of `stretch_bytes` that `data` is made of, the last of which may be shorter.
void hash_stretches(const std::byte* data, int64_t num_bytes, int64_t stretch_bytes, int max_threads, Digest* digests);

}  // namespace kvpage
