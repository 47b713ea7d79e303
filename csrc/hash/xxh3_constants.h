// The numbers of XXH3, as its specification has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9,
                   kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kMix1 = 0x165667919E3779F9, kMix2 = 0x9FB21C651E98DF25;

constexpr int64_t kXxh3SecretBytes = 192;
extern const std::byte* const kXxh3Secret;

}  // namespace kvpage
