#include "quantize/row_codec.h"

#include <cstring>
#include <vector>

#include "base/check.h"
#include "simd/instruction_sets.h"

namespace kvpage {
namespace {

std::vector<const RowCodec*> supported() {
  std::vector<const RowCodec*> codecs;
#if defined(__x86_64__)
  if (has_avx512_bf16()) codecs.push_back(&row_codec_avx512bf16);
  if (has_avx512()) codecs.push_back(&row_codec_avx512);
  if (has_avx2()) codecs.push_back(&row_codec_avx2);
#endif
  codecs.push_back(&row_codec_base);
  return codecs;
}

}  // namespace

const RowCodec& row_codec() {
  static const RowCodec& best = *supported().front();
  return best;
}

const RowCodec& row_codec(const char* name) {
  for (const RowCodec* codec : supported())
    if (std::strcmp(codec->name, name) == 0) return *codec;
  fail("codec must be one that this machine has, got ", name);
}

std::vector<const char*> row_codec_names() {
  std::vector<const char*> names;
  for (const RowCodec* codec : supported()) names.push_back(codec->name);
  return names;
}

}  // namespace kvpage
