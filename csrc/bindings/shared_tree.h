// SharedTree: a tree that threads of Python share. Every PrefixTree of this extension is one.
#pragma once

#include <cstdint>
#include <utility>

#include "bindings/bindings.h"
#include "tree/prefix_tree.h"

namespace kvpage {

// Which calls of one object give the GIL up. A short one keeps it: giving it up and taking it again costs
// threads that all do so several times what the call does. One that may take long gives it up; while one is under way,
// the short ones do so too, since they wait for the same mutex.
class LongCalls {
 public:
  static constexpr int64_t kShort = 4096;       // blocks that are given up or looked at
  static constexpr int64_t kShortWalk = 32768;  // sixteenths of tokens, and blocks, that are compared: 0.1 ms mostly

  // Returns the cost, for `run`, of finding or caching so many tokens.
  static int64_t walk_cost(int64_t num_tokens, int64_t block_size) {
    return (num_tokens / 16 + num_tokens / block_size) / (kShortWalk / kShort);
  }

  template <typename Call>
  auto run(int64_t cost, Call call) {
    if (cost < kShort && num_under_way_ == 0) return call();
    const UnderWay counted(cost < kShort ? nullptr : &num_under_way_);
    py::gil_scoped_release released;
    return call();
  }

 private:
  // Ends after the GIL was taken again.
  struct UnderWay {
    explicit UnderWay(int64_t* num) : num_(num) {
      if (num_) ++*num_;
    }
    ~UnderWay() {
      if (num_) --*num_;
    }
    UnderWay(const UnderWay&) = delete;
    UnderWay& operator=(const UnderWay&) = delete;
    int64_t* num_;
  };

  int64_t num_under_way_ = 0;  // long ones; guarded by the GIL
};

class SharedTree final : public PrefixTree {
 public:
  using PrefixTree::PrefixTree;

  template <typename Call>
  auto run(int64_t cost, Call call) {
    return calls_.run(cost, std::move(call));
  }

  // A call that compares tokens with cached ones.
  template <typename Call>
  auto walk(int64_t num_tokens, Call call) {
    return calls_.run(LongCalls::walk_cost(num_tokens, block_size()), std::move(call));
  }

 private:
  LongCalls calls_;
};

inline constexpr int64_t kQuick = 0;
inline constexpr int64_t kLong = LongCalls::kShort;

// Returns the C++ object of one that pybind11 has made.
template <typename T>
T& held_by(const py::object& object) {
  return *reinterpret_cast<py::detail::instance*>(object.ptr())->get_value_and_holder().value_ptr<T>();
}

// Returns the match that `call` returns, in an object that is made before the call.
template <typename Call>
py::object new_match(Call call) {
  py::object match = py::cast(Match());
  held_by<Match>(match) = call();
  return match;
}

}  // namespace kvpage
