// numeric SEED NUM_OPERATIONS: attention over shared tables, products, norms, sampling, copies between many places and
// one or a file, and a codec of floats, of random sizes, by the pool of workers and from several callers at once. Each
// array is a heap block of its own that ends where its last element does. Prints figures as JSON.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <thread>

#include "attention/paged_attention.h"
#include "base/parallel.h"
#include "base/prefault.h"
#include "chunks/stretch_copy.h"
#include "chunks/stretch_reader.h"
#include "chunks/stretch_writer.h"
#include "codec/exponent_codec.h"
#include "linear/norms/rms_norm.h"
#include "sampling/sample_rows.h"
#include "trial.h"

using namespace kvpage;

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

Floats floats(Random& rng, int64_t count) {
  Floats all(static_cast<size_t>(count));
  for (float& one : all) one = static_cast<float>(rng.below(2001) - 1000) / 1000;
  return all;
}

Bytes bytes(Random& rng, int64_t count) {
  Bytes all(static_cast<size_t>(count));
  for (std::byte& one : all) one = static_cast<std::byte>(rng.next());
  return all;
}

template <typename T>
std::byte* at(std::vector<T>& all) {
  return reinterpret_cast<std::byte*>(all.data());
}

void expect_close(double found, double expected, const char* name) {
  expect(std::abs(found - expected) <= 1e-3 * (1 + std::abs(expected)), name, " is ", found, ", not ", expected);
}

// --- attention ---

// Sequences of two heads, whose tables share their first blocks.
void attend(Random& rng, int max_threads) {
  constexpr int64_t kHeads = 2, kBlocks = 40;
  const int64_t num_seqs = rng.below(6), block_size = 1 + rng.below(20), size = 1 + rng.below(40), max_blocks = 30;
  const int64_t group = 1 + rng.below(3), num_shared = rng.below(max_blocks), row = kHeads * size;
  Floats keys = floats(rng, kBlocks * block_size * row), values = floats(rng, kBlocks * block_size * row);
  std::vector<int32_t> tables(static_cast<size_t>(num_seqs * max_blocks));
  std::vector<int64_t> lengths, queries;
  for (int64_t i = 0; i < num_seqs * max_blocks; ++i)
    tables[i] = static_cast<int32_t>(i % max_blocks < num_shared ? i % max_blocks : rng.below(kBlocks));
  for (int64_t i = 0; i < num_seqs; ++i) {
    lengths.push_back(rng.below(max_blocks * block_size + 1));
    queries.push_back(rng.chance(60) ? std::min<int64_t>(lengths.back(), 1)
                                     : rng.below(std::min<int64_t>(lengths.back(), 40) + 1));
  }
  const int64_t num_tokens = std::accumulate(queries.begin(), queries.end(), int64_t{0});
  Floats query = floats(rng, num_tokens * row * group), out(query.size());
  const int64_t item = sizeof(float);
  const auto part = [&](Floats& all) {
    return KVPart{at(all), block_size * row * item, row * item, size * item, 0, size, item, nullptr, 0, 0, 0};
  };
  const PagedAttention args{.query = {at(query), row * group * item, size * item},
                            .out = {at(out), row * group * item, size * item},
                            .key_cache = part(keys),
                            .value_cache = part(values),
                            .query_type = ElementType::kFloat32,
                            .cache_type = ElementType::kFloat32,
                            .code_type = CodeType::kBits,
                            .key_scales = nullptr,
                            .key_scale_stride = 0,
                            .value_scales = nullptr,
                            .value_scale_stride = 0,
                            .tables = {tables.data(), max_blocks, num_seqs, max_blocks, kBlocks, block_size},
                            .seq_lens = lengths.data(),
                            .query_lens = queries.data(),
                            .positions = nullptr,
                            .num_tokens = num_tokens,
                            .num_kv_heads = kHeads,
                            .group_size = group,
                            .key_size = size,
                            .value_size = size,
                            .window = rng.chance(70) ? int64_t{1} << 40 : 1 + rng.below(50),
                            .scale = 1,
                            .softcap = 0,
                            .sinks = nullptr,
                            .max_threads = max_threads,
                            .kernel = ""};
  paged_attention(args);
  if (num_tokens == 0) return;
  int64_t seq = 0, first = 0;
  while (first + queries[seq] == first) ++seq;  // the first sequence with a query: its last query's first head
  const int64_t token = queries[seq] - 1, length = lengths[seq];
  const float* q = query.data() + token * row * group;
  double total = 0, sum = 0, most = -1e30;
  const auto place = [&](const Floats& all, int64_t key) {
    return all.data() + (tables[seq * max_blocks + key / block_size] * block_size + key % block_size) * row;
  };
  const auto score = [&](int64_t key) { return std::inner_product(q, q + size, place(keys, key), 0.0); };
  const int64_t begin = std::max<int64_t>(0, length - args.window);
  for (int64_t key = begin; key < length; ++key) most = std::max(most, score(key));
  for (int64_t key = begin; key < length; ++key) {
    const double weight = std::exp(score(key) - most);
    total += weight, sum += weight * place(values, key)[0];
  }
  expect_close(out[static_cast<size_t>(token * row * group)], sum / total, "attention");
}

