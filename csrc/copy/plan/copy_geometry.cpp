#include "copy/plan/copy_geometry.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "copy/plan/overlap.h"

namespace kvpage {
namespace {

struct Dim {
  int64_t size, src_stride, dst_stride;  // strides in bytes
};

// Dimensions that are dense on both sides become part of the fragment; the rest stays to be enumerated.
int64_t collapse(std::vector<Dim>& dims, int64_t bytes) {
  std::erase_if(dims, [](const Dim& dim) { return dim.size == 1; });
  auto dense = [&](const Dim& dim) { return dim.src_stride == bytes && dim.dst_stride == bytes; };
  for (auto dim = std::find_if(dims.begin(), dims.end(), dense); dim != dims.end();
       dim = std::find_if(dims.begin(), dims.end(), dense)) {
    bytes *= dim->size;
    dims.erase(dim);
  }
  return bytes;
}

std::vector<Dim> inner_dims(const BlockShape& shape, const LayerView& src, const LayerView& dst) {
  std::vector<Dim> dims;
  for (size_t i = 0; i < shape.sizes.size(); ++i) {
    if (static_cast<int>(i) != shape.block_dim) dims.push_back({shape.sizes[i], src.strides[i], dst.strides[i]});
  }
  return dims;
}

// Adds `base` at every index of the dimensions from `next` on.
void enumerate(const std::vector<Dim>& dims, size_t next, const Fragment& base, std::vector<Fragment>& out) {
  if (next == dims.size()) {
    out.push_back(base);
    return;
  }
  Fragment fragment = base;
  for (int64_t i = 0; i < dims[next].size; ++i) {
    enumerate(dims, next + 1, fragment, out);
    fragment.src += dims[next].src_stride;
    fragment.dst += dims[next].dst_stride;
  }
}

void add_layer(const BlockShape& shape, const LayerView& src, const LayerView& dst, std::vector<Fragment>& out) {
  std::vector<Dim> dims = inner_dims(shape, src, dst);
  const int64_t bytes = collapse(dims, shape.element_bytes);
  if (bytes == 0) return;
  enumerate(dims, 0, {src.address, dst.address, bytes, src.strides[shape.block_dim], dst.strides[shape.block_dim]},
            out);
}

std::vector<Fragment> merge_neighbours(std::vector<Fragment> fragments) {
  std::sort(fragments.begin(), fragments.end(),
            [](const Fragment& a, const Fragment& b) { return std::tie(a.src, a.dst) < std::tie(b.src, b.dst); });
  std::vector<Fragment> merged;
  for (const Fragment& fragment : fragments) {
    Fragment* last = merged.empty() ? nullptr : &merged.back();
    if (last && last->src + last->bytes == fragment.src && last->dst + last->bytes == fragment.dst &&
        last->src_step == fragment.src_step && last->dst_step == fragment.dst_step) {
      last->bytes += fragment.bytes;
    } else {
      merged.push_back(fragment);
    }
  }
  return merged;
}

bool are_same(const CacheView& a, const CacheView& b) {
  auto same = [](const LayerView& x, const LayerView& y) { return x.address == y.address && x.strides == y.strides; };
  return std::equal(a.layers.begin(), a.layers.end(), b.layers.begin(), b.layers.end(), same);
}

void check_shape(const BlockShape& shape) {
  check(shape.block_dim >= 0 && shape.block_dim < static_cast<int>(shape.sizes.size()),
        "block_dim must be a dimension of ", shape.sizes.size(), ", got ", shape.block_dim);
  check(shape.element_bytes > 0, "element_bytes must be positive, got ", shape.element_bytes);
  int64_t bytes = shape.element_bytes;
  for (const int64_t size : shape.sizes) {
    check(size >= 0, "sizes must not be negative, got ", size);
    check(!__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes),
          "a block must fit into memory, got sizes of ", "2**63 bytes and more");
  }
}

// Returns the shape of a layer; of all layers where there is only one.
const BlockShape& shape_of(const std::vector<BlockShape>& shapes, size_t layer) {
  return shapes[shapes.size() == 1 ? 0 : layer];
}

void check_layers(const std::vector<BlockShape>& shapes, const CacheView& cache, const char* name) {
  check(cache.num_blocks >= 0 && cache.num_blocks <= std::numeric_limits<int32_t>::max(), name,
        " must have block ids of 31 bits, got ", cache.num_blocks, " blocks");
  for (size_t i = 0; i < cache.layers.size(); ++i) {
    const size_t num_dims = shape_of(shapes, i).sizes.size(), num_strides = cache.layers[i].strides.size();
    check(num_strides == num_dims, name, " must have ", num_dims, " strides a layer, got ", num_strides);
  }
}

}  // namespace

CopyGeometry::CopyGeometry(const std::vector<BlockShape>& shapes, const CacheView& src, const CacheView& dst)
    : num_src_blocks_(src.num_blocks), num_dst_blocks_(dst.num_blocks) {
  check(src.layers.size() == dst.layers.size(), "src and dst must have as many layers, got ", src.layers.size(),
        " and ", dst.layers.size());
  check(shapes.size() == 1 || shapes.size() == src.layers.size(), "shapes must be one, or one for each of ",
        src.layers.size(), " layers, got ", shapes.size());
  for (const BlockShape& shape : shapes) check_shape(shape);
  check_layers(shapes, src, "src");
  check_layers(shapes, dst, "dst");
  for (size_t i = 0; i < src.layers.size(); ++i)
    add_layer(shape_of(shapes, i), src.layers[i], dst.layers[i], fragments_);
  fragments_ = merge_neighbours(std::move(fragments_));
  for (const Fragment& fragment : fragments_) {
    block_bytes_ += fragment.bytes;
    fills_steps_ &= fragment.bytes == fragment.src_step && fragment.bytes == fragment.dst_step;
  }
  check_overlap(src, dst);
}

void CopyGeometry::check_overlap(const CacheView& src, const CacheView& dst) {
  std::vector<Region> sources = source_regions(fragments_, num_src_blocks_);
  const std::vector<Region> targets = target_regions(fragments_, num_dst_blocks_);
  check(are_disjoint(targets), "dst must not overlap itself: no byte may belong to two blocks or layers");
  if (!ranges_meet(sources, targets)) return;
  same_memory_ = num_src_blocks_ == num_dst_blocks_ && are_same(src, dst);
  if (same_memory_) return;
  sources.insert(sources.end(), targets.begin(), targets.end());
  check(are_disjoint(std::move(sources)),
        "src and dst must be the same caches or share no memory, got caches that overlap");
}

}  // namespace kvpage
