#include "chunks/stretch_reader.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <optional>

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 4 << 20;   // a thread: starting one costs as much as reading a twentieth of it
constexpr int64_t kLeastRoom = 64 << 10;   // of a thread: smaller pieces cost more system calls
constexpr int64_t kMostRoom = 512 << 10;   // of a thread: longer pieces leave the second level of cache
constexpr int64_t kPartsPerThread = 8;     // threads take them as they come
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

class StretchReader {
 public:
  StretchReader(const StretchRead& args, int64_t num_stretches, Digest* digests)
      : args_(args), runs_(args.num_runs), num_stretches_(num_stretches), digests_(digests) {
    for (int64_t i = 0; i < args.num_runs; ++i) runs_.add(args.runs[i]);
  }

  void run() const {
    const int64_t most = std::min<int64_t>(args_.max_threads, std::max<int64_t>(args_.room_bytes / kLeastRoom, 1));
    const int num_threads = useful_threads(runs_.end(), kGrainBytes, static_cast<int>(most));
    const int64_t num_parts = num_threads == 1 ? 1 : std::min(num_stretches_, kPartsPerThread * num_threads);
    const int64_t share_bytes = args_.room_bytes / num_threads, room_bytes = std::min(share_bytes, kMostRoom);
    std::atomic<int64_t> next = 0;
    run_shares(num_threads, [&](int share) {
      for (int64_t part = next++; part < num_parts; part = next++)
        read_and_hash(num_stretches_ * part / num_parts, num_stretches_ * (part + 1) / num_parts,
                      args_.room + share * share_bytes, room_bytes);
      end_streaming();
    });
  }

 private:
  void read_and_hash(int64_t first, int64_t last, std::byte* room, int64_t room_bytes) const {
    std::optional<Xxh3> hash;
    const int64_t end = place_of(last);
    for (int64_t at = place_of(first), next, stretch = first; at < end; at = next) {
      next = std::min(at + room_bytes, end);
      read(room, next - at, args_.offset + at);
      for (int64_t from = at, until; from < next; from = until) {
        until = std::min(next, place_of(stretch + 1));
        if (!hash) hash.emplace();
        take(*hash, room + (from - at), from, until);
        if (until < place_of(stretch + 1)) break;
        digests_[stretch++] = hash->digest();
        hash.reset();
      }
    }
  }

  void take(Xxh3& hash, const std::byte* data, int64_t begin, int64_t end) const {
    runs_.for_each(begin, end, [&](const ByteRun& run, int64_t) {
      if (run.data) {
        hash.update_and_copy(data, run.num_bytes, const_cast<std::byte*>(run.data), true, data + run.num_bytes);
      } else {
        hash.update(data, run.num_bytes, data + run.num_bytes);
      }
      data += run.num_bytes;
      return true;
    });
  }

  void read(std::byte* to, int64_t num_bytes, int64_t offset) const {
    while (num_bytes > 0) {
      const ssize_t count = pread(args_.fd, to, static_cast<size_t>(num_bytes), offset);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) throw std::system_error(count < 0 ? errno : ENODATA, std::generic_category());
      to += count, num_bytes -= count, offset += count;
    }
  }

  int64_t place_of(int64_t stretch) const {
    return stretch < num_stretches_ ? stretch * args_.stretch_bytes : runs_.end();
  }

  const StretchRead& args_;
  ByteRuns runs_;
  const int64_t num_stretches_;
  Digest* const digests_;
};

}  // namespace

int64_t count_stretches(const StretchRead& args) {
  check(args.offset >= 0, "offset must not be negative, got ", args.offset);
  check(args.stretch_bytes > 0, "stretch_bytes must be positive, got ", args.stretch_bytes);
  check(args.room_bytes > 0, "room must have bytes, got none");
  int64_t num_bytes = 0;
  for (int64_t i = 0; i < args.num_runs; ++i) {
    check(args.runs[i].num_bytes >= 0 && args.runs[i].num_bytes <= kMost - args.offset - args.stretch_bytes - num_bytes,
          "runs must have lengths that fit a file, got ", args.runs[i].num_bytes);
    num_bytes += args.runs[i].num_bytes;
  }
  return num_bytes / args.stretch_bytes + (num_bytes % args.stretch_bytes != 0);
}

void read_stretches(const StretchRead& args, Digest* digests) {
  const int64_t num_stretches = count_stretches(args);
  if (num_stretches > 0) StretchReader(args, num_stretches, digests).run();
}

}  // namespace kvpage
