// write_stretches: bytes from many places of memory to one run of a file, each stretch hashed on the way.
//
//   memory     lead    [ run | run | run | run | run | run | run | run ]
//                                                                 ▼ tail: to memory, not to the file
//   file     ..[ lead | run bytes ................................|.........
//               │ piece     │ piece     │ piece     │ piece     │            cut where the file's offset is a multiple
//   digests           [ stretch   | stretch   | stretch   | str.. ]          xxh3-128 each, the last may be shorter
//
// A piece is written, then hashed, while the processor's cache has it: memory is read once. (The other order measured a
// tenth slower: a hash waits for memory; the copy of the operating system waits for its own destination anyway.) Bytes
// that change meanwhile may be written in one state and hashed in another. Then the digest is wrong, and readers see
// it.
#pragma once

#include <cstdint>
#include <system_error>

#include "chunks/byte_runs.h"
#include "hash/xxh3.h"

namespace kvpage {

// fd: a file that can be written at an offset. offset: the lead's first byte in the file. tail: memory for the last
// `tail_bytes` of the runs; it may be the lead's. `max_threads` share the stretches. Owns nothing.
struct StretchWrite {
  int fd;
  int64_t offset;
  const std::byte* lead;
  int64_t lead_bytes;
  const ByteRun* runs;
  int64_t num_runs;
  int64_t stretch_bytes;
  std::byte* tail;
  int64_t tail_bytes;
  int max_threads;
};

// Returns the number of stretches of the runs. Throws InvalidArgument unless lengths are not negative, stretch_bytes is
// positive, the runs have bytes, the tail has no more, and all of it fits into a file at that offset.
int64_t count_stretches(const StretchWrite& args);

// digests: as many. Goes on after short writes. Throws InvalidArgument as above, before anything is written, and
// std::system_error for an error of the file: then any of the bytes may have been written, and the tail is untouched.
void write_stretches(const StretchWrite& args, Digest* digests);

}  // namespace kvpage
