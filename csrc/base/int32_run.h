// Int32Run: a run of int32 that grows and shrinks at its end, and can be cut in two.
//
//      |  cut off  | the run            |  room  |
//      base        begin                end      capacity
//
// The memory is at most twice the run (and 64 bytes): growing adds half, and shortening gives memory back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace kvpage {

class Int32Run {
 public:
  Int32Run() = default;
  Int32Run(Int32Run&& other) noexcept { swap(other); }
  Int32Run& operator=(Int32Run&& other) noexcept {
    Int32Run taken(std::move(other));
    swap(taken);
    return *this;
  }

  int64_t size() const { return end_ - begin_; }
  int64_t capacity() const { return capacity_; }
  const int32_t* data() const { return base_.get() + begin_; }
  std::span<const int32_t> span() const { return {data(), static_cast<size_t>(size())}; }

  // Makes room for `count` more. Throws std::bad_alloc and leaves the run as it is.
  void reserve(int64_t count) {
    if (end_ + count <= capacity_) return;
    move_to_front();
    if (end_ + count > capacity_) set_capacity(base_ ? std::max(end_ + count, end_ + end_ / 2) : count);
  }

  // Lengthens the run by `count` values, to be written at the address returned. Requires that they were reserved.
  int32_t* extend(int64_t count) {
    int32_t* added = base_.get() + end_;
    end_ += count;
    return added;
  }

  void set(int64_t i, int32_t value) { base_[begin_ + i] = value; }

  void truncate(int64_t size) noexcept {
    end_ = begin_ + size;
    give_back();
  }

  // The two halves of a cut before the value at `at`: copy the smaller one, which may throw, then cut, which does not.
  Int32Run copy_smaller_half(int64_t at) const {
    const auto smaller = at <= size() - at ? span().first(at) : span().subspan(at);
    Int32Run copy;
    copy.reserve(static_cast<int64_t>(smaller.size()));
    std::copy(smaller.begin(), smaller.end(), copy.extend(static_cast<int64_t>(smaller.size())));
    return copy;
  }

  // Keeps the values from `at` on and returns those before it. `copy` is the result of copy_smaller_half(at).
  Int32Run cut_front(int64_t at, Int32Run copy) noexcept {
    if (at <= size() - at) {
      begin_ += at;
    } else {
      end_ = begin_ + at;
      swap(copy);
    }
    give_back();
    copy.give_back();
    return copy;
  }

 private:
  struct Free {
    void operator()(int32_t* p) const { std::free(p); }
  };

  void swap(Int32Run& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(begin_, other.begin_);
    std::swap(end_, other.end_);
    std::swap(capacity_, other.capacity_);
  }

  void move_to_front() noexcept {
    if (begin_ == 0) return;
    std::memmove(base_.get(), data(), static_cast<size_t>(size()) * sizeof(int32_t));
    end_ = size();
    begin_ = 0;
  }

  // realloc, since a large run then moves by its page table and not by its bytes.
  void set_capacity(int64_t capacity) {
    void* moved = std::realloc(base_.get(), static_cast<size_t>(capacity) * sizeof(int32_t));
    if (!moved) throw std::bad_alloc();
    static_cast<void>(base_.release());
    base_.reset(static_cast<int32_t*>(moved));
    capacity_ = capacity;
  }

  void give_back() noexcept {
    if (capacity_ <= 2 * size() + 16) return;
    if (size() == 0) {
      *this = Int32Run();
      return;
    }
    move_to_front();
    try {
      set_capacity(end_);
    } catch (const std::bad_alloc&) {  // keeps what it has
    }
  }

  std::unique_ptr<int32_t[], Free> base_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  int64_t capacity_ = 0;
};

}  // namespace kvpage
