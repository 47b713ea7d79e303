// core SEED NUM_OPERATIONS: random lives of the core's structures beside naive models. Prints figures as JSON; says
// what went wrong, with kind, seed and step, and exits with 1.
#include <cstdlib>
#include <exception>
#include <iostream>

#include "lives.h"

namespace {

void live(const Kind& kind, uint64_t seed, int64_t num_steps, int64_t check_every, Figures* figures) {
  int64_t step = 0;
  try {
    const std::unique_ptr<Life> life = kind.make(seed, figures);
    for (; step < num_steps; ++step) {
      life->step();
      if (step % check_every == 0) life->compare();
    }
    life->compare();
    life->end();
  } catch (const std::exception& error) {
    std::cerr << kind.name << ", seed " << seed << ", step " << step << ": " << error.what() << std::endl;
    std::exit(1);
  }
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10) << 32;
  const int64_t num_operations = std::atoll(arguments[2]);
  Figures figures;
  for (const Kind& kind : all_kinds()) {
    const int64_t share = num_operations * kind.per_thousand / 1000;
    for (int64_t done = 0, life = 0; done < share; done += kind.num_steps, ++life) {
      const int64_t num_steps = std::min(kind.num_steps, share - done);
      live(kind, seed + static_cast<uint64_t>(life), num_steps, life % 64 == 63 ? 1 : kind.check_every, &figures);
    }
    figures[std::string(kind.name) + "_operations"] = share;
  }
  std::cout << figures_json(figures) << std::endl;
}
