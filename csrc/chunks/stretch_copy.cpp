#include "chunks/stretch_copy.h"

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // a thread: starting one costs as much as copying a fifth of it

// move(hash, run, its bytes in the payload, the beginning of the next run): in the order of the payload.
template <typename Move>
void for_each_stretch(const StretchCopy& args, Digest* digests, const Move& move) {
  const int64_t num_stretches = count_stretches(args);
  ByteRuns runs(args.num_runs);
  for (int64_t i = 0; i < args.num_runs; ++i) runs.add(args.runs[i]);
  const int num_threads = useful_threads(args.num_bytes, kGrainBytes, args.max_threads);
  parallel_for(num_stretches, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i * args.stretch_bytes, end = std::min(begin + args.stretch_bytes, args.num_bytes);
      Xxh3 hash;
      runs.for_each(begin, end, [&](const ByteRun& run, int64_t at) {
        move(hash, run, args.payload + at, runs.run_at(at + run.num_bytes));
        return true;
      });
      digests[i] = hash.digest();
    }
    if (args.streaming) end_streaming();
  });
}

}  // namespace

int64_t count_stretches(const StretchCopy& args) {
  check(args.stretch_bytes > 0, "stretch_bytes must be positive, got ", args.stretch_bytes);
  check(args.num_bytes >= 0, "num_bytes must not be negative, got ", args.num_bytes);
  int64_t num_left = args.num_bytes;
  for (int64_t i = 0; i < args.num_runs; ++i) {
    check(args.runs[i].num_bytes >= 0 && args.runs[i].num_bytes <= num_left,
          "runs must have lengths that make up the payload, got ", args.runs[i].num_bytes);
    num_left -= args.runs[i].num_bytes;
  }
  check(num_left == 0, "runs must be as long as the payload, ", num_left, " bytes are missing");
  return args.num_bytes / args.stretch_bytes + (args.num_bytes % args.stretch_bytes != 0);
}

void gather_stretches(const StretchCopy& args, Digest* digests) {
  for (int64_t i = 0; i < args.num_runs; ++i)
    check(args.runs[i].data || args.runs[i].num_bytes == 0, "runs must have addresses, got 0");
  for_each_stretch(args, digests, [&](Xxh3& hash, const ByteRun& run, std::byte* to, const std::byte* next) {
    hash.update_and_copy(run.data, run.num_bytes, to, args.streaming, next);
  });
}

void scatter_stretches(const StretchCopy& args, Digest* digests) {
  for_each_stretch(args, digests, [&](Xxh3& hash, const ByteRun& run, const std::byte* data, const std::byte*) {
    const std::byte* const next = data + run.num_bytes;
    if (run.data) {
      hash.update_and_copy(data, run.num_bytes, const_cast<std::byte*>(run.data), args.streaming, next);
    } else {
      hash.update(data, run.num_bytes, next);
    }
  });
}

}  // namespace kvpage
