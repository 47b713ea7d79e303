// What was asked of the fake CUDA runtime so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct FakeExtent {
  unsigned long long src, dst;
  size_t bytes;
  bool operator==(const FakeExtent&) const = default;
};

struct FakeCalls {
  uint64_t launches, threads;  // of kernels
  uint64_t batches, copies;    // batched copies; single ones
  uint64_t flags;              // of the latest batched copy
  std::vector<FakeExtent> extents;
};

extern FakeCalls fake_calls;
extern bool fake_keeps;  // extents: not while something is timed
extern bool fake_batches;  // has cuMemcpyBatchAsync; asked for when a copier is made
