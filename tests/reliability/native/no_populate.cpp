// A library to be loaded before a program: a kernel that cannot populate pages, as those before Linux 5.14.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

extern "C" int madvise(void* address, size_t length, int advice) noexcept {
  constexpr int kPopulateWrite = 23;
  if (advice != kPopulateWrite) return static_cast<int>(syscall(SYS_madvise, address, length, advice));
  errno = EINVAL;
  return -1;
}
