// Addresses, views and moves, which Python passes as numbers.
#pragma once

#include <array>
#include <cstdint>
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

// Address, four strides in bytes, run size, element bytes; then of the scales address and three strides.
using Blocks = std::array<int64_t, 11>;

inline KVPart kv_part(const int64_t* v) {
  return {pointer<std::byte>(v[0]), v[1], v[2], v[3], v[4], v[5], v[6], pointer<std::byte>(v[7]), v[8], v[9], v[10]};
}

// Blocks; then of the rows address and two strides in bytes, RowType, CodeType, size; then the heads' scales and a
// stride.
using Part = std::array<int64_t, 19>;

inline TokenMove token_move(const Part& v) {
  return {kv_part(v.data()),
          {pointer<std::byte>(v[11]), v[12], v[13]},
          static_cast<RowType>(v[14]),
          static_cast<CodeType>(v[15]),
          v[16],
          pointer<const float>(v[17]),
          v[18]};
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
