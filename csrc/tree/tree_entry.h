// TreeEntry: an edge of the prefix tree, as a copy for an onlooker. It holds no block.
// PathLook: how far a prompt is cached, and how what is cached goes on.
// HotPrefix: a short description of an edge that was found often.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvpage {

struct TreeEntry {
  std::string name;      // the namespace
  int64_t parent = -1;   // index in the answer of the entry that it goes on from; -1: it begins the namespace
  int64_t start = 0;     // tokens before its own
  int64_t num_pins = 0;  // live matches that go through it or end at it
  int64_t priority = 0;  // kFirstToGo for what was put first
  int64_t used_at = 0;   // the tree's clock when the last match was released, or it was put first; 0 before
  std::vector<int32_t> tokens;
  std::vector<int32_t> device_ids;  // of the first blocks
  std::vector<int32_t> host_ids;    // of every block; kNoBlock where there is none. Empty without a host tier
};

struct PathLook {
  std::vector<int32_t> ids;             // of the cached blocks of a prompt, as of PrefixTree::copy_path
  int64_t num_common = 0;               // tokens of the prompt that a cached path begins with
  std::optional<int32_t> cached_token;  // the path's token after them, where it has one
  bool was_evicted = false;             // whether the prompt's next whole block is one of EvictedBlocks
};

struct HotPrefix {
  std::string name;         // the namespace
  int64_t parent = -1;      // as of TreeEntry
  int64_t start = 0;        // tokens before its own
  int64_t num_tokens = 0;   // its own
  int64_t num_hits = 0;     // matches that found it
  int64_t num_pins = 0;     // live matches that go through it or end at it
  int64_t num_blocks = 0;   // on the device
  int64_t num_host_blocks = 0;
  std::vector<int32_t> first_tokens;  // of its own
};

}  // namespace kvpage
