// ExtentArrays: the extents of a plan as a batched copy takes them, three arrays side by side.
//
//   bases, of the fragments         dst 0   dst 1   dst 2 ...      the same for every run of blocks
//   + an offset, of the run         dst_id * step                  one addition an extent where all steps are equal
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copy/plan/copy_plan.h"

namespace kvpage {

// At most `capacity` extents at once. The memory is kept for the next plan: fresh memory would cost more than filling
// it.
class ExtentArrays {
 public:
  explicit ExtentArrays(size_t capacity) : capacity_(capacity) {}

  Address* dsts() { return dsts_.data(); }
  Address* srcs() { return srcs_.data(); }
  size_t* sizes() { return sizes_.data(); }
  size_t count() const { return count_; }

  // Calls flush() whenever the arrays are full, and for the rest at the end. The order is that of CopyPlan::for_each.
  template <typename Flush>
  void fill(const CopyPlan& plan, const Flush& flush) {
    const std::vector<Fragment>& fragments = plan.geometry().fragments();
    read_bases(fragments);
    reserve(std::min<size_t>(plan.num_extents(), capacity_));
    count_ = 0;
    for (const BlockRun& run : plan.runs()) {
      for (size_t first = 0; first < fragments.size();) {
        const size_t num = std::min(fragments.size() - first, capacity_ - count_);
        add(fragments, run, first, num);
        first += num, count_ += num;
        if (count_ == capacity_) flush(), count_ = 0;
      }
    }
    if (count_ > 0) flush();
  }

 private:
  void reserve(size_t count) {
    if (dsts_.size() < count) dsts_.resize(count), srcs_.resize(count), sizes_.resize(count);
  }

  void read_bases(const std::vector<Fragment>& fragments) {
    dst_bases_.clear(), src_bases_.clear(), bytes_.clear();
    same_steps_ = true;
    for (const Fragment& fragment : fragments) {
      dst_bases_.push_back(fragment.dst), src_bases_.push_back(fragment.src);
      bytes_.push_back(static_cast<size_t>(fragment.bytes));
      same_steps_ &= fragment.dst_step == fragments[0].dst_step && fragment.src_step == fragments[0].src_step;
    }
  }

  // Adds the fragments [first, first + num) of a run.
  void add(const std::vector<Fragment>& fragments, const BlockRun& run, size_t first, size_t num) {
    Address *dsts = dsts_.data() + count_, *srcs = srcs_.data() + count_;
    size_t* sizes = sizes_.data() + count_;
    if (same_steps_) {
      const Address dst = run.dst_id * fragments[0].dst_step, src = run.src_id * fragments[0].src_step;
      for (size_t i = 0; i < num; ++i) dsts[i] = dst_bases_[first + i] + dst;
      for (size_t i = 0; i < num; ++i) srcs[i] = src_bases_[first + i] + src;
    } else {
      for (size_t i = 0; i < num; ++i) {
        const Fragment& fragment = fragments[first + i];
        dsts[i] = fragment.dst + run.dst_id * fragment.dst_step;
        srcs[i] = fragment.src + run.src_id * fragment.src_step;
      }
    }
    for (size_t i = 0; i < num; ++i) sizes[i] = bytes_[first + i] * static_cast<size_t>(run.count);
  }

  size_t capacity_, count_ = 0;
  std::vector<Address> dsts_, srcs_, dst_bases_, src_bases_;
  std::vector<size_t> sizes_, bytes_;
  bool same_steps_ = true;
};

}  // namespace kvpage
