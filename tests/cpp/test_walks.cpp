// The walks and CPU launchers on arbitrary bits. Every tensor is a heap block of exactly its size,
// so under AddressSanitizer any access outside ends the run; the checks here are what must hold on
// any input at all.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "launch.h"
#include "walks.h"

using namespace adaptive_spec;

namespace {

constexpr int32_t kUnwritten = -77;
std::mt19937_64 rng(11);

int64_t below(int64_t bound) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound)); }

// Mostly small numbers, so that links and matches happen, and sometimes the worst there are.
int64_t any_int64(int64_t typical) {
  constexpr int64_t kExtreme[] = {std::numeric_limits<int64_t>::min(),
                                  std::numeric_limits<int64_t>::max(),
                                  int64_t{1} << 31,
                                  (int64_t{1} << 31) - 1,
                                  int64_t{1} << 32,
                                  -1,
                                  -2};
  if (below(12) == 0) return kExtreme[below(std::size(kExtreme))];
  return below(typical + 2) - 1;
}

struct Block {
  std::vector<int64_t> words;
  Matrix<const int64_t> matrix;

  Block(int64_t rows, int64_t cols, int64_t typical) : words(rows * cols) {
    for (int64_t& word : words) word = any_int64(typical);
    matrix = {words.data(), cols, 1};
  }
};

struct Outputs {
  std::vector<int32_t> accept_token_num, accept_lens, max_accept;
  std::vector<int64_t> bonus_tokens, seq_lens, new_seq_lens, select_index, accepted_tokens;
  int32_t num_reqs;

  Outputs(int64_t batch_size, int64_t num_steps)
      : accept_token_num(batch_size, kUnwritten),
        accept_lens(batch_size, kUnwritten),
        max_accept(batch_size),
        bonus_tokens(batch_size, kUnwritten),
        seq_lens(batch_size, 100),
        new_seq_lens(batch_size, kUnwritten),
        select_index(batch_size, kUnwritten),
        accepted_tokens(batch_size * (num_steps + 1), kUnwritten),
        num_reqs(static_cast<int32_t>(any_int64(batch_size))) {
    for (int32_t& limit : max_accept) limit = static_cast<int32_t>(any_int64(num_steps));
  }

  RoundParams round(int64_t batch_size, int64_t num_steps, int64_t num_verified) {
    RoundParams params;
    params.batch_size = batch_size;
    params.num_steps = num_steps;
    params.num_reqs = below(2) ? &num_reqs : nullptr;
    if (below(2)) params.max_accept = {max_accept.data()};
    params.outputs = {{accept_token_num.data()}, {accept_lens.data()},  {bonus_tokens.data()},
                      {seq_lens.data()},         {new_seq_lens.data()}, {select_index.data()},
                      {accepted_tokens.data()},  num_verified};
    return params;
  }

  // Every live row emits between one and S + 1 tokens, all of them token ids; nothing else moved.
  void check(const RoundParams& params) const {
    const int64_t num_live = num_live_rows(params.num_reqs, params.batch_size);
    int64_t num_emitted = 0;
    for (int64_t b = 0; b < params.batch_size; ++b) {
      if (b >= num_live) {
        CHECK(accept_token_num[b] == kUnwritten && bonus_tokens[b] == kUnwritten);
        continue;
      }
      CHECK(accept_token_num[b] >= 0 && accept_token_num[b] <= params.num_steps);
      CHECK(accept_lens[b] == accept_token_num[b] + 1);
      CHECK(new_seq_lens[b] == 100 + accept_lens[b]);
      CHECK(bonus_tokens[b] >= 0 && bonus_tokens[b] < kMaxVocabSize);
      num_emitted += accept_lens[b];
    }
    for (int64_t i = 0; i < static_cast<int64_t>(accepted_tokens.size()); ++i) {
      if (i < num_emitted) {
        CHECK(accepted_tokens[i] >= 0);
      } else {
        CHECK(accepted_tokens[i] == kUnwritten);
      }
    }
  }
};

void fuzz_tree() {
  const int64_t batch_size = below(5);
  const int64_t num_nodes = 1 + below(9);
  const int64_t num_steps = below(12);
  const Block candidates(batch_size, num_nodes, 3);
  const Block flat_ids(batch_size, num_nodes, batch_size * num_nodes + 1);
  const Block next_token(batch_size, num_nodes, num_nodes);
  const Block next_sibling(batch_size, num_nodes, num_nodes);
  const Block target(batch_size, num_nodes, 3);
  std::vector<int32_t> predicts(batch_size * num_nodes, kUnwritten);
  std::vector<int32_t> accept_index(batch_size * (num_steps + 1), kUnwritten);
  Outputs outputs(batch_size, num_steps);
  VerifyTreeParams params{outputs.round(batch_size, num_steps, num_nodes), {}};
  params.tree = {{{predicts.data()},
                  {accept_index.data(), num_steps + 1, 1},
                  candidates.matrix,
                  flat_ids.matrix,
                  next_token.matrix,
                  next_sibling.matrix,
                  num_nodes},
                 target.matrix};
  cpu::launch_verify_tree_greedy(params);
  outputs.check(params.round);
}

