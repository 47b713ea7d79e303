// CacheView: the memory of a cache as a copy sees it, one address and one list of strides a layer. Owns nothing.
#pragma once

#include <cstdint>
#include <vector>

namespace kvpage {

using Address = unsigned long long;  // as CUdeviceptr; a host or a device address

// One layer's tensor. `strides` are in bytes, one for each dimension of its shape.
struct LayerView {
  Address address;
  std::vector<int64_t> strides;
};

struct CacheView {
  std::vector<LayerView> layers;
  int64_t num_blocks;
};

// The shape of one layer's tensor.
struct BlockShape {
  std::vector<int64_t> sizes;  // the entry of the block dimension is not read
  int block_dim;
  int64_t element_bytes;
};

}  // namespace kvpage
