// The SM kernel's copy, thread by thread. It is plain index arithmetic that nvcc and the host compiler both compile: a
// machine without a GPU tests the code that a GPU runs.
//
//   extent = pair x fragment          unit = a warp's share of an extent: 32 lanes x kUnroll vectors
//
//   extent 0: [unit 0][unit 1][unit 2..]   extent 1: [unit 3][unit 4][unit 5..]   ...       (units_per_extent = 3)
//   in a unit: lane l copies vectors l, l + 32, l + 64, ... so that a warp's accesses are one run of memory
#pragma once

#include <cstdint>

#include "copy/plan/fragment.h"

#ifdef __CUDACC__
#define KVPAGE_HOST_DEVICE __host__ __device__ __forceinline__
#define KVPAGE_UNROLL _Pragma("unroll")
#else
#define KVPAGE_HOST_DEVICE inline
#define KVPAGE_UNROLL
#endif

namespace kvpage {

// The work of one launch. The arrays are where its threads can read them.
struct CopyParams {
  const Fragment* fragments;     // [num_fragments]
  const BlockPair* pairs;  // [num_units / units_per_extent / num_fragments]
  int64_t num_fragments;
  int64_t num_units;
  int64_t units_per_extent;  // of the longest fragment; shorter ones leave some idle
};

constexpr int kLanes = 32;
constexpr int kUnroll = 4;  // vectors a lane has in flight

struct alignas(16) Vector16 {
  unsigned long long low, high;
};

// Returns the pointer of an address. On a device it tells the compiler that the memory is global, which an integer does
// not show: generic accesses are slower.
KVPAGE_HOST_DEVICE void* memory(Address address) {
#ifdef __CUDA_ARCH__
  return __cvta_global_to_generic(address);
#else
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
#endif
}

// Copies one lane's part of a unit. Every fragment's addresses, steps and bytes are multiples of sizeof(Vector).
template <typename Vector>
KVPAGE_HOST_DEVICE void copy_lane(const CopyParams& params, int64_t unit, int lane) {
  const int64_t extent = unit / params.units_per_extent;
  const Fragment& fragment = params.fragments[extent % params.num_fragments];
  const BlockPair pair = params.pairs[extent / params.num_fragments];
  const Vector* src = static_cast<const Vector*>(memory(fragment.src + pair.src_id * fragment.src_step));
  Vector* dst = static_cast<Vector*>(memory(fragment.dst + pair.dst_id * fragment.dst_step));
  const int64_t num_vectors = fragment.bytes / static_cast<int64_t>(sizeof(Vector));
  const int64_t first = (unit % params.units_per_extent) * (kLanes * kUnroll) + lane;
  Vector held[kUnroll] = {};  // GCC does not see that only what was read is written, and warns
  KVPAGE_UNROLL
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * kLanes < num_vectors) held[i] = src[first + i * kLanes];
  }
  KVPAGE_UNROLL
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * kLanes < num_vectors) dst[first + i * kLanes] = held[i];
  }
}

// Copies the share of thread `thread` of `num_threads`, a multiple of kLanes: units by warp, striding over the grid.
template <typename Vector>
KVPAGE_HOST_DEVICE void copy_thread(const CopyParams& params, int64_t thread, int64_t num_threads) {
  for (int64_t unit = thread / kLanes; unit < params.num_units; unit += num_threads / kLanes) {
    copy_lane<Vector>(params, unit, static_cast<int>(thread % kLanes));
  }
}

}  // namespace kvpage
