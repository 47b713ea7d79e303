// The block tables of a batch, and which blocks of them a run of tokens touches. Owns nothing.
#pragma once

#include <cstdint>
#include <limits>

#include "base/check.h"

namespace kvpage {

struct BlockTables {
  const int32_t* ids;  // [num_seqs, max_blocks]; entries past a sequence's tokens may hold anything
  int64_t row_stride;  // elements
  int64_t num_seqs, max_blocks, num_blocks, block_size;

  const int32_t* row(int64_t seq) const { return ids + seq * row_stride; }

  // Tokens that a row of the table has room for.
  int64_t capacity() const { return max_blocks * block_size; }

  // Sizes that no product of overflows.
  void check_sizes() const {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    check(num_seqs >= 0 && num_seqs <= kMost, "num_seqs must be in [0, ", kMost, "], got ", num_seqs);
    check(max_blocks >= 0 && max_blocks <= kMost, "max_blocks must be in [0, ", kMost, "], got ", max_blocks);
    check(num_blocks >= 0 && num_blocks <= kMost, "num_blocks must be in [0, ", kMost, "], got ", num_blocks);
    check(block_size > 0 && block_size <= kMost, "block_size must be in [1, ", kMost, "], got ", block_size);
  }

  // Every block of tokens [begin, end) of a sequence must name a block of the cache; 0 <= begin and end <= capacity().
  void check_range(int64_t seq, int64_t begin, int64_t end) const {
    if (begin >= end) return;
    for (int64_t i = begin / block_size; i <= (end - 1) / block_size; ++i) {
      const int32_t id = row(seq)[i];
      check(id >= 0 && id < num_blocks, "block_tables[", seq, "][", i, "] must be in [0, ", num_blocks, "), got ", id);
    }
  }
};

}  // namespace kvpage
