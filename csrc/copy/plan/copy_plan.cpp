#include "copy/plan/copy_plan.h"

#include <limits>
#include <numeric>
#include <tuple>

#include "base/check.h"

namespace kvpage {
namespace {

struct Dim {
  int64_t size, src_stride, dst_stride;  // strides in bytes
};

// A piece of every block on one side: bytes at begin, begin + step, ..., `count` times.
struct Region {
  Address begin;
  int64_t bytes, step, count;

  Address end() const { return begin + (count - 1) * step + bytes; }
};

// Dimensions that are dense on both sides become part of the piece; the rest stays to be enumerated.
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
void enumerate(const std::vector<Dim>& dims, size_t next, const Piece& base, std::vector<Piece>& out) {
  if (next == dims.size()) {
    out.push_back(base);
    return;
  }
  Piece piece = base;
  for (int64_t i = 0; i < dims[next].size; ++i) {
    enumerate(dims, next + 1, piece, out);
    piece.src += dims[next].src_stride;
    piece.dst += dims[next].dst_stride;
  }
}

void add_layer(const BlockShape& shape, const LayerView& src, const LayerView& dst, std::vector<Piece>& out) {
  std::vector<Dim> dims = inner_dims(shape, src, dst);
  const int64_t bytes = collapse(dims, shape.element_bytes);
  if (bytes == 0) return;
  enumerate(dims, 0, {src.address, dst.address, bytes, src.strides[shape.block_dim], dst.strides[shape.block_dim]}, out);
}

std::vector<Piece> merge_neighbours(std::vector<Piece> pieces) {
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return std::tie(a.src, a.dst) < std::tie(b.src, b.dst); });
  std::vector<Piece> merged;
  for (const Piece& piece : pieces) {
    Piece* last = merged.empty() ? nullptr : &merged.back();
    if (last && last->src + last->bytes == piece.src && last->dst + last->bytes == piece.dst &&
        last->src_step == piece.src_step && last->dst_step == piece.dst_step) {
      last->bytes += piece.bytes;
    } else {
      merged.push_back(piece);
    }
  }
  return merged;
}

// Whether the regions [first, last), which reach into each other, still share no byte: that is certain when, folded
// onto a circle as long as their common step, they do not meet.
bool interleave(std::vector<Region>::iterator first, std::vector<Region>::iterator last) {
  const int64_t step = std::max_element(first, last, [](const Region& a, const Region& b) { return a.step < b.step; })->step;
  if (step <= 0) return false;
  const Address origin = first->begin;
  auto offset = [&](const Region& region) { return static_cast<int64_t>((region.begin - origin) % step); };
  if (std::any_of(first, last, [&](const Region& r) { return r.count > 1 && r.step != step; })) return false;
  std::sort(first, last, [&](const Region& a, const Region& b) { return offset(a) < offset(b); });
  for (auto region = first; region != last; ++region) {
    const bool is_last = region + 1 == last;
    if (offset(*region) + region->bytes > (is_last ? step : offset(*(region + 1)))) return false;
  }
  return true;
}

// Whether no byte belongs to two regions, or twice to one. Errs only towards "no": for steps that differ, and for
// regions that begin more than a step apart.
bool disjoint(std::vector<Region> regions) {
  for (Region& region : regions) {
    if (region.count == 1) region.step = 0;  // the stride of a dimension of size 1 means nothing
  }
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (auto first = regions.begin(); first != regions.end();) {
    Address end = first->end();
    auto last = first + 1;
    while (last != regions.end() && last->begin < end) end = std::max(end, (last++)->end());
    const bool single = last - first == 1 && first->count == 1;
    if (!single && !interleave(first, last)) return false;
    first = last;
  }
  return true;
}

std::vector<Region> regions(const std::vector<Piece>& pieces, int64_t num_blocks, bool of_src) {
  std::vector<Region> out;
  if (num_blocks == 0) return out;
  for (const Piece& piece : pieces) {
    out.push_back({of_src ? piece.src : piece.dst, piece.bytes, of_src ? piece.src_step : piece.dst_step, num_blocks});
  }
  return out;
}

bool ranges_meet(const std::vector<Region>& a, const std::vector<Region>& b) {
  auto range = [](const std::vector<Region>& all) {
    Address begin = std::numeric_limits<Address>::max(), end = 0;
    for (const Region& region : all) begin = std::min(begin, region.begin), end = std::max(end, region.end());
    return std::pair(begin, end);
  };
  if (a.empty() || b.empty()) return false;
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

bool are_same(const CacheView& a, const CacheView& b) {
  auto same = [](const LayerView& x, const LayerView& y) { return x.address == y.address && x.strides == y.strides; };
  return std::equal(a.layers.begin(), a.layers.end(), b.layers.begin(), b.layers.end(), same);
}

void check_shape(const BlockShape& shape) {
  check(shape.element_bytes > 0, "element_bytes must be positive, got ", shape.element_bytes);
  int64_t bytes = shape.element_bytes;
  for (const int64_t size : shape.sizes) {
    check(size >= 0, "sizes must not be negative, got ", size);
    check(!__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes), "a block must fit into memory, got sizes of ",
          "2**63 bytes and more");
  }
}

