// The system's pwritev, or what a test puts in its place: for LD_PRELOAD. See tests/support/pwritev_hook.py.
#include <dlfcn.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>

namespace {

// As pwritev, but that an error is its negative number.
using Hook = long (*)(int fd, const iovec* runs, int num_runs, long offset);
std::atomic<Hook> hook{nullptr};

}  // namespace

extern "C" void kvpage_test_hook_pwritev(Hook other) { hook = other; }

extern "C" ssize_t pwritev(int fd, const iovec* runs, int num_runs, off_t offset) {
  if (const Hook other = hook) {
    const long done = other(fd, runs, num_runs, offset);
    if (done < 0) errno = static_cast<int>(-done);
    return done < 0 ? -1 : done;
  }
  static const auto real = reinterpret_cast<decltype(&pwritev)>(dlsym(RTLD_NEXT, "pwritev"));
  return real(fd, runs, num_runs, offset);
}
