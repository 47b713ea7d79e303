#include "chunks/stretch_writer.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

// The size of a piece. Longer ones leave the second level of cache before they are hashed; shorter ones cost more
// system calls. A file whose pages were first written in pieces cut elsewhere has many small folios: a tenth slower.
constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kGrainBytes = 4 << 20;  // a thread: starting one costs as much as writing a twentieth of it
constexpr size_t kMostVectors = 1024;     // of a system call: IOV_MAX of Linux
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Returns lead and runs, one after the other.
ByteRuns runs_of(const StretchWrite& args) {
  ByteRuns runs(args.num_runs + 1);
  runs.add({args.lead, args.lead_bytes});
  for (int64_t i = 0; i < args.num_runs; ++i) runs.add(args.runs[i]);
  return runs;
}

class StretchWriter {
 public:
  StretchWriter(const StretchWrite& args, int64_t num_stretches, Digest* digests)
      : args_(args), runs_(runs_of(args)), num_stretches_(num_stretches), digests_(digests) {}

  int64_t num_bytes() const { return runs_.end(); }

  // Hashes the stretches [first, last), and writes the pieces from the one where the first begins to the one before
  // that where the last ends: what comes next writes that one.
  void write_and_hash(int64_t first, int64_t last) const {
    const int64_t begin = place_of(first), end = place_of(last);
    const int64_t to = std::min(last == num_stretches_ ? end : cut_before(end), runs_.end() - args_.tail_bytes);
    std::optional<Xxh3> hash;
    int64_t stretch = first;
    for (int64_t at = first == 0 ? 0 : cut_before(begin), next; at < end; at = next) {
      next = std::min(cut_before(at + kPieceBytes), end);
      write(at, std::min(next, to));
      for (int64_t from = std::max(at, begin), until; from < next; from = until) {
        until = std::min(next, place_of(stretch + 1));
        if (!hash) hash.emplace();
        add(*hash, from, until);
        if (until < place_of(stretch + 1)) break;
        digests_[stretch++] = hash->digest();
        hash.reset();
      }
    }
  }

  void copy_tail() const {
    std::byte* to = args_.tail;
    runs_.for_each(runs_.end() - args_.tail_bytes, runs_.end(), [&](const ByteRun& run, int64_t) {
      std::memcpy(to, run.data, static_cast<size_t>(run.num_bytes));
      to += run.num_bytes;
      return true;
    });
  }

 private:
  int64_t place_of(int64_t stretch) const {
    return stretch < num_stretches_ ? args_.lead_bytes + stretch * args_.stretch_bytes : runs_.end();
  }

  // The last place until `place` where a piece begins.
  int64_t cut_before(int64_t place) const { return std::max(place - (args_.offset + place) % kPieceBytes, int64_t{0}); }

  // Meanwhile the beginnings of the next piece's runs are fetched, which no processor would guess.
  void add(Xxh3& hash, int64_t begin, int64_t end) const {
    runs_.for_each(begin, end, [&](const ByteRun& run, int64_t at) {
      hash.update(run.data, run.num_bytes, runs_.run_at(at + kPieceBytes));
      return true;
    });
  }

  void write(int64_t begin, int64_t end) const {
    while (begin < end) {
      const ssize_t count = write_some(begin, end);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) throw std::system_error(count < 0 ? errno : EIO, std::generic_category());
      begin += count;
    }
  }

  // As pwritev.
  ssize_t write_some(int64_t begin, int64_t end) const {
    std::array<iovec, kMostVectors> vectors;
    size_t count = 0;
    runs_.for_each(begin, end, [&](const ByteRun& run, int64_t) {
      vectors[count++] = {const_cast<std::byte*>(run.data), static_cast<size_t>(run.num_bytes)};
      return count < kMostVectors;
    });
    return pwritev(args_.fd, vectors.data(), static_cast<int>(count), args_.offset + begin);
  }

  const StretchWrite& args_;
  const ByteRuns runs_;
  const int64_t num_stretches_;
  Digest* const digests_;
};

}  // namespace

int64_t count_stretches(const StretchWrite& args) {
  check(args.offset >= 0, "offset must not be negative, got ", args.offset);
  check(args.stretch_bytes > 0, "stretch_bytes must be positive, got ", args.stretch_bytes);
  check(args.lead_bytes >= 0 && args.lead_bytes <= kMost - args.offset, "lead_bytes must be in [0, ",
        kMost - args.offset, "], got ", args.lead_bytes);
  const int64_t most = kMost - args.offset - args.lead_bytes - kPieceBytes;
  int64_t num_bytes = 0;
  for (int64_t i = 0; i < args.num_runs; ++i) {
    check(args.runs[i].num_bytes >= 0 && args.runs[i].num_bytes <= most - num_bytes,
          "runs must have lengths that fit a file, got ", args.runs[i].num_bytes);
    num_bytes += args.runs[i].num_bytes;
  }
  check(num_bytes > 0, "runs must have bytes, got none");
  check(args.tail_bytes >= 0 && args.tail_bytes <= num_bytes, "tail_bytes must be in [0, ", num_bytes, "], got ",
        args.tail_bytes);
  return (num_bytes - 1) / args.stretch_bytes + 1;
}

void write_stretches(const StretchWrite& args, Digest* digests) {
  const int64_t num_stretches = count_stretches(args);
  const StretchWriter writer(args, num_stretches, digests);
  parallel_for(num_stretches, useful_threads(writer.num_bytes(), kGrainBytes, args.max_threads),
               [&](int64_t first, int64_t last) { writer.write_and_hash(first, last); });
  writer.copy_tail();
}

}  // namespace kvpage
