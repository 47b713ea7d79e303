#include "tile_emulator.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64] = {};
};

struct Registers {
  bool are_configured = false;
  Tile tiles[8];
};

thread_local Registers registers;
std::atomic<TileArithmetic> arithmetic = TileArithmetic::kManual;
std::atomic<int64_t> products = 0, loads = 0, stores = 0, configurations = 0, releases = 0;

void hold(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "a tile is used against the rules: %s\n", rule);
  std::_Exit(3);
}

// --- the instruction -----------------------------------------------------------------------------------------------

struct Instruction {
  int opcode = 0, prefix = 0;  // 0: none, 1: 66, 2: F3, 3: F2
  int reg = 0, third = 0;      // of ModRM, of VEX.vvvv
  bool is_memory = false;
  int rm = 0;
  int64_t address = 0, stride = 0;  // of memory: without and of the index
  int64_t length = 0;
};

// The general registers in the order of their numbers.
int64_t general(const ucontext_t& context, int number) {
  static constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                    REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kPlaces[number]];
}

int32_t number_at(const uint8_t* at) {
  int32_t number;
  std::memcpy(&number, at, sizeof(number));
  return number;
}

// VEX.128.0F38.W0, whose ModRM byte is the fifth.
Instruction decode(const ucontext_t& context) {
  const auto* const code = reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  hold(code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0, "an instruction of AMX");
  const int base_bit = code[1] & 0x20 ? 0 : 8, index_bit = code[1] & 0x40 ? 0 : 8;
  Instruction found{.opcode = code[3], .prefix = code[2] & 3, .reg = code[4] >> 3 & 7, .third = ~code[2] >> 3 & 15};
  const int mod = code[4] >> 6, rm = code[4] & 7;
  found.is_memory = mod != 3, found.rm = rm, found.length = 5;
  if (!found.is_memory) return found;
  int base = rm + base_bit;
  if (rm == 4) {
    const int sib = code[found.length++], index = (sib >> 3 & 7) + index_bit;
    base = (sib & 7) + base_bit;
    if (index != 4) found.stride = general(context, index) << (sib >> 6);
  }
  const bool has_no_base = mod == 0 && (base & 7) == 5;
  if (!has_no_base) found.address = general(context, base);
  if (mod == 1) found.address += static_cast<int8_t>(code[found.length++]);
  if (mod == 2 || has_no_base) found.address += number_at(code + found.length), found.length += 4;
  if (has_no_base && rm == 5) found.address += context.uc_mcontext.gregs[REG_RIP] + found.length;
  return found;
}

Tile& configured(int number) {
  hold(registers.are_configured, "tiles are configured");
  Tile& tile = registers.tiles[number];
  hold(tile.rows > 0, "the tile is configured");
  return tile;
}

// --- what it does ----------------------------------------------------------------------------------------------------

void configure(int64_t address) {
  uint8_t from[64];
  std::memcpy(from, reinterpret_cast<const void*>(address), sizeof(from));
  hold(from[0] == 1 && from[1] == 0, "palette 1, from row 0 on");
  for (int i = 2; i < 16; ++i) hold(from[i] == 0, "reserved bytes are 0");
  registers = {};
  for (int i = 0; i < 16; ++i) {
    const int bytes = from[16 + 2 * i] | from[17 + 2 * i] << 8, rows = from[48 + i];
    hold(i < 8 || (bytes == 0 && rows == 0), "there are eight tiles");
    hold(bytes <= 64 && rows <= 16 && (bytes == 0) == (rows == 0), "at most 16 rows of at most 64 bytes");
    if (i < 8) registers.tiles[i].bytes = bytes, registers.tiles[i].rows = rows;
  }
  registers.are_configured = true;
  ++configurations;
}

void load(const Instruction& from) {
  Tile& tile = configured(from.reg);
  std::memset(tile.data, 0, sizeof(tile.data));
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], reinterpret_cast<const uint8_t*>(from.address + row * from.stride),
                static_cast<size_t>(tile.bytes));
  ++loads;
}

void store(const Instruction& to) {
  const Tile& tile = configured(to.reg);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(reinterpret_cast<uint8_t*>(to.address + row * to.stride), tile.data[row],
                static_cast<size_t>(tile.bytes));
  ++stores;
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float widened(const uint8_t* at) {
  return flushed(std::bit_cast<float>(static_cast<uint32_t>(at[0]) << 16 | static_cast<uint32_t>(at[1]) << 24));
}

float sum_of(const Tile& left, const Tile& right, int row, int column, float before) {
  const TileArithmetic how = arithmetic;
  float sums[2] = {how == TileArithmetic::kOneSum ? before : 0.0f, 0.0f};
  const int first = how == TileArithmetic::kByRow ? column % 2 : 0;
  for (int i = 0; i < 2 * right.rows; ++i) {
    const int k = i ^ first;
    float& sum = sums[how == TileArithmetic::kOneSum || how == TileArithmetic::kByRow ? 0 : k % 2];
    sum = flushed(std::fma(widened(left.data[row] + 2 * k), widened(right.data[k / 2] + 4 * column + k % 2 * 2), sum));
  }
  if (how == TileArithmetic::kOneSum) return sums[0];
  if (how == TileArithmetic::kWrong) return flushed(before + sums[0]);
  return flushed(before + flushed(sums[0] + sums[1]));
}

void multiply(const Instruction& of) {
  Tile &sums = configured(of.reg), &left = configured(of.rm), &right = configured(of.third);
  hold(of.reg != of.rm && of.reg != of.third && of.rm != of.third, "three tiles");
  hold(left.bytes % 4 == 0 && right.bytes % 4 == 0 && sums.bytes % 4 == 0, "whole words");
  hold(sums.rows == left.rows && sums.bytes == right.bytes && left.bytes / 4 == right.rows, "shapes that fit");
  for (int row = 0; row < sums.rows; ++row)
    for (int column = 0; column < sums.bytes / 4; ++column) {
      float sum;
      std::memcpy(&sum, sums.data[row] + 4 * column, sizeof(sum));
      sum = sum_of(left, right, row, column, flushed(sum));
      std::memcpy(sums.data[row] + 4 * column, &sum, sizeof(sum));
    }
  ++products;
}

void carry_out(const Instruction& one) {
  if (one.opcode == 0x5c && one.prefix == 2 && !one.is_memory) return multiply(one);
  if (one.opcode == 0x4b && one.prefix == 3 && one.is_memory) return load(one);
  if (one.opcode == 0x4b && one.prefix == 2 && one.is_memory) return store(one);
  if (one.opcode == 0x49 && one.prefix == 0 && one.is_memory && one.reg == 0) return configure(one.address);
  if (one.opcode == 0x49 && one.prefix == 0 && !one.is_memory && one.reg == 0 && one.rm == 0) {
    registers = {};
    ++releases;
    return;
  }
  hold(one.opcode == 0x49 && one.prefix == 3 && !one.is_memory, "an instruction of AMX");
  Tile& tile = configured(one.reg);
  std::memset(tile.data, 0, sizeof(tile.data));
}

void on_unknown_instruction(int, siginfo_t*, void* place) {
  auto& context = *static_cast<ucontext_t*>(place);
  const Instruction one = decode(context);
  carry_out(one);
  context.uc_mcontext.gregs[REG_RIP] += one.length;
}

}  // namespace

void emulate_tiles() {
  struct sigaction action = {};
  action.sa_sigaction = on_unknown_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

void set_arithmetic(TileArithmetic how) { arithmetic = how; }

TileFigures tile_figures() { return {products, loads, stores, configurations, releases}; }
