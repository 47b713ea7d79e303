#include "sampling/token_rules.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace kvpage {
namespace {

bool is_in(int64_t id, int64_t vocab_size) { return id >= 0 && id < vocab_size; }

void rule_out(const std::vector<int64_t>& ids, float* logits, int64_t vocab_size) {
  for (int64_t id : ids)
    if (is_in(id, vocab_size)) logits[id] = -std::numeric_limits<float>::infinity();
}

void rule_out_others(const std::vector<uint32_t>& allowed, float* logits, int64_t vocab_size) {
  constexpr float never = -std::numeric_limits<float>::infinity();
  const int64_t num_words = std::min(static_cast<int64_t>(allowed.size()), (vocab_size + 31) / 32);
  for (int64_t word = 0; word < num_words; ++word) {
    const uint32_t bits = allowed[static_cast<size_t>(word)];
    if (bits == ~uint32_t{0}) continue;
    float* part = logits + 32 * word;
    const int64_t size = std::min<int64_t>(32, vocab_size - 32 * word);
    for (int64_t i = 0; i < size; ++i) part[i] = (bits >> i & 1) != 0 ? part[i] : never;
  }
  if (32 * num_words < vocab_size) std::fill(logits + 32 * num_words, logits + vocab_size, never);
}

}  // namespace

TokenRules::TokenRules(TokenRuleSet rules) : rules_(std::move(rules)), seen_(rules_.num_prompt_tokens) {
  check(rules_.biases.size() == rules_.biased_ids.size(), "biases must be one for each of ", rules_.biased_ids.size(),
        " ids, got ", rules_.biases.size());
  check(rules_.num_prompt_tokens >= 0, "num_prompt_tokens must not be negative, got ", rules_.num_prompt_tokens);
}

void TokenRules::apply(float* logits, int64_t vocab_size, const int32_t* tokens, int64_t num_tokens) {
  for (size_t i = 0; i < rules_.biased_ids.size(); ++i)
    if (is_in(rules_.biased_ids[i], vocab_size)) logits[rules_.biased_ids[i]] += rules_.biases[i];
  if (tokens) {
    seen_.update(tokens, num_tokens);
    penalize(logits, vocab_size);
  }
  if (num_tokens < rules_.shortest) rule_out(rules_.stop_ids, logits, vocab_size);
  rule_out(rules_.suppressed_ids, logits, vocab_size);
  if (num_tokens == rules_.first_at) rule_out(rules_.first_ids, logits, vocab_size);
  if (allowed_) rule_out_others(*allowed_, logits, vocab_size);
}

void TokenRules::allow(const uint32_t* words, int64_t num_words) {
  check(take(), "allow must not be called while the rules are used");
  try {
    allowed_.emplace(words, words + num_words);
  } catch (...) {
    give_back();
    throw;
  }
  give_back();
}

void TokenRules::penalize(float* logits, int64_t vocab_size) const {
  const auto [repetition, presence, frequency] = rules_.penalties;
  // By sign, without a branch: signs come in no order, so that one would be guessed wrongly half of the time.
  const float factors[2] = {1.0f, repetition}, divisors[2] = {repetition, 1.0f};
  for (const auto& [id, count] : seen_.entries()) {
    if (!is_in(id, vocab_size)) continue;
    const float found = logits[id];
    const int is_negative = found < 0;
    const float taken_off = presence * static_cast<float>(count > 0) + frequency * static_cast<float>(count);
    logits[id] = found * factors[is_negative] / divisors[is_negative] - taken_off;
  }
}

}  // namespace kvpage
