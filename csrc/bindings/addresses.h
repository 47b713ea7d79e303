// Addresses, views and moves, which Python passes as numbers.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "tokens/block_tables.h"
#include "tokens/kv_part.h"
#include "tokens/token_move.h"

namespace kvpage {

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Blocks; of the rows address and two strides in bytes, RowType, CodeType, size; of the heads' scales address and
// stride.
using Part = std::tuple<KVPart, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

inline TokenMove token_move(const Part& part) {
  const auto& [blocks, rows, token_stride, head_stride, row_type, code_type, size, scales, scale_stride] = part;
  return {blocks,
          {pointer<std::byte>(rows), token_stride, head_stride},
          static_cast<RowType>(row_type),
          static_cast<CodeType>(code_type),
          size,
          pointer<const float>(scales),
          scale_stride};
}

inline std::vector<TokenMove> token_moves(const std::vector<Part>& parts) {
  std::vector<TokenMove> moves;
  for (const Part& part : parts) moves.push_back(token_move(part));
  return moves;
}

inline RowView row_view(const std::array<int64_t, 3>& view) { return {pointer<std::byte>(view[0]), view[1], view[2]}; }

// (address, row stride in elements, num_seqs, max_blocks, num_blocks, block_size)
inline BlockTables block_tables(const std::array<int64_t, 6>& table) {
  return {pointer<const int32_t>(table[0]), table[1], table[2], table[3], table[4], table[5]};
}

using Numbers = std::vector<int64_t>;  // one for each block table

inline const int64_t* numbers(const Numbers& list, const std::array<int64_t, 6>& table) {
  check(static_cast<int64_t>(list.size()) == table[2], "lists must have one entry for each of ", table[2],
        " block tables, got ", list.size());
  return list.data();
}

}  // namespace kvpage
