// The tile registers of AMX, for processors without them: an instruction that the processor does not know is looked at,
// carried out here, and passed over. It stands on Intel's manual alone, not on the core's model.
#pragma once

#include <cstdint>

// How the emulated processor adds up. kManual: as in the operation of TDPBF16PS in the Software Developer's Manual.
enum class TileArithmetic { kManual, kOneSum, kByRow, kWrong };  // kByRow: bits depend on a row's place in its tile

struct TileFigures {
  int64_t products = 0, loads = 0, stores = 0, configurations = 0, releases = 0;
};

// From now on, in all threads. A program that uses a tile against the rules is ended, with the rule.
void emulate_tiles();
void set_arithmetic(TileArithmetic arithmetic);
TileFigures tile_figures();
