// StretchHash: digests of stretches whose bytes come in parts, one after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "hash/xxh3.h"

namespace kvpage {

class StretchHash {
 public:
  // `digests` has room for each stretch of `stretch_bytes` that comes.
  StretchHash(int64_t stretch_bytes, Digest* digests) : stretch_bytes_(stretch_bytes), digests_(digests) {}

  void update(const std::byte* data, int64_t num_bytes) {
    for_each_part(num_bytes, [&](int64_t begin, int64_t count) { hash_->update(data + begin, count); });
  }

  // As Xxh3::update_and_copy.
  void update_and_copy(const std::byte* data, int64_t num_bytes, std::byte* to, bool streaming, const std::byte* next) {
    for_each_part(num_bytes, [&](int64_t begin, int64_t count) {
      const std::byte* const after = begin + count == num_bytes ? next : data + begin + count;
      hash_->update_and_copy(data + begin, count, to + begin, streaming, after);
    });
  }

 private:
  // body(first byte, number of bytes): the bytes of each stretch.
  template <typename Body>
  void for_each_part(int64_t num_bytes, const Body& body) {
    for (int64_t begin = 0; begin < num_bytes;) {
      const int64_t count = std::min(num_bytes - begin, stretch_bytes_ - num_hashed_);
      body(begin, count);
      begin += count;
      num_hashed_ += count;
      if (num_hashed_ == stretch_bytes_) end_stretch();
    }
  }

  void end_stretch() {
    *digests_++ = hash_->digest();
    hash_.emplace();
    num_hashed_ = 0;
  }

  std::optional<Xxh3> hash_{std::in_place};  // made anew for each stretch
  int64_t stretch_bytes_, num_hashed_ = 0;
  Digest* digests_;
};

}  // namespace kvpage
