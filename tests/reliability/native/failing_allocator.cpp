// operator new, and realloc of the objects that are linked with --wrap=realloc (Int32Run), as Allocations wants them.
#include <malloc.h>

#include <cstddef>
#include <cstdlib>
#include <new>

#include "allocations.h"

namespace {

// Int32Run gives back more than this. Without a sanitizer, up to 23 bytes more are usable than were asked for.
constexpr std::size_t kLeastShrink = 64;

void* allocate(std::size_t size, std::size_t alignment) {
  if (Allocations::refuses()) {
    Allocations::of_this_thread().has_failed = true;
    throw std::bad_alloc();
  }
  void* made = nullptr;
  if (posix_memalign(&made, alignment, size > 0 ? size : 1) != 0) throw std::bad_alloc();
  return made;
}

}  // namespace

extern "C" {
void* __real_realloc(void* old, std::size_t size);

void* __wrap_realloc(void* old, std::size_t size) {
  if (!Allocations::refuses()) return __real_realloc(old, size);
  Allocations& all = Allocations::of_this_thread();
  (old && size + kLeastShrink <= malloc_usable_size(old) ? all.has_failed_to_shrink : all.has_failed) = true;
  return nullptr;
}
}

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
// std::stable_sort asks in this way, and does without.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return Allocations::refuses() ? nullptr : std::malloc(size > 0 ? size : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
