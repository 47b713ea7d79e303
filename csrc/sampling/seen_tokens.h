// SeenTokens: the distinct tokens of a sequence, and how often each was generated. It grows with the sequence: a call
// costs as much as the tokens that are new to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpage {

class SeenTokens {
 public:
  explicit SeenTokens(int64_t num_prompt_tokens) : num_prompt_tokens_(num_prompt_tokens) {}

  // Takes the tokens that are new. Where there are fewer than before, it begins again. The first num_prompt_tokens are
  // seen, but not counted.
  void update(const int32_t* tokens, int64_t num_tokens);

  struct Entry {
    int32_t id;
    int32_t count;  // of generated ones
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  Entry& entry_of(int32_t id);
  void grow();
  size_t place_of(int32_t id) const;

  int64_t num_prompt_tokens_, num_seen_ = 0;
  std::vector<Entry> entries_;
  std::vector<int32_t> table_;  // indices of entries, by hash, open addressing; -1 is free
};

}  // namespace kvpage
