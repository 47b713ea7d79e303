// NaiveSlots: what SlotTree means: a record for every token, and every question a search of all records. Edges are
// found again after each change: runs of tokens between points where something ends.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

struct NaiveToken {
  bool is_live = false;
  int parent = -1;  // -1: the first token of a sequence
  int64_t token = 0;
  int64_t used = 0;
  int64_t num_pins = 0;  // that end here
};

struct NaiveHolder {
  int record;
  int64_t version;
};

class NaiveSlots {
 public:
  using Tokens = std::vector<int64_t>;
  using Path = std::vector<int>;  // records from the first token on

  explicit NaiveSlots(int64_t max_capacity) : max_capacity_(max_capacity) {}

  int64_t num_tokens() const;
  int64_t num_over() const;

  int64_t insert(const Tokens& tokens, int64_t slot, int64_t version);
  bool is_held_by(int64_t slot, int64_t version, const Tokens& prefix) const;
  int64_t longest(const Tokens& tokens) const;
  int64_t find(const Tokens& tokens);
  int64_t pin(const Tokens& tokens);
  bool can_release(const Tokens& tokens) const;
  void release(const Tokens& tokens);
  bool withdraw(int64_t slot);

  std::map<int64_t, NaiveHolder> held;  // by slot
  int64_t num_pins = 0;

 private:
  struct Facts;  // of every record, counted again when asked

  int child(int parent, int64_t token) const;
  Path path_of(const Tokens& tokens) const;
  Path path_to(int record) const;
  Facts facts() const;
  Path edge_to(int record, const Facts& facts) const;
  std::vector<Path> edges_on(int record, const Facts& facts) const;
  void use(const std::vector<Path>& edges);
  void settle();
  void shorten(const Path& edge);

  int64_t max_capacity_;
  int64_t clock_ = 0;
  std::vector<NaiveToken> tokens_;  // some not live
};
