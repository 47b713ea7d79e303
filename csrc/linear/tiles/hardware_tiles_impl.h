// HardwareTiles: the tile registers of a processor with AMX. For the one source that is compiled for it.
//
// The instructions are written out: compilers' own functions take a register's number as a literal alone, and GCC's
// loads do not say that they read memory.
#pragma once

#include <cstddef>

#include "linear/tiles/tile_shapes.h"

namespace kvpage {
namespace {

// A thread's registers, from the first shapes to the end of this object.
class HardwareTiles {
 public:
  HardwareTiles() = default;
  HardwareTiles(const HardwareTiles&) = delete;
  HardwareTiles& operator=(const HardwareTiles&) = delete;
  // A thread that keeps tiles makes each switch to another one slower, and the core warmer.
  ~HardwareTiles() { asm volatile("tilerelease" ::: "memory"); }

  void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

  template <int kTile>
  __attribute__((always_inline)) void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }

  template <int kTile>
  __attribute__((always_inline)) void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kTile>
  __attribute__((always_inline)) void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kSums, int kLeft, int kRight>
  __attribute__((always_inline)) void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
  }
};

}  // namespace
}  // namespace kvpage