// --- products and norms ---

void multiply(Random& rng, int max_threads) {
  const int64_t rows = rng.below(rng.chance(5) ? 120 : 9), columns = rng.below(90),
                size = rng.below(rng.chance(20) ? 1100 : 70);
  const bool is_gated = rng.chance(30);
  Floats x = floats(rng, rows * size), w = floats(rng, columns * size), up = floats(rng, columns * size);
  Floats bias = floats(rng, columns), out(static_cast<size_t>(rows * columns));
  const int64_t item = sizeof(float), step = size * item;
  linear({.x = {at(x), step},
          .w = {at(w), step},
          .up = {is_gated ? at(up) : nullptr, step},
          .out = {at(out), columns * item},
          .bias = is_gated ? nullptr : at(bias),
          .num_rows = rows,
          .num_columns = columns,
          .size = size,
          .type = RowType::kFloat32,
          .activation = is_gated ? Activation::kSilu : Activation::kNone,
          .max_threads = max_threads,
          .kernel = &linear_kernels().best()});
  if (rows * columns == 0) return;
  const int64_t row = rng.below(rows), column = rng.below(columns);
  const auto dot = [&](const Floats& weight) {
    return std::inner_product(x.begin() + row * size, x.begin() + (row + 1) * size, weight.begin() + column * size,
                              0.0);
  };
  const double gate = dot(w), found = out[static_cast<size_t>(row * columns + column)];
  expect_close(found, is_gated ? gate / (1 + std::exp(-gate)) * dot(up) : gate + bias[static_cast<size_t>(column)],
               "a product");
}

// By the model of tiles, whose loops are those of AMX. Numbers of bf16 are whole and small, so all sums are exact.
void multiply_by_tiles(Random& rng, int max_threads) {
  const int64_t rows = 1 + rng.below(rng.chance(5) ? 120 : 20), columns = 1 + rng.below(90),
                size = rng.below(rng.chance(20) ? 600 : 70);
  const auto whole = [&](int64_t count) {
    std::vector<uint16_t> all(static_cast<size_t>(count));
    for (uint16_t& one : all) one = static_cast<uint16_t>(rng.chance(50) ? 0x3f80 : rng.chance(50) ? 0xbf80 : 0);
    return all;
  };
  const auto number = [](uint16_t bits) { return bits == 0 ? 0 : bits == 0x3f80 ? 1 : -1; };
  auto x = whole(rows * size), w = whole(columns * size), out = whole(rows * columns);
  linear({.x = {at(x), size * 2},
          .w = {at(w), size * 2},
          .up = {},
          .out = {at(out), columns * 2},
          .bias = nullptr,
          .num_rows = rows,
          .num_columns = columns,
          .size = size,
          .type = RowType::kBfloat16,
          .activation = Activation::kNone,
          .max_threads = max_threads,
          .kernel = &linear_kernel_amx_model});
  const int64_t row = rng.below(rows), column = rng.below(columns);
  int64_t total = 0;
  for (int64_t k = 0; k < size; ++k) total += number(x[row * size + k]) * number(w[column * size + k]);
  const auto bits = static_cast<uint32_t>(out[static_cast<size_t>(row * columns + column)]) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  expect(std::abs(found - static_cast<float>(total)) <= std::abs(found) / 256, "a product by tiles is ", found,
         ", not ", total);
}