void check_layers(const BlockShape& shape, const CacheView& cache, const char* name) {
  check(cache.num_blocks >= 0 && cache.num_blocks <= std::numeric_limits<int32_t>::max(), name,
        " must have block ids of 31 bits, got ", cache.num_blocks, " blocks");
  for (const LayerView& layer : cache.layers) {
    check(layer.strides.size() == shape.sizes.size(), name, " must have ", shape.sizes.size(), " strides a layer, got ",
          layer.strides.size());
  }
}

// A set of block ids under `num_blocks`, as bits.
class BlockSet {
 public:
  explicit BlockSet(int64_t num_blocks) : words_((num_blocks + 63) / 64) {}
  bool has(int64_t id) const { return words_[id / 64] >> (id % 64) & 1; }
  void add(int64_t id) { words_[id / 64] |= uint64_t{1} << (id % 64); }

 private:
  std::vector<uint64_t> words_;
};

void check_range(int64_t id, int64_t num_blocks, const char* side, int64_t row) {
  check(id >= 0 && id < num_blocks, "block_mapping must name ", side, " blocks in [0, ", num_blocks, "), got ", id,
        " in row ", row);
}

}  // namespace

CopyGeometry::CopyGeometry(const BlockShape& shape, const CacheView& src, const CacheView& dst)
    : num_src_blocks_(src.num_blocks), num_dst_blocks_(dst.num_blocks) {
  check(src.layers.size() == dst.layers.size(), "src and dst must have as many layers, got ", src.layers.size(), " and ",
        dst.layers.size());
  check(shape.block_dim >= 0 && shape.block_dim < static_cast<int>(shape.sizes.size()),
        "block_dim must be a dimension of ", shape.sizes.size(), ", got ", shape.block_dim);
  check_shape(shape);
  check_layers(shape, src, "src");
  check_layers(shape, dst, "dst");
  for (size_t i = 0; i < src.layers.size(); ++i) add_layer(shape, src.layers[i], dst.layers[i], pieces_);
  pieces_ = merge_neighbours(std::move(pieces_));
  for (const Piece& piece : pieces_) {
    block_bytes_ += piece.bytes;
    fills_steps_ &= piece.bytes == piece.src_step && piece.bytes == piece.dst_step;
  }
  check_overlap(src, dst);
}

void CopyGeometry::check_overlap(const CacheView& src, const CacheView& dst) {
  std::vector<Region> sources = regions(pieces_, num_src_blocks_, true);
  const std::vector<Region> targets = regions(pieces_, num_dst_blocks_, false);
  check(disjoint(targets), "dst must not overlap itself: no byte may belong to two blocks or layers");
  if (!ranges_meet(sources, targets)) return;
  same_memory_ = num_src_blocks_ == num_dst_blocks_ && are_same(src, dst);
  if (same_memory_) return;
  sources.insert(sources.end(), targets.begin(), targets.end());
  check(disjoint(std::move(sources)), "src and dst must be the same caches or share no memory, got caches that overlap");
}

CopyPlan::CopyPlan(const CopyGeometry& geometry, const int64_t* pairs, int64_t num_pairs) : geometry_(geometry) {
  read_pairs(pairs, num_pairs);
  merge_runs();
}

void CopyPlan::read_pairs(const int64_t* pairs, int64_t num_pairs) {
  const bool same = geometry_.same_memory();
  BlockSet named(geometry_.num_dst_blocks()), changed(same ? geometry_.num_dst_blocks() : 0);
  check(num_pairs >= 0, "num_pairs must not be negative, got ", num_pairs);
  pairs_.reserve(static_cast<size_t>(std::min(num_pairs, geometry_.num_dst_blocks())));
  for (int64_t row = 0; row < num_pairs; ++row) {
    const int64_t src_id = pairs[2 * row], dst_id = pairs[2 * row + 1];
    check_range(src_id, geometry_.num_src_blocks(), "source", row);
    check_range(dst_id, geometry_.num_dst_blocks(), "destination", row);
    check(!named.has(dst_id), "block_mapping must name each destination once, got ", dst_id, " again in row ", row);
    named.add(dst_id);
    if (same && src_id == dst_id) continue;
    if (same) changed.add(dst_id);
    pairs_.push_back({static_cast<int32_t>(src_id), static_cast<int32_t>(dst_id)});
  }
  if (!same) return;
  for (const BlockPair& pair : pairs_) {
    check(!changed.has(pair.src_id), "block_mapping must not read a block that it also writes, got block ", pair.src_id,
          " on both sides");
  }
}

void CopyPlan::merge_runs() {
  auto before = [](const BlockPair& a, const BlockPair& b) { return a.src_id < b.src_id; };
  if (!std::is_sorted(pairs_.begin(), pairs_.end(), before)) std::stable_sort(pairs_.begin(), pairs_.end(), before);
  runs_.reserve(pairs_.size());
  for (const BlockPair& pair : pairs_) {
    BlockRun* last = runs_.empty() ? nullptr : &runs_.back();
    if (last && geometry_.fills_steps() && pair.src_id == last->src_id + last->count &&
        pair.dst_id == last->dst_id + last->count) {
      ++last->count;
    } else {
      runs_.push_back({pair.src_id, pair.dst_id, 1});
    }
  }
}

}  // namespace kvpage
