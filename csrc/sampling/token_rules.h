// TokenRules: the rules of one sequence that name tokens. They apply in the order in which transformers applies them.
//
//   logit_bias ─► penalties of tokens seen ─► tokens that must not come yet ─► suppressed tokens ─► a mask of all
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "sampling/seen_tokens.h"

namespace kvpage {

struct Penalties {
  float repetition, presence, frequency;

  bool any() const { return repetition != 1 || presence != 0 || frequency != 0; }
};

// Each id outside of the vocabulary is passed over.
struct TokenRuleSet {
  std::vector<int64_t> biased_ids;
  std::vector<float> biases;
  std::vector<int64_t> stop_ids;  // ruled out before a sequence has `shortest` tokens
  int64_t shortest;
  std::vector<int64_t> suppressed_ids;
  std::vector<int64_t> first_ids;  // ruled out where the sequence has exactly `first_at` tokens
  int64_t first_at;
  Penalties penalties;
  int64_t num_prompt_tokens;
};

class TokenRules {
 public:
  // Throws InvalidArgument unless there is one bias for each id.
  explicit TokenRules(TokenRuleSet rules);

  bool needs_tokens() const { return rules_.penalties.any(); }
  int64_t num_prompt_tokens() const { return rules_.num_prompt_tokens; }

  // From now on, only tokens whose bits are set may come: token i's is bit i % 32 of words[i / 32]. Throws
  // InvalidArgument while a call uses the rules.
  void allow(const uint32_t* words, int64_t num_words);

  // Changes the logits [vocab_size] that follow these tokens. tokens: null unless needs_tokens().
  void apply(float* logits, int64_t vocab_size, const int32_t* tokens, int64_t num_tokens);

  // One call at a time may use the rules: the tokens that they have seen are theirs. Returns whether it may.
  bool take() { return !is_taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { is_taken_.store(false, std::memory_order_release); }

 private:
  void penalize(float* logits, int64_t vocab_size) const;

  const TokenRuleSet rules_;
  SeenTokens seen_;
  std::optional<std::vector<uint32_t>> allowed_;
  std::atomic<bool> is_taken_ = false;
};

}  // namespace kvpage
