// Trial: what the experiments on the core have in common: numbers from a seed, expectations, and calls of the library
// that are counted, and in the experiment on memory made to fail.
#pragma once

#include <cstdint>
#include <map>
#include <new>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocations.h"
#include "base/check.h"

// splitmix64: the same numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T>
  T& one_of(std::vector<T>& values) {
    return values[static_cast<size_t>(below(static_cast<int64_t>(values.size())))];
  }

 private:
  uint64_t state_;
};

template <typename... Parts>
void expect(bool holds, const Parts&... parts) {
  if (holds) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::logic_error(message.str());
}

using Figures = std::map<std::string, int64_t>;

inline std::string figures_json(const Figures& figures) {
  std::ostringstream json;
  json << "{";
  for (const char* separator = ""; const auto& [name, value] : figures) {
    json << separator << '"' << name << "\": " << value;
    separator = ", ";
  }
  json << "}";
  return json.str();
}

// What a call of the library came to.
enum class Outcome { kDone, kRefused, kOutOfBlocks };

template <typename Call>
Outcome outcome_of(const Call& call) {
  try {
    call();
  } catch (const kvpage::InvalidArgument&) {
    return Outcome::kRefused;
  } catch (const kvpage::OutOfBlocks&) {
    return Outcome::kOutOfBlocks;
  }
  return Outcome::kDone;
}

// One random life of a structure beside its model. A subclass chooses an operation and does it to both.
class Life {
 public:
  Life(uint64_t seed, Figures* figures) : rng(seed), figures_(figures) {}
  virtual ~Life() = default;

  virtual void step() = 0;

  // Everything that can be seen of the real structure equals the model's, and its own check passes.
  virtual void compare() = 0;

  // Gives everything back; nothing may be left.
  virtual void end() = 0;

  // After an allocation failed and nobody was told: the model does not know what was given up for it. Expects what must
  // hold whatever it was.
  virtual void end_without_model() { end(); }

 protected:
  // The library's call, again after each failure of memory, which must have changed nothing.
  template <typename Call>
  auto call(const Call& library) {
    for (;;) {
      try {
        const CountedAllocations counted;
        return library();
      } catch (const std::bad_alloc&) {
        Allocations::of_this_thread().has_failed = false;  // whoever called has been told
        ++(*figures_)["refused_for_memory"];
        compare();
      }
    }
  }

  template <typename Call>
  Outcome outcome(const Call& library) {
    const Outcome found = call([&] { return outcome_of(library); });
    if (found != Outcome::kDone) ++(*figures_)["refused"];
    return found;
  }

  Random rng;

 private:
  Figures* figures_;
};
