// TokenView: token ids in the caller's memory, int32 or int64, contiguous, read in place.
//
// An id outside of 32 bits never equals a stored one and is refused where it would have to be stored. Negative ids
// are ordinary ids.
#pragma once

#include <cstdint>

namespace kvpage {

class TokenView {
 public:
  TokenView(const int32_t* tokens, int64_t size) : narrow_(tokens), size_(size) {}
  TokenView(const int64_t* tokens, int64_t size) : wide_(tokens), size_(size) {}

  int64_t size() const { return size_; }
  TokenView first(int64_t count) const { return wide_ ? TokenView(wide_, count) : TokenView(narrow_, count); }
  TokenView last(int64_t count) const {
    return wide_ ? TokenView(wide_ + size_ - count, count) : TokenView(narrow_ + size_ - count, count);
  }
  int64_t at(int64_t i) const { return wide_ ? wide_[i] : narrow_[i]; }

  // Returns how many tokens from `start` on equal those at `stored`, one after the other, `count` at most.
  int64_t common_prefix(int64_t start, const int32_t* stored, int64_t count) const;

  // Returns the hash of `count` tokens from `start` on, the same for both widths. A caller who does not know the seed
  // cannot aim at collisions. They would cost time only, since tokens are compared as well.
  uint64_t hash(int64_t start, int64_t count, uint64_t seed) const;

  // Throws InvalidArgument if one of the tokens does not fit into 32 bits.
  void check_fits(int64_t start, int64_t count) const;

  // Requires that they fit.
  void copy_to(int64_t start, int64_t count, int32_t* out) const;

 private:
  const int32_t* narrow_ = nullptr;  // one of the two is set, except for an empty view
  const int64_t* wide_ = nullptr;
  int64_t size_;
};

}  // namespace kvpage