void normalize(Random& rng, int max_threads) {
  const int64_t rows = rng.below(9), size = 1 + rng.below(70), step = size * static_cast<int64_t>(sizeof(float));
  Floats x = floats(rng, rows * size), weight = floats(rng, size), out(x.size());
  rms_norm({.x = {at(x), step},
            .residual = {},
            .sum = {},
            .out = {at(out), step},
            .weight = at(weight),
            .num_rows = rows,
            .size = size,
            .type = RowType::kFloat32,
            .eps = 1e-3f,
            .offset = 1,
            .order = NormOrder::kRoundThenScale,
            .max_threads = max_threads,
            .kernel = &norm_kernels().best()});
  if (rows == 0) return;
  const double squares = std::inner_product(x.end() - size, x.end(), x.end() - size, 0.0);
  expect_close(out.back(), x.back() / std::sqrt(squares / static_cast<double>(size) + 1e-3) * (weight.back() + 1),
               "a norm");
}

// --- sampling ---

// Rules of one row, with the tokens that they are about; and the same, naively.
struct RuledTokens {
  TokenRuleSet set;
  std::vector<int32_t> tokens;
  std::unique_ptr<TokenRules> rules;

  RuledTokens(Random& rng, int64_t vocab_size, int64_t num_generated) {
    const auto ids = [&] {
      std::vector<int64_t> some;
      for (int64_t left = rng.below(4); left > 0; --left) some.push_back(rng.below(vocab_size + 2) - 1);
      return some;
    };
    set = {ids(), {}, ids(), rng.below(4), {}, ids(), rng.below(4), {2.0f, 0.25f, 0.5f}, rng.below(90)};
    for (size_t i = 0; i < set.biased_ids.size(); ++i) set.biases.push_back(0.5f);
    for (int64_t left = set.num_prompt_tokens + num_generated; left > 0; --left)
      tokens.push_back(static_cast<int32_t>(rng.below(vocab_size)));
    rules = std::make_unique<TokenRules>(set);
  }

  void apply(Floats& row) const {
    const auto change = [&](int64_t id, const auto& by) {
      if (id >= 0 && id < static_cast<int64_t>(row.size())) by(row[static_cast<size_t>(id)]);
    };
    const auto rule_out = [&](int64_t id) { change(id, [](float& logit) { logit = -HUGE_VALF; }); };
    const auto length = static_cast<int64_t>(tokens.size());
    for (size_t i = 0; i < set.biases.size(); ++i)
      change(set.biased_ids[i], [&](float& logit) { logit += set.biases[i]; });
    std::map<int32_t, int> counts;
    for (int64_t i = 0; i < length; ++i) counts[tokens[static_cast<size_t>(i)]] += i >= set.num_prompt_tokens;
    for (const auto& [id, count] : counts)
      change(id, [&, num = static_cast<float>(count)](float& logit) {
        logit = (logit < 0 ? logit * 2 : logit / 2) - (num > 0 ? 0.25f : 0) - 0.5f * num;
      });
    if (length < set.shortest) std::for_each(set.stop_ids.begin(), set.stop_ids.end(), rule_out);
    if (length == set.first_at) std::for_each(set.first_ids.begin(), set.first_ids.end(), rule_out);
  }
};

// The likeliest token of greedy rows, and of drawn ones a token that top_k leaves.
void choose_tokens(Random& rng, int max_threads) {
  const int64_t num_rows = rng.below(5), vocab_size = rng.chance(10) ? 3000 + rng.below(200) : 1 + rng.below(70);
  Floats logits = floats(rng, num_rows * vocab_size);
  std::vector<RowRules> rules;
  std::vector<RuledTokens> named;
  std::vector<RuledRow> ruled;
  for (int64_t row = 0; row < num_rows; ++row) {
    rules.push_back({rng.next(), rng.below(9), rng.below(5), rng.chance(50) ? 1.0 : 0.75, rng.chance(40) ? 0.0f : 0.8f,
                     rng.chance(50) ? -HUGE_VALF : -3.0f});
    named.emplace_back(rng, vocab_size, rules.back().position);
    ruled.push_back(rng.chance(50) ? RuledRow{} : RuledRow{named.back().rules.get(), named.back().tokens.data()});
  }
  std::vector<int32_t> tokens(rules.size());
  sample_rows({at(logits), vocab_size * int64_t{sizeof(float)}, RowType::kFloat32, num_rows, vocab_size, rules.data(),
               ruled.data(), tokens.data(), max_threads, ""});
  for (size_t row = 0; row < rules.size(); ++row) {
    const auto begin = logits.begin() + static_cast<int64_t>(row) * vocab_size;
    Floats one(begin, begin + vocab_size);
    if (ruled[row].rules) named[row].apply(one);
    const int32_t token = tokens[row];
    expect(token >= (*std::max_element(one.begin(), one.end()) > -HUGE_VALF ? 0 : -1), "no token was chosen");
    if (token < 0) continue;
    const float chosen = one[static_cast<size_t>(token)];
    const auto num_better = std::count_if(one.begin(), one.end(), [&](float logit) { return logit > chosen; });
    const int64_t most = rules[row].temperature == 0 ? 1 : rules[row].top_k == 0 ? vocab_size : rules[row].top_k;
    expect(num_better < most, "token ", token, " has ", num_better, " better ones of ", most);
  }
}

