#include "base/token_view.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

// Loops over int64 tokens are compiled for newer vector units too and chosen when the library is loaded. int32 needs
// none of it: memcmp and memcpy of the C library do the same by themselves. The thread sanitizer has not begun yet when
// the choice is made, and crashes.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define KVPAGE_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define KVPAGE_VECTORIZED
#endif

namespace kvpage {
namespace {

KVPAGE_VECTORIZED bool equal_wide(const int64_t* tokens, const int32_t* stored, int64_t count) {
  int64_t differences = 0;
  for (int64_t i = 0; i < count; ++i) differences |= tokens[i] ^ static_cast<int64_t>(stored[i]);
  return differences == 0;
}

KVPAGE_VECTORIZED bool fits_wide(const int64_t* tokens, int64_t count) {
  int64_t differences = 0;
  for (int64_t i = 0; i < count; ++i) differences |= tokens[i] ^ static_cast<int64_t>(static_cast<int32_t>(tokens[i]));
  return differences == 0;
}

KVPAGE_VECTORIZED void copy_wide(const int64_t* tokens, int32_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(tokens[i]);
}

// Compares in pieces that stay in the first-level cache, since memcmp says that but not where two runs differ; then
// halves the piece that differs. Reads about one piece twice.
template <typename Equal>
int64_t common_prefix_by(int64_t count, Equal equal) {
  int64_t done = 0;
  int64_t piece = 2048;
  while (done < count && piece > 0) {
    const int64_t n = std::min(piece, count - done);
    if (equal(done, n)) {
      done += n;
    } else {
      piece = n / 2;
    }
  }
  return done;
}

uint64_t multiply_fold(uint64_t a, uint64_t b) {
  __extension__ using Product = unsigned __int128;
  const Product product = static_cast<Product>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Four tokens a step, as wyhash does. Missing tokens of the last step count as 0; a tree hashes one length only.
template <typename Token>
uint64_t hash_tokens(const Token* tokens, int64_t count, uint64_t seed) {
  const auto word = [&](int64_t i) -> uint64_t {
    const uint64_t low = i < count ? static_cast<uint32_t>(tokens[i]) : 0;
    const uint64_t high = i + 1 < count ? static_cast<uint32_t>(tokens[i + 1]) : 0;
    return low | high << 32;
  };
  const uint64_t secret = multiply_fold(seed ^ 0xa0761d6478bd642full, 0xe7037ed1a0b428dbull);
  uint64_t state = seed;
  for (int64_t i = 0; i < count; i += 4) state = multiply_fold(word(i) ^ secret, word(i + 2) ^ state);
  return multiply_fold(state ^ secret, 0x8ebc6af09c88c6e3ull);
}

}  // namespace

int64_t TokenView::common_prefix(int64_t start, const int32_t* stored, int64_t count) const {
  if (wide_) {
    return common_prefix_by(count,
                            [&](int64_t at, int64_t n) { return equal_wide(wide_ + start + at, stored + at, n); });
  }
  return common_prefix_by(count, [&](int64_t at, int64_t n) {
    return std::memcmp(narrow_ + start + at, stored + at, static_cast<size_t>(n) * sizeof(int32_t)) == 0;
  });
}

uint64_t TokenView::hash(int64_t start, int64_t count, uint64_t seed) const {
  return wide_ ? hash_tokens(wide_ + start, count, seed) : hash_tokens(narrow_ + start, count, seed);
}

void TokenView::check_fits(int64_t start, int64_t count) const {
  if (!wide_ || fits_wide(wide_ + start, count)) return;
  const int64_t* bad = std::find_if(wide_ + start, wide_ + start + count, [](int64_t t) { return t != int32_t(t); });
  fail("tokens must fit into 32 bits, got ", *bad, " at ", bad - wide_);
}

void TokenView::copy_to(int64_t start, int64_t count, int32_t* out) const {
  if (wide_) {
    copy_wide(wide_ + start, out, count);
  } else {
    std::copy_n(narrow_ + start, count, out);
  }
}

}  // namespace kvpage
