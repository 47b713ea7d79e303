// Which mutant is chosen: by KVPAGE_MUTANT, or from Python by kvpage_choose_mutant.
#include "mutants.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mutants {

volatile char reached[kMost];

namespace {

int from_environment() {
  const char* text = std::getenv("KVPAGE_MUTANT");
  return text ? std::atoi(text) : -1;
}

// Of a program: which mutants it reached goes where KVPAGE_REACHED says.
[[maybe_unused]] const int at_end = std::atexit([] {
  const char* place = std::getenv("KVPAGE_REACHED");
  if (!place) return;
  if (FILE* file = std::fopen(place, "wb")) {
    std::fwrite(const_cast<const char*>(reached), 1, kMost, file);
    std::fclose(file);
  }
});

}  // namespace

volatile int chosen = from_environment();

}  // namespace mutants

extern "C" {
[[gnu::visibility("default")]] void kvpage_choose_mutant(int id) { mutants::chosen = id; }
[[gnu::visibility("default")]] void kvpage_forget_reached() {
  std::memset(const_cast<char*>(mutants::reached), 0, mutants::kMost);
}
[[gnu::visibility("default")]] const char* kvpage_reached() { return const_cast<const char*>(mutants::reached); }
}
