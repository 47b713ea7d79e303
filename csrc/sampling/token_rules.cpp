#include "sampling/token_rules.h"

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
