// tile_refusal: whether the system lets this process use the tile registers of AMX.
#pragma once

#include <string>

namespace kvpage {

// Returns why the system does not let this process use tiles; empty where it does. The processor must have them. On
// Linux a process asks once, for all of its threads: their saved registers grow by 8 KiB.
std::string tile_refusal();

}  // namespace kvpage
