// Philox-4x32-10, as kvpage.serving.sampling.philox has it: a number in [0, 1 - 2**-53] for a seed and a position.
#pragma once

#include <cstdint>

namespace kvpage {

inline double philox_uniform(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53} * counter[0], odd = uint64_t{0xCD9E8D57} * counter[2];
    const uint32_t first = static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key[0];
    const uint32_t third = static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key[1];
    counter[0] = first, counter[1] = static_cast<uint32_t>(odd);
    counter[2] = third, counter[3] = static_cast<uint32_t>(even);
    key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
  }
  const uint64_t mantissa = (uint64_t{counter[0]} << 21) ^ (counter[1] >> 11);
  return static_cast<double>(mantissa) * 0x1p-53;
}

}  // namespace kvpage
