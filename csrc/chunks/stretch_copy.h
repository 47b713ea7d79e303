// gather_stretches, scatter_stretches: bytes between many places of memory and one, each stretch hashed on the way.
//
//   memory     [ run | run | run | run | run | run ]      a run at address null: its bytes are not wanted
//                        │ gather      ▲ scatter
//   payload    [ stretch   | stretch   | str.. ]          xxh3-128 each, the last may be shorter
//
// Each byte is read once.
#pragma once

#include <cstdint>

#include "chunks/byte_runs.h"
#include "hash/xxh3.h"

namespace kvpage {

// runs: together as long as the payload. `max_threads` share the stretches. `streaming`: writes go past the processor's
// cache. Owns nothing.
struct StretchCopy {
  const ByteRun* runs;
  int64_t num_runs;
  std::byte* payload;
  int64_t num_bytes, stretch_bytes;
  int max_threads;
  bool streaming;
};

// Returns the number of stretches. Throws InvalidArgument unless stretch_bytes is positive, and the runs have lengths
// that are not negative and make up the payload.
int64_t count_stretches(const StretchCopy& args);

// Fill in as many digests. Throw InvalidArgument as above, before anything is written. gather_stretches throws it for a
// run at address null, too. scatter_stretches writes to the runs; the caller compares the digests afterwards.
void gather_stretches(const StretchCopy& args, Digest* digests);
void scatter_stretches(const StretchCopy& args, Digest* digests);

}  // namespace kvpage
