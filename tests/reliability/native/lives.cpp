#include "lives.h"

#include <iterator>

#include "copy_life.h"
#include "sequence_life.h"
#include "slot_life.h"
#include "slot_pool_life.h"
#include "tree_life.h"

namespace {

constexpr TreeWorld kTreeWorlds[] = {
    {16, 16, 1, 64, 3, 6},  {16, 40, 2, 64, 2, 6}, {24, 6, 2, 0, 2, 6},    {10, 3, 2, 2, 2, 6},
    {12, 0, 2, 64, 2, 6},   {8, 40, 3, 64, 2, 6},  {20, 20, 4, 1, 2, 6},   {0, 4, 2, 64, 2, 4},
    {40, 20, 2, 64, 40, 3}, {24, 0, 1, 3, 3, 8},   {64, 40, 4, 64, 2, 20},
};
constexpr TreeWorld kWideWorld = {400, 200, 2, 64, 12, 5};
constexpr SlotWorld kSlotWorlds[] = {{12, 5, 3, 7}, {30, 8, 2, 9}, {5, 3, 4, 6}, {0, 2, 2, 3}, {40, 70, 5, 10}};

std::unique_ptr<Life> tree_life(uint64_t seed, Figures* figures) {
  return std::make_unique<TreeLife>(kTreeWorlds[seed % std::size(kTreeWorlds)], seed, figures);
}
std::unique_ptr<Life> wide_life(uint64_t seed, Figures* figures) {
  return std::make_unique<TreeLife>(kWideWorld, seed, figures);
}
std::unique_ptr<Life> slot_life(uint64_t seed, Figures* figures) {
  return std::make_unique<SlotLife>(kSlotWorlds[seed % std::size(kSlotWorlds)], seed, figures);
}
std::unique_ptr<Life> copy_life(uint64_t seed, Figures* figures) { return std::make_unique<CopyLife>(seed, figures); }

std::unique_ptr<Life> slot_pool_life(uint64_t seed, Figures* figures) {
  constexpr int64_t kNumSlots[] = {8, 3, 0, 1, 17, 64};
  return std::make_unique<SlotPoolLife>(kNumSlots[seed % std::size(kNumSlots)], seed, figures);
}

std::unique_ptr<Life> sequence_life(uint64_t seed, Figures* figures) {
  constexpr int64_t kNumBlocks[] = {20, 40, 8};
  return std::make_unique<SequenceLife>(kNumBlocks[seed % std::size(kNumBlocks)], seed % 4 != 3, seed, figures);
}

constexpr Kind kKinds[] = {
    {"tree", 905, 20'000, 256, &tree_life},        {"wide_tree", 10, 20'000, 1024, &wide_life},
    {"sequences", 15, 5'000, 32, &sequence_life},  {"slots", 50, 20'000, 32, &slot_life},
    {"slot_pool", 10, 5'000, 32, &slot_pool_life}, {"copy", 10, 20, 1, &copy_life},
};

}  // namespace

std::span<const Kind> all_kinds() { return kKinds; }
