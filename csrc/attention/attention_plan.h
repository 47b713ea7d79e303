// AttentionPlan: the tasks of a call, and which of them fill in the same rows.
//
//   sequences     a: 1 2 3 7        spans, in the tables' order     a: 1 2 3 7     unit 1     read once: 1 2, then 3
//   and blocks    b: 4 5                                            d: 1 2 3 8
//                 c: 1 2 9                                          c: 1 2 9
//                 d: 1 2 3 8                                        b: 4 5         unit 2
//
// A unit is neighbours that share blocks, up to so many rows. A task is a unit and some KV heads, over all keys; where
// there are too few for the threads, over the keys of one part (kPartKeys), and over one head.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention_call.h"
#include "attention/attention_kernel.h"

namespace kvpage {

class AttentionPlan {
 public:
  // The tasks point into the plan and into `layer`. `args` are checked.
  AttentionPlan(const PagedAttention& args, const AttentionLayer& layer);

  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  std::vector<AttentionTask> tasks;  // those of the same rows are neighbours, in the order of their keys
  std::vector<int64_t> first;  // of each task: the first task of its rows
  std::vector<int64_t> num_parts;  // of each first task: how many there are
  int num_threads = 1;  // that are worth starting

 private:
  struct Unit {
    int64_t first, last;  // spans
    int64_t num_rows;  // of a KV head
    int64_t key_begin, key_end;
  };

  void make_spans(const PagedAttention& args);
  void make_units(const PagedAttention& args);
  void make_tasks(const PagedAttention& args, const AttentionLayer& layer);
  void add_tasks(const AttentionTask& whole, bool in_parts);

  int64_t max_rows_;
  std::vector<AttentionSpan> spans_;
  std::vector<Unit> units_;
};

// The first key that a query at `position` sees.
inline int64_t first_key(const PagedAttention& args, int64_t position) {
  return position < args.window ? 0 : position - args.window + 1;
}

// Returns the position of a query of a sequence whose first query is row `row`.
inline int64_t position_of(const PagedAttention& args, int64_t seq, int64_t row, int64_t query) {
  return args.positions ? args.positions[row + query] : args.seq_lens[seq] - args.query_lens[seq] + query;
}

}  // namespace kvpage
