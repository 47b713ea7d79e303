// What instrumented sources call: every mutant is compiled in, and at most one is chosen at run time.
//
//      a < b      a < Compare<7, ...>() < b       (a < Compare) is a Half, which remembers a; Half < b decides
//      x += y     x += Negate<8>() += y           from right to left: Negate += y is y or -y
//      !x         Not<9>() ->* x                  binds closer than all other binary operators
//
// so that no operand has to be found in the text.
#pragma once

#include <unistd.h>

#include <concepts>
#include <type_traits>
#include <utility>

namespace mutants {

constexpr int kMost = 8192;
constexpr int kNoSuchMutant = 77;  // the exit status of a process whose mutant means nothing for the types at hand

extern volatile int chosen;
extern volatile char reached[kMost];

inline bool is(int id) {
  reached[id] = 1;
  return chosen == id;
}

[[noreturn]] inline void no_such() { _exit(kNoSuchMutant); }

template <int kFirst>
struct Operator {};

template <typename T, int kFirst>
struct Half {
  const T& left;
};

// (T o Operator) o U, where the mutants kFirst, kFirst + 1, ... are other operators.
#define MUTANTS_HALF(op)                                         \
  template <typename T, int kFirst>                              \
  Half<T, kFirst> operator op(const T& left, Operator<kFirst>) { \
    return {left};                                               \
  }
#define MUTANTS_OTHER(offset, other)                                          \
  if (is(kFirst + offset)) {                                                  \
    if constexpr (requires {                                                  \
                    { half.left other right } -> std::convertible_to<Result>; \
                  }) {                                                        \
      return static_cast<Result>(half.left other right);                      \
    } else {                                                                  \
      no_such();                                                              \
    }                                                                         \
  }
#define MUTANTS_OPERATOR(op, others)                           \
  MUTANTS_HALF(op)                                             \
  template <typename T, int kFirst, typename U>                \
  auto operator op(Half<T, kFirst> half, const U& right) {     \
    using Result = std::decay_t<decltype(half.left op right)>; \
    others;                                                    \
    return static_cast<Result>(half.left op right);            \
  }

MUTANTS_OPERATOR(<, MUTANTS_OTHER(0, <=) MUTANTS_OTHER(1, >=))
MUTANTS_OPERATOR(<=, MUTANTS_OTHER(0, <) MUTANTS_OTHER(1, >))
MUTANTS_OPERATOR(>, MUTANTS_OTHER(0, >=) MUTANTS_OTHER(1, <=))
MUTANTS_OPERATOR(>=, MUTANTS_OTHER(0, >) MUTANTS_OTHER(1, <))
MUTANTS_OPERATOR(==, MUTANTS_OTHER(0, !=))
MUTANTS_OPERATOR(!=, MUTANTS_OTHER(0, ==))
MUTANTS_OPERATOR(+, MUTANTS_OTHER(0, -))
MUTANTS_OPERATOR(-, MUTANTS_OTHER(0, +))
MUTANTS_OPERATOR(*, MUTANTS_OTHER(0, /))
MUTANTS_OPERATOR(/, MUTANTS_OTHER(0, *))
MUTANTS_OPERATOR(%, MUTANTS_OTHER(0, /))
MUTANTS_OPERATOR(<<, MUTANTS_OTHER(0, >>))
MUTANTS_OPERATOR(>>, MUTANTS_OTHER(0, <<))
MUTANTS_OPERATOR(&, MUTANTS_OTHER(0, |))
MUTANTS_OPERATOR(|, MUTANTS_OTHER(0, &))

template <int kId>
struct Negate {};
template <int kId, typename T>
auto operator+=(Negate<kId>, const T& value) {
  return is(kId) ? -value : +value;
}
template <int kId, typename T>
auto operator-=(Negate<kId>, const T& value) {
  return is(kId) ? -value : +value;
}

template <int kId>
struct Not {};
template <int kId, typename T>
bool operator->*(Not<kId>, const T& value) {
  return is(kId) ? static_cast<bool>(value) : !value;
}

template <int kId>
struct Increment {};
template <int kId, typename T>
T& operator->*(Increment<kId>, T& value) {
  return is(kId) ? --value : ++value;
}
template <int kId>
struct Decrement {};
template <int kId, typename T>
T& operator->*(Decrement<kId>, T& value) {
  return is(kId) ? ++value : --value;
}

template <int kId, typename T = void, typename A, typename B>
auto min(const A& a, const B& b) {
  using Result = std::conditional_t<std::is_void_v<T>, A, T>;
  const Result left = a, right = b;
  return is(kId) == (right < left) ? left : right;
}
template <int kId, typename T = void, typename A, typename B>
auto max(const A& a, const B& b) {
  using Result = std::conditional_t<std::is_void_v<T>, A, T>;
  const Result left = a, right = b;
  return is(kId) == (left < right) ? left : right;
}

}  // namespace mutants

using mutants::operator<, mutants::operator<=, mutants::operator>, mutants::operator>=, mutants::operator==,
    mutants::operator!=, mutants::operator+, mutants::operator-, mutants::operator*, mutants::operator/,
    mutants::operator%, mutants::operator<<, mutants::operator>>, mutants::operator&, mutants::operator|;
