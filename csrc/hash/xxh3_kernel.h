// Xxh3Kernel: the part of XXH3 that is compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/kernel_family.h"

namespace kvpage {

// See xxh3_kernel_impl.h. ahead: as many bytes as are added, fetched meanwhile; they need
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

const KernelFamily<Xxh3Kernel>& xxh3_kernels();

KVPAGE_DECLARE_KERNELS(Xxh3Kernel, xxh3_kernel);

}  // namespace kvpage
