// read_stretches: bytes from one run of a file to many places of memory, each stretch hashed on the way.
//
//   file     [ piece     | piece     | piece     | pie.. ]     read into room that a core's cache keeps
//   memory   [ run | run | run | run | run | run | run ]       a run at address null: its bytes are not wanted
//   digests  [ stretch   | stretch   | stretch   | str.. ]     xxh3-128 each, the last may be shorter
#pragma once

#include <cstdint>
#include <system_error>

#include "chunks/byte_runs.h"
#include "hash/xxh3.h"

namespace kvpage {

// runs: they are written past the processor's cache. room: for pieces, shared by `max_threads`. Owns nothing.
struct StretchRead {
  int fd;
  int64_t offset;
  const ByteRun* runs;
  int64_t num_runs;
  int64_t stretch_bytes;
  std::byte* room;
  int64_t room_bytes;
  int max_threads;
};

// Returns the number of stretches of the runs. Throws InvalidArgument unless lengths and the offset are not negative,
// stretch_bytes is positive, there is room, and all of it fits into a file at that offset.
int64_t count_stretches(const StretchRead& args);

// digests: as many; the caller compares them afterwards. Goes on after short reads. Throws InvalidArgument as above,
// before anything is written, and std::system_error for an error of the file, ENODATA where it ends too early: then any
// of the bytes may have been written.
void read_stretches(const StretchRead& args, Digest* digests);

}  // namespace kvpage
