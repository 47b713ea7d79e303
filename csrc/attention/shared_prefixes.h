// Prefixes that sequences share: which keys of several block tables attention can read once, for all of their queries.
//
//   tables, by 128 keys     a: 1 2 3 7 8      outer group {a, c, d}: keys of 1 2        order   a d c b
//                           b: 4 5            inner group {a, d}: keys of 3
//                           c: 1 2 9          each sequence's own keys: the others
//                           d: 1 2 3 6
//
// A sequence is in at most one outer group, which begins with the first key, and in at most one inner group, which goes
// on where the outer one ends. The members of a group are neighbours in `order`. The groups are those that save the
// most keys.
#pragma once

#include <cstdint>

#include "tokens/block_tables.h"

namespace kvpage {

// Rows of a plan, int64 [kPlanRows, num_rows]. The first five are of sequences, the others of groups. Groups are
// numbered by their place; those that are not there have no members and no keys.
enum PlanRow : int64_t {
  kOwnBegin,  // the first key that no group of the sequence reads
  kOuterGroup,  // a number, -1 for none
  kInnerGroup,
  kRank,  // the place of the sequence in kOrder
  kOrder,  // sequences
  kGroupFirst,  // the place of its first member in kOrder
  kGroupCount,
  kKeyBegin,
  kKeyEnd,
  kPlanRows,
};

struct SharingRules {
  int64_t granule;  // keys: groups begin and end at multiples of it
  int64_t least_saved;  // keys x (members - 1) of a group
  int64_t max_groups;
};

// Plans for tables and `lengths` [num_seqs], writes all of `plan` [kPlanRows, num_rows], and returns the number of
// groups. The last key of a sequence is its own. Sequences that share blocks only after others are not found.
// Throws InvalidArgument for sizes that disagree.
int64_t share_prefixes(const BlockTables& tables, const int64_t* lengths, const SharingRules& rules, int64_t* plan,
                       int64_t num_rows);

}  // namespace kvpage
