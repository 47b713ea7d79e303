// Allocations: which requests of the library for memory fail. It is up to who replaces the allocator
// (failing_allocator) to ask; what the experiment itself requests, outside of CountedAllocations, is neither counted
// nor refused.
#pragma once

#include <cstdint>

struct Allocations {
  int64_t num_requests = 0;    // made while counted
  int64_t first_failing = 0;   // from 1; 0: none
  bool keeps_failing = false;  // with the first also all later ones of the same call

  bool has_failed = false;  // one that its caller swallowed, and that was not about giving memory back
  bool has_failed_to_shrink = false;

  // Whether the request that is being made has to fail.
  static bool refuses();
  static Allocations& of_this_thread();
};

class CountedAllocations {
 public:
  CountedAllocations();
  ~CountedAllocations();
  CountedAllocations(const CountedAllocations&) = delete;
  CountedAllocations& operator=(const CountedAllocations&) = delete;
};
