// ByteRuns: bytes that lie in several places, gone through once, and hashed after they were used.
//
//   runs      [ run | run | run | run | run | run ]
//                      ▲ position: what comes before it is hashed
//   digests   [ stretch     | stretch     | ...   ]     xxh3-128 each
//
// Whoever writes them to a file lets the file take the next ones, and then tells how many bytes it took: to hash these
// costs little, since the processor's cache still has them. (The other way round, memory would be waited for twice: by the
// hash, and by the kernel's copy, which waits for its own destination anyway.) Nothing here owns memory.
#pragma once

#include <cstdint>
#include <vector>

#include "xxh3.h"

namespace kvpage {

struct ByteRun {
  const std::byte* data;
  int64_t num_bytes;
};

class ByteRuns {
 public:
  // Runs of positive length; the last stretch may be shorter. Throws InvalidArgument for others, and unless stretch_bytes
  // is positive.
  ByteRuns(std::vector<ByteRun> runs, int64_t stretch_bytes);

  int64_t num_bytes() const { return num_bytes_; }
  int64_t position() const { return position_; }

  // The next num_bytes bytes: fewer at the end, or where they are in more than max_runs runs.
  std::vector<ByteRun> peek(int64_t num_bytes, int64_t max_runs) const;

  // Hashes the next bytes as they are now, and goes behind them. Throws InvalidArgument for more than there are.
  void advance(int64_t num_bytes);
  // The same, and copies them.
  void copy(std::byte* to, int64_t num_bytes);

  // Of the stretches that were gone through.
  const std::vector<Digest>& digests() const { return digests_; }

 private:
  template <typename Body>
  void for_each_piece(int64_t num_bytes, const Body& body);

  std::vector<ByteRun> runs_;
  int64_t stretch_bytes_, num_bytes_ = 0, position_ = 0;
  size_t run_ = 0;           // where the position is, or the number of runs at the end
  int64_t offset_ = 0;       // in that run
  Xxh3 hash_;                // of the stretch so far
  std::vector<Digest> digests_;
};

}  // namespace kvpage
