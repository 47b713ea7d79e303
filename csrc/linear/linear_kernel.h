// LinearKernel: products of rows with the rows of a weight, which is read where it lies. One thread computes a task.
//
//   out[m, n] = dot(x[m], w[n])           both run along K, so nothing is transposed
//
//             K in blocks of kMostK
//          ┌────────┬────────┬──────┐
//   x  m   │ kTileRows rows at a    │     a tile: kTileRows rows of x times kTileColumns rows of w, its sums in
//          │ time, in scratch       │     registers, vectors along K; the lanes are added at the end of a K block
//          └────────┴────────┴──────┘
//   w  n   │ kTileColumns rows      │     a tile of w stays in the first cache while all rows of x pass by
//
// A sum is taken in an order that depends on K alone. So a row's result is the same, bit by bit, whatever other rows
// there are, and however threads share them.
#pragma once

#include "linear/linear_task.h"
#include "linear/tile_check.h"
#include "simd/kernel_family.h"

namespace kvpage {

const KernelFamily<LinearKernel>& linear_kernels();

// What a check of this processor's tiles has found, once for the process.
const TileVerdict& tile_verdict();

KVPAGE_DECLARE_KERNELS(LinearKernel, linear_kernel);
#if defined(__x86_64__)
extern const LinearKernel linear_kernel_avx512bf16;
extern const LinearKernel linear_kernel_amx;  // in builds whose compiler knows tiles
#endif
extern const LinearKernel linear_kernel_pairs_model;  // for tests: avx512bf16's loops in plain C++
extern const LinearKernel linear_kernel_amx_model;    // likewise those of amx; and for the check of its tiles

}  // namespace kvpage