void fuzz_chain() {
  const int64_t batch_size = below(5);
  const int64_t num_steps = below(9);
  const int64_t width = num_steps + 1 + below(3);
  const Block drafts(batch_size, num_steps, 2);
  const Block target(batch_size, num_steps + 1, 2);
  std::vector<int32_t> output(batch_size * width, kUnwritten);
  Outputs outputs(batch_size, num_steps);
  VerifyChainParams params{outputs.round(batch_size, num_steps, num_steps + 1),
                           drafts.matrix,
                           target.matrix,
                           {output.data(), width, 1},
                           width};
  cpu::launch_verify_chain_greedy(params);
  outputs.check(params.round);
  const int64_t num_live = num_live_rows(params.round.num_reqs, batch_size);
  for (int64_t b = 0; b < batch_size; ++b) {
    for (int64_t i = 0; i < width; ++i) {
      const int32_t token = output[b * width + i];
      if (b >= num_live) {
        CHECK(token == kUnwritten);
      } else {
        CHECK(i <= outputs.accept_token_num[b] ? token >= 0 : token == -1);
      }
    }
  }
}

void fuzz_chain_logits() {
  const int64_t batch_size = below(4);
  const int64_t num_steps = below(5);
  const int64_t vocab_size = 1 + below(5);
  const Block drafts(batch_size, num_steps, vocab_size);
  // Arbitrary bits as 16-bit floats: NaN, infinities and subnormals among them.
  std::vector<uint16_t> logits(batch_size * (num_steps + 1) * vocab_size);
  const uint16_t bits[] = {0x7e00, 0xfc00, 0x7c00, 0x0001, 0x8000, 0x3c00};
  for (uint16_t& x : logits) x = below(3) ? bits[below(6)] : static_cast<uint16_t>(rng());
  std::vector<int32_t> output(batch_size * (num_steps + 1), kUnwritten);
  Outputs outputs(batch_size, num_steps);
  VerifyChainLogitsParams params{
      outputs.round(batch_size, num_steps, num_steps + 1),
      drafts.matrix,
      {logits.data(), (num_steps + 1) * vocab_size, vocab_size, vocab_size,
       below(2) ? LogitsType::kFloat16 : LogitsType::kBFloat16},
      {output.data(), num_steps + 1, 1},
      num_steps + 1};
  cpu::launch_verify_chain_greedy_from_logits(params);
  outputs.check(params.round);
  for (int32_t token : output) CHECK(token == kUnwritten || (token >= -1 && token < vocab_size));
}

// Offsets past 2^31: rows a gigabyte apart in address arithmetic, though only two of them exist.
void test_offsets_beyond_32_bits() {
  constexpr int64_t kStride = int64_t{3} << 31;
  const Matrix<const int64_t> matrix{nullptr, kStride, 1};
  CHECK(reinterpret_cast<intptr_t>(&matrix.at(5, 7)) ==
        static_cast<intptr_t>((5 * kStride + 7) * sizeof(int64_t)));
}

// Group lanes that take turns: what lane 0 does not write, the others do, and all agree on the
// result.
struct LaneGroup {
  int64_t lane;
  int64_t num_lanes;
  int64_t rank() const { return lane; }
  int64_t size() const { return num_lanes; }
  template <typename T>
  std::vector<std::remove_const_t<T>> load(Vector<T> vector, int64_t n) const {
    std::vector<std::remove_const_t<T>> values(n);
    for (int64_t i = 0; i < n; ++i) values[i] = vector[i];
    return values;
  }
};

void test_chain_walk_over_many_lanes_equals_the_serial_one() {
  for (int trial = 0; trial < 2000; ++trial) {
    const int64_t num_steps = below(9);
    const int64_t width = num_steps + 1 + below(40);
    const Block drafts(1, num_steps, 2);
    const Block targets(1, num_steps + 1, 2);
    const auto target = [&](int64_t i) { return target_token(targets.words[i]); };
    std::vector<int32_t> serial(width, kUnwritten), lanes(width, kUnwritten);
    const auto expected = walk_chain_greedy(SerialGroup{}, {drafts.words.data()}, num_steps,
                                            kMaxVocabSize, target, {serial.data()}, width);
    for (int64_t lane = 0; lane < 32; ++lane) {
      const auto got = walk_chain_greedy(LaneGroup{lane, 32}, {drafts.words.data()}, num_steps,
                                         kMaxVocabSize, target, {lanes.data()}, width);
      CHECK(got.num_accepted == expected.num_accepted && got.bonus == expected.bonus &&
            got.num_anomalies == expected.num_anomalies);
    }
    CHECK(serial == lanes);
  }
}

}  // namespace

int main() {
  for (int trial = 0; trial < 20000; ++trial) {
    fuzz_tree();
    fuzz_chain();
    fuzz_chain_logits();
  }
  test_offsets_beyond_32_bits();
  test_chain_walk_over_many_lanes_equals_the_serial_one();
}
