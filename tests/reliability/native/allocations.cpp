#include "allocations.h"

namespace {

thread_local bool is_counted = false;
thread_local bool is_failing = false;

}  // namespace

bool Allocations::refuses() {
  if (!is_counted) return false;
  Allocations& all = of_this_thread();
  if (++all.num_requests != all.first_failing) return is_failing;
  is_failing = all.keeps_failing;
  return true;
}

Allocations& Allocations::of_this_thread() {
  static thread_local Allocations all;
  return all;
}

CountedAllocations::CountedAllocations() { is_counted = true; }
CountedAllocations::~CountedAllocations() { is_counted = is_failing = false; }
