// tiles SEED NUM_PRODUCTS: the machine code of products by tiles, run by an emulator of the tile registers, beside the
// core's model of them, bit by bit; and the check that a process makes before it takes tiles. Prints figures as JSON.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "linear/linear.h"
#include "linear/linear_kernel.h"
#include "tile_emulator.h"
#include "trial.h"

using namespace kvpage;

namespace {

using Words = std::vector<uint16_t>;

// Of ordinary size, or any bits but those of infinities and NaNs.
Words numbers(Random& rng, int64_t count, bool is_wild) {
  Words all(static_cast<size_t>(count));
  for (uint16_t& one : all) {
    const auto bits = static_cast<uint16_t>(rng.next());
    const auto exponent = static_cast<uint16_t>(is_wild ? bits >> 7 & 0x7f : 120 + rng.below(14));
    one = rng.chance(5) ? 0 : static_cast<uint16_t>((bits & 0x807f) | exponent << 7);
  }
  return all;
}

std::byte* at(Words& words) { return reinterpret_cast<std::byte*>(words.data()); }

struct Product {
  int64_t rows, columns, size;
  bool is_gated, has_bias;
  Words x, w, up, bias;

  explicit Product(Random& rng)
      : rows(1 + rng.below(rng.chance(10) ? 200 : 40)),
        columns(1 + rng.below(90)),
        size(rng.below(rng.chance(20) ? 1100 : 100)),
        is_gated(rng.chance(30)),
        has_bias(!is_gated && rng.chance(50)),
        x(numbers(rng, rows * size, false)),
        w(numbers(rng, columns * size, rng.chance(10))),
        up(numbers(rng, columns * size, false)),
        bias(numbers(rng, columns, false)) {}

  Words by(const LinearKernel& kernel, int max_threads) {
    Words out(static_cast<size_t>(rows * columns));
    const int64_t step = size * 2;
    linear({.x = {at(x), step},
            .w = {at(w), step},
            .up = {is_gated ? at(up) : nullptr, step},
            .out = {at(out), columns * 2},
            .bias = has_bias ? at(bias) : nullptr,
            .num_rows = rows,
            .num_columns = columns,
            .size = size,
            .type = RowType::kBfloat16,
            .activation = is_gated ? Activation::kSilu : Activation::kNone,
            .max_threads = max_threads,
            .kernel = &kernel});
    return out;
  }
};

void compare(uint64_t seed, int64_t count) {
  Random rng(seed);
  for (int64_t i = 0; i < count; ++i) {
    Product product(rng);
    const Words found = product.by(linear_kernel_amx, 1 + static_cast<int>(rng.below(3)));
    expect(found == product.by(linear_kernel_amx_model, 1), "a product of ", product.rows, " x ", product.columns,
           " x ", product.size, " differs from the model's");
  }
}

void expect_verdict(TileArithmetic arithmetic, const char* name, const char* refusal) {
  set_arithmetic(arithmetic);
  const TileVerdict verdict = check_tiles(linear_kernel_amx, linear_kernel_amx_model);
  expect(verdict.name.substr(0, 4) == name && verdict.refusal == refusal, "the verdict is ", verdict.name, " ",
         verdict.refusal);
  expect(verdict.name.size() == (arithmetic == TileArithmetic::kOneSum ? 12u : verdict.name.size()), verdict.name);
}

void judge() {
  expect_verdict(TileArithmetic::kManual, "amx", "");
  expect_verdict(TileArithmetic::kOneSum, "amx-", "");
  expect_verdict(TileArithmetic::kByRow, "", "a row by tiles has other bits in another batch");
  expect_verdict(TileArithmetic::kWrong, "", "products by tiles are wrong");
}

}  // namespace

int main(int, char** arguments) {
  emulate_tiles();
  try {
    compare(std::strtoull(arguments[1], nullptr, 10), std::atoll(arguments[2]));
    judge();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  const TileFigures figures = tile_figures();
  std::cout << figures_json({{"products", figures.products},
                             {"loads", figures.loads},
                             {"stores", figures.stores},
                             {"configurations", figures.configurations},
                             {"releases", figures.releases}})
            << "\n";
}
