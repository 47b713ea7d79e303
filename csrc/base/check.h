// check: the one way to report a caller's mistake. It throws InvalidArgument.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace kvpage {

// A caller's mistake. Reaches Python as ValueError. A call that throws it has changed nothing.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Raised when a pool lacks blocks. Reaches Python as kvpage.OutOfBlocks(needed, free). Nothing has been changed.
struct OutOfBlocks : std::runtime_error {
  OutOfBlocks(size_t needed_, size_t free_)
      : std::runtime_error("needed " + std::to_string(needed_) + " blocks, " + std::to_string(free_) + " are free"),
        needed(needed_),
        free(free_) {}
  size_t needed, free;
};

// The same of state slots. Reaches Python as kvpage.OutOfSlots.
struct OutOfSlots : OutOfBlocks {
  using OutOfBlocks::OutOfBlocks;
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw InvalidArgument(message.str());
}

// check(n > 0, "block_size must be positive, got ", n): the parts are formatted only on failure.
template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail(parts...);
}

}  // namespace kvpage
