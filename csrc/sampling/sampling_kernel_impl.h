// The body of SamplingKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#include "sampling/candidates.h"

namespace kvpage {
namespace {

constexpr int64_t kGreedyBlock = 512, kWeightBlock = 256;
constexpr int64_t kFewTokens = 4096;   // a row of so many is taken whole where half of its tokens may stay
constexpr int64_t kGroupsPerTopK = 4;  // groups for each of top_k, so that few others reach the k-th group
constexpr int32_t kEndKey = 0x42ae0001;  // after the key of kLeastScore
constexpr double kBoundSlack = 0.125;    // in scores: of a bound that no token of a nucleus is below
constexpr double kLeastRest = 0x1p-11;   // a rest below it is too small to bound a nucleus by
constexpr double kMassUnits = 64;        // of a share, in the masses of blocks
constexpr double kMostWeight = 0x1p34;   // of the greatest logit
constexpr int64_t kMassWeight = 8;       // of a mass of 1, among weights

template <typename T>
int64_t likeliest(const LogitsRow& logits, const SamplingScratch& scratch) {
  const BlockedRow<T> row(logits, kGreedyBlock, scratch.tail);
  const Survey found = survey<false>(row, 1.0f, scratch);
  if (!found.is_usable) return -1;
  const Vec top = splat(found.top);
  int64_t block = 0;
  while (!at_least_bits(load(scratch.maxima + block * kLanes), top)) ++block;
  return block * kGreedyBlock + row.with_block(block, [&](auto* from) {
    int64_t d = 0;
    uint32_t bits;
    while (!(bits = at_least_bits(load(from + d), top))) d += kLanes;
    return d + __builtin_ctz(bits);
  });
}

// Turns the sums of the blocks' shares, each relative to the block's top, into masses relative to the greatest logit.
// Returns their total.
inline int64_t scale_masses(int64_t num_blocks, const Scale& scale, const SamplingScratch& scratch) {
  int64_t total = 0;
  for (int64_t block = num_blocks; block % kLanes; ++block) scratch.tops[block] = -kInfinity, scratch.masses[block] = 0;
  for (int64_t block = 0; block < num_blocks; block += kLanes) {
    VecRow<1> factors{load(scratch.tops + block)};
    factors.each([&](Vec top, int) { return (top - scale.top) * Scale::log2_factor(scale.temperature); });
    raise_2_to<0>(factors);
    for (int lane = 0; lane < kLanes; ++lane) {
      const double shares = static_cast<double>(scratch.masses[block + lane]);
      scratch.masses[block + lane] =
          static_cast<int64_t>(shares * static_cast<double>(factors.at[0][lane]) * kMassUnits);
      total += scratch.masses[block + lane];
    }
  }
  return total;
}

// Draws among all tokens: a block, then a token in it.
template <typename T>
int64_t draw_all(const LogitsRow& logits, const Choice& choice, const SamplingScratch& scratch) {
  const BlockedRow<T> row(logits, kWeightBlock, scratch.tail);
  const float factor = Scale::log2_factor(choice.temperature);
  const Survey found = survey<true>(row, factor, scratch);
  if (!found.is_usable) return -1;
  const int64_t total = scale_masses(row.num_blocks(), {found.top, choice.temperature}, scratch);
  int64_t before;
  const int64_t target = target_of(choice.point, 1, total), block = first_past(scratch.masses, target, before);
  const double inside = static_cast<double>(target - before), mass = static_cast<double>(scratch.masses[block]);
  int64_t sum = 0;
  for (int64_t d = 0; d < kWeightBlock; d += kLanes) {
    VecRow<1> part{row.with_block(block, [&](auto* from) { return load(from + d); })};
    to_shares(part, splat(scratch.tops[block]), factor);
    const IntVec shares = whole(part.at[0]);
    std::memcpy(scratch.keys + d, &shares, sizeof(shares));
    sum += sum_words(bit_cast<WordVec>(shares));
  }
  return block * kWeightBlock + first_past(scratch.keys, target_of(inside, mass, sum), before);
}

// Returns a score that the top_k-th greatest is not below, by the maxima of groups; kLeastScore if these are too few.
inline float least_of_top_k(int64_t top_k, int64_t num_groups, const Scale& scale, const SamplingScratch& scratch) {
  if (num_groups < kGroupsPerTopK / 2 * top_k) return kLeastScore;
  Candidates groups{scratch.keys, {}, nullptr, num_groups};
  for (int64_t i = 0; i < num_groups; i += kLanes) {
    const Vec keys = scale.keys(load(scratch.maxima + i));
    std::memcpy(groups.keys + i, &keys, sizeof(keys));
  }
  pad(groups);
  return score_of(
      last_kept_key<false>(groups.list(false), num_groups, kEndKey, static_cast<double>(top_k), scratch.work));
}

// Returns a score that no token is below without which the likeliest ones make up less than `share` of `total`.
// Tokens whose part of it is below (1 - share) / size make up less than 1 - share together. The slack is more than sums
// of blocks and of weights differ, so that the nucleus is the same with a bound and without.
inline float least_of_nucleus(double share, int64_t total, int64_t size) {
  if (1 - share < kLeastRest) return kLeastScore;
  const double weight = static_cast<double>(total) / kMostWeight;
  const double bound = std::log((1 - share) * weight / static_cast<double>(size)) - kBoundSlack;
  return static_cast<float>(std::fmax(bound, static_cast<double>(kLeastScore)));
}

// Returns the last key of the likeliest tokens that make up `share` of `total`, at most `last_key`.
inline int32_t last_of_nucleus(const Candidates& found, double share, int64_t total, int32_t last_key, int64_t size,
                               const SamplingScratch& scratch) {
  const int32_t bound_key = key_of(least_of_nucleus(share, total, size));
  const int32_t end = 1 + (bound_key < last_key ? bound_key : last_key);
  return last_kept_key<true>(found.list(true), found.count, end, share * static_cast<double>(total), scratch.work);
}

inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

inline int64_t draw_kept(const Candidates& found, int32_t last_key, const Choice& choice,
                         const SamplingScratch& scratch) {
  last_key = least(last_key, least(kEndKey - 1, key_of(choice.least_score)));
  const KeyList list{found.keys, found.weights, padded_to_run(padded_to_unit(found.count))};
  const int64_t index = draw_share(list, last_key, choice.point, scratch.sums);
  return found.ids ? found.ids[index] : index;
}

template <typename T>
int64_t draw_top_k(const LogitsRow& logits, const Choice& choice, const SamplingScratch& scratch) {
  const bool is_long = logits.size * kLanes >= kGroupsPerTopK * kGreedyBlock * choice.top_k;
  const BlockedRow<T> row(logits, is_long ? kGreedyBlock : SamplingScratch::kLeastBlock, scratch.tail);
  const Survey top = survey<false>(row, 1.0f, scratch);
  if (!top.is_usable) return -1;
  const Scale scale{top.top, choice.temperature};
  const float score = least_of_top_k(choice.top_k, row.num_blocks() * kLanes, scale, scratch);
  const Candidates found = candidates_from(score, row, scale, scratch.maxima, scratch);
  weigh(found);
  int32_t last_key = kEndKey - 1;
  if (found.count > choice.top_k)
    last_key =
        last_kept_key<false>(found.list(false), found.count, kEndKey, static_cast<double>(choice.top_k), scratch.work);
  if (choice.top_p < 1) {
    const int64_t total = mass_before<true>(found.list(true), last_key + 1).weight;
    last_key = last_of_nucleus(found, choice.top_p, total, last_key, logits.size, scratch);
  }
  return draw_kept(found, last_key, choice, scratch);
}

template <typename T>
int64_t draw_top_p(const LogitsRow& logits, const Choice& choice, const SamplingScratch& scratch) {
  const BlockedRow<T> row(logits, kWeightBlock, scratch.tail);
  const bool is_short = logits.size <= kFewTokens;
  const Survey top =
      is_short ? survey<false>(row, 1.0f, scratch) : survey<true>(row, Scale::log2_factor(choice.temperature), scratch);
  if (!top.is_usable) return -1;
  const Scale scale{top.top, choice.temperature};
  if (is_short) {
    const Candidates all = all_candidates(row, logits.size, scale, scratch);
    weigh(all);
    const int64_t total = mass_before<true>(all.list(true), kNoKey).weight;
    return draw_kept(all, last_of_nucleus(all, choice.top_p, total, kEndKey - 1, logits.size, scratch), choice,
                     scratch);
  }
  const int64_t total = scale_masses(row.num_blocks(), scale, scratch) * kMassWeight;
  const float score = std::fmax(least_of_nucleus(choice.top_p, total, logits.size), choice.least_score);
  const Candidates found = candidates_from(score, row, scale, scratch.maxima, scratch);
  weigh(found);
  return draw_kept(found, last_of_nucleus(found, choice.top_p, total, kEndKey - 1, logits.size, scratch), choice,
                   scratch);
}

template <typename T>
int64_t draw_min_p(const LogitsRow& logits, const Choice& choice, const SamplingScratch& scratch) {
  const BlockedRow<T> row(logits, kWeightBlock, scratch.tail);
  const Survey top = survey<false>(row, 1.0f, scratch);
  if (!top.is_usable) return -1;
  const Scale scale{top.top, choice.temperature};
  const Candidates found = candidates_from(choice.least_score, row, scale, scratch.maxima, scratch);
  weigh(found);
  return draw_kept(found, kEndKey - 1, choice, scratch);
}

template <typename T>
int64_t choose_typed(const LogitsRow& row, const Choice& choice, const SamplingScratch& scratch) {
  if (choice.temperature == 0) return likeliest<T>(row, scratch);
  if (choice.top_k > 0 && choice.top_k < row.size) return draw_top_k<T>(row, choice, scratch);
  if (choice.top_p < 1) return draw_top_p<T>(row, choice, scratch);
  if (choice.least_score > kLeastScore) return draw_min_p<T>(row, choice, scratch);
  return draw_all<T>(row, choice, scratch);
}

int64_t choose(const LogitsRow& row, const Choice& choice, const SamplingScratch& scratch) {
  switch (row.type) {
    case RowType::kBfloat16: return choose_typed<Bf16>(row, choice, scratch);
    case RowType::kFloat16: return choose_typed<Fp16>(row, choice, scratch);
    default: return choose_typed<float>(row, choice, scratch);
  }
}

template <typename T>
bool widen_typed(const LogitsRow& row, float* to) {
  const T* from = reinterpret_cast<const T*>(row.data);
  Vec top = splat(-kInfinity);
  IntVec magnitudes = {};
  for (int64_t d = 0; d < row.size; d += kLanes) {
    const Vec logits = load_or_lowest(from + d, row.size - d);
    const IntVec bits = bit_cast<IntVec>(logits) & 0x7fffffff;
    magnitudes = bits > magnitudes ? bits : magnitudes;
    top = max(logits, top);
    store(to + d, logits);
  }
  return is_usable(max_lanes(top), magnitudes);
}

bool widen(const LogitsRow& row, float* to) {
  switch (row.type) {
    case RowType::kBfloat16: return widen_typed<Bf16>(row, to);
    case RowType::kFloat16: return widen_typed<Fp16>(row, to);
    default: return widen_typed<float>(row, to);
  }
}

}  // namespace

const SamplingKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, choose, widen};

}  // namespace kvpage