// --- copies ---

struct Places {
  std::vector<Bytes> memory;
  std::vector<ByteRun> runs;
  int64_t num_bytes = 0;

  explicit Places(Random& rng) {
    const int64_t most = rng.chance(10) ? 300'000 : 3'000;
    for (int64_t left = rng.below(20); left > 0; --left) memory.push_back(bytes(rng, rng.below(most)));
    for (Bytes& one : memory) {
      runs.push_back({one.data(), static_cast<int64_t>(one.size())});
      num_bytes += runs.back().num_bytes;
    }
  }
  Bytes joined() const {
    Bytes all;
    for (const Bytes& one : memory) all.insert(all.end(), one.begin(), one.end());
    return all;
  }
  void clear() {
    for (Bytes& one : memory) std::fill(one.begin(), one.end(), std::byte{0});
  }
};

void copy_stretches(Random& rng, int max_threads) {
  Places places(rng);
  const Bytes expected = places.joined();
  Bytes payload(expected.size());
  const StretchCopy args{places.runs.data(),     static_cast<int64_t>(places.runs.size()),
                         payload.data(),         places.num_bytes,
                         1 + rng.below(100'000), max_threads,
                         rng.chance(50)};
  std::vector<Digest> gathered(static_cast<size_t>(count_stretches(args))), scattered(gathered.size());
  gather_stretches(args, gathered.data());
  expect(payload == expected, "bytes were gathered wrong");
  places.clear();
  scatter_stretches(args, scattered.data());
  expect(places.joined() == expected && gathered == scattered, "bytes were scattered wrong");
}

void read_stretches_of_a_file(Random& rng, int max_threads, int fd) {
  Places places(rng);
  if (places.num_bytes == 0) return;
  const Bytes expected = places.joined();
  const int64_t stretch_bytes = 1 + rng.below(100'000), offset = rng.below(9000);
  Bytes lead = bytes(rng, rng.below(100)), room(static_cast<size_t>(1 + rng.below(300'000)));
  const auto num_runs = static_cast<int64_t>(places.runs.size()), num_lead = static_cast<int64_t>(lead.size());
  const StretchWrite write{fd,       offset,        lead.data(), num_lead, places.runs.data(),
                           num_runs, stretch_bytes, nullptr,     0,        max_threads};
  std::vector<Digest> written(static_cast<size_t>(count_stretches(write))), read(written.size());
  write_stretches(write, written.data());
  places.clear();
  read_stretches({fd, offset + num_lead, places.runs.data(), num_runs, stretch_bytes, room.data(),
                  static_cast<int64_t>(room.size()), max_threads},
                 read.data());
  expect(places.joined() == expected && read == written, "bytes were read wrong");
}

// The byte before the memory is another thread's. The system is one that cannot populate pages: see wrapped madvise.
void fault_pages_in(Random& rng, int max_threads) {
  Bytes memory(static_cast<size_t>(1 + rng.below(100'000)));
  std::thread other([&] { memory[0] = std::byte{7}; });
  prefault(memory.data() + 1, static_cast<int64_t>(memory.size()) - 1, max_threads);
  other.join();
  expect(memory[0] == std::byte{7}, "a byte of another thread was written");
}

// --- the pool ---

// A child of a process whose workers are at work has its own.
void fork_a_child(Random& rng) {
  const pid_t child = fork();
  if (child == 0) {
    bool is_right = true;
    try {
      for (int i = 0; i < 3; ++i) multiply(rng, 3), copy_stretches(rng, 3);
      std::atomic<int> num_done = 0;
      run_shares(4, [&](int) { ++num_done; });
      is_right = num_done == 4;
    } catch (const std::exception&) {
      is_right = false;
    }
    _exit(is_right ? 0 : 1);
  }
  int status = -1;
  expect(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a child came to another end");
}

// Floats with their exponents apart come back. A payload with other bytes is refused, or gives any floats.
void take_exponents_apart(Random& rng) {
  const auto kind = static_cast<FloatKind>(rng.below(4));
  const int64_t num_bytes = static_cast<int64_t>(rng.below(rng.below(4) ? 700 : 20000));
  Bytes raw = bytes(rng, num_bytes);
  if (rng.below(4))
    for (int64_t i = 1; i < num_bytes; i += parts_of(kind).width) raw[i] = std::byte{0x3c} | (raw[i] & std::byte{0x83});
  Bytes room(most_payload_bytes(kind, num_bytes));
  const int64_t size = encode_exponents(kind, at(raw), num_bytes, at(room), "");
  Bytes payload(room.begin(), room.begin() + size), back(raw.size());
  decode_exponents(kind, at(payload), size, at(back), num_bytes, "");
  expect(back == raw, "floats did not come back");
  for (int64_t i = static_cast<int64_t>(rng.below(4)); i > 0 && size > 0; --i)
    payload[rng.below(rng.below(2) ? size : std::min<int64_t>(size, 8))] = static_cast<std::byte>(rng.next());
  payload.resize(rng.below(4) ? size : rng.below(size + 1));
  payload.shrink_to_fit();
  outcome_of(
      [&] { decode_exponents(kind, at(payload), static_cast<int64_t>(payload.size()), at(back), num_bytes, ""); });
}

void fail_in_shares(Random& rng) {
  const int num_shares = 2 + static_cast<int>(rng.below(5)), failing = static_cast<int>(rng.below(num_shares));
  std::atomic<int> num_done = 0;
  const Outcome found = outcome_of([&] {
    run_shares(num_shares, [&](int share) {
      ++num_done;
      if (share % 2) run_shares(2, [&](int) {});  // a call within a call
      check(share != failing, "share must not be ", failing);
    });
  });
  expect(found == Outcome::kRefused && num_done == num_shares, "an exception was lost");
}

void work(uint64_t seed, int64_t num_operations, bool forks) {
  Random rng(seed);
  std::FILE* const file = std::tmpfile();
  expect(file != nullptr, "there is no room for a file");
  for (int64_t i = 0; i < num_operations; ++i) {
    const int max_threads = 1 + static_cast<int>(rng.below(4));
    attend(rng, max_threads);
    multiply(rng, max_threads);
    multiply_by_tiles(rng, max_threads);
    normalize(rng, max_threads);
    choose_tokens(rng, max_threads);
    copy_stretches(rng, max_threads);
    read_stretches_of_a_file(rng, max_threads, fileno(file));
    fault_pages_in(rng, max_threads);
    take_exponents_apart(rng);
    fail_in_shares(rng);
    if (forks && i % 8 == 0) fork_a_child(rng);
  }
  std::fclose(file);
}

}  // namespace

// A kernel before Linux 5.14, as -Wl,--wrap=madvise has it.
extern "C" int __wrap_madvise(void*, size_t, int) {
  errno = EINVAL;
  return -1;
}

int main(int, char** arguments) {
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10) << 32;
  const int64_t num_operations = std::atoll(arguments[2]);
  const bool forks = std::strcmp(arguments[3], "forks") == 0;
  std::atomic<bool> has_failed = false;
  std::vector<std::thread> callers;
  for (uint64_t i = 0; i < 3; ++i)
    callers.emplace_back([&, i] {
      try {
        work(seed + i, num_operations / 3, forks && i == 0);
      } catch (const std::exception& error) {
        std::cerr << "seed " << seed << ": " << error.what() << std::endl;
        has_failed = true;
      }
    });
  for (std::thread& caller : callers) caller.join();
  if (has_failed) return 1;
  std::cout << figures_json({{"operations", num_operations}}) << std::endl;
}
