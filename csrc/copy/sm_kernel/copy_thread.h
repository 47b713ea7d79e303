// The SM kernel's copy, thread by thread: plain index arithmetic that nvcc and the host compiler both compile, so
// that a machine without a GPU tests what a GPU runs.
//
//   extent = pair x piece          unit = a warp's share of an extent: 32 lanes x kUnroll vectors
//
//   extent 0: [unit 0][unit 1][unit 2..]   extent 1: [unit 3][unit 4][unit 5..]   ...       (units_per_extent = 3)
//   in a unit: lane l copies vectors l, l + 32, l + 64, ... so that a warp's accesses are one run of memory
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVPAGE_HOST_DEVICE __host__ __device__ __forceinline__
#define KVPAGE_UNROLL _Pragma("unroll")
#else
#define KVPAGE_HOST_DEVICE inline
#define KVPAGE_UNROLL
#endif

namespace kvpage {

using Address = unsigned long long;  // as CUdeviceptr; a host or a device address

// Bytes that are contiguous in source and destination. Block b of it: src + b * src_step, dst + b * dst_step.
struct Piece {
  Address src, dst;
  int64_t bytes, src_step, dst_step;
};

struct BlockPair {
  int32_t src_id, dst_id;
};

// What one launch copies. The arrays lie where the threads that run it can read them.
struct CopyParams {
  const Piece* pieces;     // [num_pieces]
  const BlockPair* pairs;  // [num_units / units_per_extent / num_pieces]
  int64_t num_pieces;
  int64_t num_units;
  int64_t units_per_extent;  // of the longest piece; shorter ones leave some idle
};

constexpr int kLanes = 32;
constexpr int kUnroll = 4;  // vectors a lane has in flight

struct alignas(16) Vector16 {
  unsigned long long low, high;
};

// On a device it says that the address is one of global memory, which an integer does not show: generic accesses are
// slower.
KVPAGE_HOST_DEVICE void* memory(Address address) {
#ifdef __CUDA_ARCH__
  return __cvta_global_to_generic(address);
#else
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
#endif
}

// Copies one lane's part of a unit. Every piece's addresses, steps and bytes are multiples of sizeof(Vector).
template <typename Vector>
KVPAGE_HOST_DEVICE void copy_lane(const CopyParams& params, int64_t unit, int lane) {
  const int64_t extent = unit / params.units_per_extent;
  const Piece& piece = params.pieces[extent % params.num_pieces];
  const BlockPair pair = params.pairs[extent / params.num_pieces];
  const Vector* src = static_cast<const Vector*>(memory(piece.src + pair.src_id * piece.src_step));
  Vector* dst = static_cast<Vector*>(memory(piece.dst + pair.dst_id * piece.dst_step));
  const int64_t num_vectors = piece.bytes / static_cast<int64_t>(sizeof(Vector));
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

// Everything that thread `thread` of `num_threads` copies (a multiple of kLanes): units by warp, striding over the grid.
template <typename Vector>
KVPAGE_HOST_DEVICE void copy_thread(const CopyParams& params, int64_t thread, int64_t num_threads) {
  for (int64_t unit = thread / kLanes; unit < params.num_units; unit += num_threads / kLanes) {
    copy_lane<Vector>(params, unit, static_cast<int>(thread % kLanes));
  }
}

}  // namespace kvpage
