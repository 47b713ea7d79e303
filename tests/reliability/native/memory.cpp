// memory SEED NUM_FAILURES: random lives in which one allocation fails, each in turn, alone or with all that follow it
// in the same call, until so many have failed. A call that throws has changed nothing, and succeeds when it is made
// again; where a failure is swallowed, what is found later is what was written, and nothing is lost. Prints figures as
// JSON.
#include <cstdlib>
#include <exception>
#include <iostream>

#include "lives.h"

namespace {

constexpr int64_t kNumSteps = 150;

// Returns how many allocations were asked for.
int64_t live(const Kind& kind, uint64_t seed, int64_t failing, bool keeps_failing, Figures* figures) {
  Allocations& all = Allocations::of_this_thread();
  all = Allocations();
  all.first_failing = failing;
  all.keeps_failing = keeps_failing;
  int64_t step = 0;
  try {
    const std::unique_ptr<Life> life = kind.make(seed, figures);
    for (; step < kNumSteps && !all.has_failed; ++step) {
      life->step();
      if (failing > 0 && all.num_requests >= failing && !all.has_failed && step % 8 == 0) life->compare();
    }
    if (!all.has_failed) life->compare();
    (*figures)["swallowed"] += all.has_failed;
    all.has_failed ? life->end_without_model() : life->end();
  } catch (const std::exception& error) {
    std::cerr << kind.name << ", seed " << seed << ", failure of allocation " << failing
              << (keeps_failing ? " and all later ones" : "") << ", step " << step << ": " << error.what() << std::endl;
    std::exit(1);
  }
  return all.num_requests;
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10) << 32;
  const int64_t num_failures = std::atoll(arguments[2]);
  Figures figures;
  const auto num_kinds = static_cast<int64_t>(all_kinds().size());
  for (const Kind& kind : all_kinds()) {  // an equal share each
    int64_t left = (num_failures + num_kinds - 1) / num_kinds;
    for (uint64_t round = 0; left > 0; ++round) {
      const int64_t num_requests = live(kind, seed + round, 0, false, &figures);
      for (int64_t failing = 1; failing <= num_requests && left > 0; ++failing, --left) {
        live(kind, seed + round, failing, failing % 2 == 0, &figures);
        ++figures["failures"];
      }
    }
  }
  std::cout << figures_json(figures) << std::endl;
}
