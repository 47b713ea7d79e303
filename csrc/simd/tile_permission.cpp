#include "simd/tile_permission.h"

#include <cerrno>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvpage {
namespace {

#if defined(__x86_64__) && defined(__linux__)
// Whether the system saves both the shapes and the contents of tiles when it switches threads: bits 17 and 18 of XCR0.
bool saves_tiles() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx >> 27 & 1u) == 0) return false;  // OSXSAVE: there is XGETBV
  unsigned int low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3u) == 3u;
}

std::string ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (!saves_tiles()) return "the system does not save tiles";
  const int before = errno;
  const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  const std::string reason = is_granted ? "" : std::string("the system does not permit tiles: ") + std::strerror(errno);
  errno = before;
  return reason;
}
#else
std::string ask_for_tiles() { return "tiles are asked for on Linux alone"; }
#endif

}  // namespace

std::string tile_refusal() {
  static const std::string reason = ask_for_tiles();
  return reason;
}

}  // namespace kvpage
