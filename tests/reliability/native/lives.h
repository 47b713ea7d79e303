// All kinds of lives, made from a seed.
#pragma once

#include <memory>
#include <span>

#include "trial.h"

struct Kind {
  const char* name;
  int64_t per_thousand;  // of the operations
  int64_t num_steps;     // of one life
  int64_t check_every;   // steps between comparisons of everything; every 64th life compares after each
  std::unique_ptr<Life> (*make)(uint64_t seed, Figures* figures);
};

std::span<const Kind> all_kinds();
