// check_tiles: whether a processor's tiles compute what products need, and the name of the bits that they give.
//
// The code for tiles was written where no processor has them. So it is tried once in each process that could take it,
// beside the same code over the model of tiles, with the sums in fp32 before they are rounded:
//
//   every bit as of the model                                the order is that of tile_shapes.h: "amx"
//   a row alone has the bits that it has in every batch,     another order: "amx-" and a digest of the bits, so that
//   and sums are within rounding of those in double          machines of two orders share no records
//   else                                                     refused
#pragma once

#include <string>

#include "linear/linear_task.h"

namespace kvpage {

struct TileVerdict {
  std::string name;     // of the bits; empty where tiles are refused
  std::string refusal;  // why; else empty
};

// `tiles` and `model` multiply bf16 by tiles. Takes some milliseconds.
TileVerdict check_tiles(const LinearKernel& tiles, const LinearKernel& model);

}  // namespace kvpage
