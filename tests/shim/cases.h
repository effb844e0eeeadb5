// Random calls of the ops for the kernel tests. Tensors are heap blocks of exactly the size that
// the op may use, filled with a sentinel wherever nothing else belongs, so that AddressSanitizer
// sees a stray read and a comparison of blocks a stray write. Each call exists twice, on equal
// memory: once for the CPU launcher, once for the kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "params.h"
#include "rows.h"

namespace cases {

using namespace adaptive_spec;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t bits() { return engine_(); }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound));
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  // Mostly small numbers, so that links and matches happen, and sometimes the worst there are.
  int64_t index(int64_t typical, bool malformed) {
    constexpr int64_t kExtreme[] = {std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<int64_t>::max(),
                                    int64_t{1} << 31,
                                    (int64_t{1} << 31) - 1,
                                    int64_t{1} << 32,
                                    -1,
                                    -2};
    if (malformed && one_in(12)) return kExtreme[below(std::size(kExtreme))];
    return below(std::max<int64_t>(typical, 1));
  }

 private:
  std::mt19937_64 engine_;
};

// The memory of one side of a comparison.
class Memory {
 public:
  template <typename T>
  T* add(int64_t count, int64_t offset = 0) {
    const size_t size = static_cast<size_t>(count + offset) * sizeof(T);
    blocks_.push_back({std::make_unique<std::byte[]>(size), size});
    std::memset(blocks_.back().data.get(), 0xB3, size);
    return reinterpret_cast<T*>(blocks_.back().data.get()) + offset;
  }
  void copy_from(const Memory& other) {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      std::memcpy(blocks_[i].data.get(), other.blocks_[i].data.get(), blocks_[i].size);
    }
  }
  // The number of the first block that differs, or -1.
  int first_difference(const Memory& other) const {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (std::memcmp(blocks_[i].data.get(), other.blocks_[i].data.get(), blocks_[i].size) != 0) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t size;
  };
  std::vector<Block> blocks_;
};

// Tensors of one call. The same sequence of requests on the other side gives the same layout, so
// `random` must be in the same state for both.
class Builder {
 public:
  Builder(Memory& memory, Random& random) : memory_(memory), random_(random) {}

  template <typename T>
  Vector<T> vector(int64_t size) {
    const int64_t stride = random_.between(1, 2);
    return {memory_.add<std::remove_const_t<T>>(size == 0 ? 0 : (size - 1) * stride + 1), stride};
  }
  template <typename T>
  Matrix<T> matrix(int64_t rows, int64_t cols) {
    const int64_t col_stride = random_.between(1, 2);
    const int64_t row_stride = cols * col_stride + random_.below(3);
    const int64_t size =
        rows == 0 || cols == 0 ? 0 : (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
    return {memory_.add<std::remove_const_t<T>>(size), row_stride, col_stride};
  }
  Memory& memory() { return memory_; }
  Random& random() { return random_; }

 private:
  Memory& memory_;
  Random& random_;
};

template <typename T, typename Fill>
void fill(const Vector<const T>& vector, int64_t size, const Fill& value) {
  for (int64_t i = 0; i < size; ++i) const_cast<T&>(vector[i]) = static_cast<T>(value());
}
template <typename T, typename Fill>
void fill(const Matrix<const T>& matrix, int64_t rows, int64_t cols, const Fill& value) {
  for (int64_t i = 0; i < rows; ++i) fill<T>(matrix.row(i), cols, value);
}

struct Sizes {
  int64_t batch_size;
  int64_t num_steps;
  bool malformed;
};

inline Sizes any_sizes(Random& random, int64_t max_batch, int64_t max_steps) {
  // Steps mostly below a warp's worth of lanes, sometimes beyond what it keeps in registers.
  const int64_t steps = random.one_in(8) ? max_steps : std::min<int64_t>(max_steps, 9);
  // Mostly few requests, now and then more than a block has lanes, or none.
  const int64_t few = std::min<int64_t>(max_batch, 20);
  return {random.one_in(20) ? 0 : random.between(1, random.one_in(4) ? max_batch : few),
          random.between(0, steps), random.one_in(3)};
}

inline const int32_t* any_num_reqs(Builder& build, int64_t batch_size) {
  Random& random = build.random();
  int32_t* num_reqs = build.memory().add<int32_t>(1);
  *num_reqs = static_cast<int32_t>(random.between(-1, batch_size + 1));
  return random.one_in(3) ? nullptr : num_reqs;
}

inline RoundParams any_round(Builder& build, const Sizes& sizes, int64_t num_verified) {
  Random& random = build.random();
  const auto [batch_size, num_steps, malformed] = sizes;
  RoundParams round;
  round.batch_size = batch_size;
  round.num_steps = num_steps;
  round.num_reqs = any_num_reqs(build, batch_size);
  if (random.one_in(2)) {
    round.max_accept = build.vector<const int32_t>(batch_size);
    fill(round.max_accept, batch_size, [&] { return random.between(-1, num_steps + 1); });
  }
  VerifyOutputs& outputs = round.outputs;
  outputs.accept_token_num = build.vector<int32_t>(batch_size);
  if (random.one_in(2)) {
    outputs.accept_lens = build.vector<int32_t>(batch_size);
    outputs.bonus_tokens = build.vector<int64_t>(batch_size);
    outputs.select_index = build.vector<int64_t>(batch_size);
    outputs.seq_lens = build.vector<const int64_t>(batch_size);
    outputs.new_seq_lens = build.vector<int64_t>(batch_size);
    fill(outputs.seq_lens, batch_size, [&] { return random.below(1000); });
  }
  if (random.one_in(2)) {
    outputs.accepted_tokens = build.vector<int64_t>(batch_size * (num_steps + 1));
  }
  outputs.num_verified = num_verified;
  return round;
}

inline VerifyTreeParams any_tree(Builder& build, const Sizes& sizes) {
  Random& random = build.random();
  const auto [batch_size, num_steps, malformed] = sizes;
  const int64_t num_nodes = random.one_in(6) ? random.between(30, 100) : random.between(1, 14);
  VerifyTreeParams params{any_round(build, sizes, num_nodes), {}};
  TreeBatch& tree = params.tree;
  tree.num_nodes = num_nodes;
  tree.predicts = build.vector<int32_t>(batch_size * num_nodes);
  tree.accept_index = build.matrix<int32_t>(batch_size, num_steps + 1);
  tree.candidates = build.matrix<const int64_t>(batch_size, num_nodes);
  tree.retrive_index = build.matrix<const int64_t>(batch_size, num_nodes);
  tree.retrive_next_token = build.matrix<const int64_t>(batch_size, num_nodes);
  tree.retrive_next_sibling = build.matrix<const int64_t>(batch_size, num_nodes);
  tree.target_predict = build.matrix<const int64_t>(batch_size, num_nodes);
  const auto at = [](const Matrix<const int64_t>& m, int64_t b, int64_t i) -> int64_t& {
    return const_cast<int64_t&>(m.at(b, i));
  };
  for (int64_t b = 0; b < batch_size; ++b) {
    for (int64_t i = 0; i < num_nodes; ++i) {
      at(tree.candidates, b, i) = random.index(3, malformed);
      at(tree.target_predict, b, i) = random.index(3, malformed);
      at(tree.retrive_index, b, i) = b * num_nodes + i;
      at(tree.retrive_next_token, b, i) = -1;
      at(tree.retrive_next_sibling, b, i) = -1;
    }
    for (int64_t i = 1; i < num_nodes; ++i) {
      const int64_t parent = random.between(std::max<int64_t>(0, i - 4), i - 1);
      at(tree.retrive_next_sibling, b, i) = tree.retrive_next_token.at(b, parent);
      at(tree.retrive_next_token, b, parent) = i;
    }
    if (!malformed) continue;
    for (int64_t i = 0; i < num_nodes; ++i) {
      if (random.one_in(10)) at(tree.retrive_next_token, b, i) = random.index(num_nodes + 1, true);
      if (random.one_in(5)) at(tree.retrive_next_sibling, b, i) = random.index(num_nodes + 1, true);
      if (random.one_in(20)) at(tree.retrive_index, b, i) = random.index(2 * num_nodes, true);
      // Two requests writing to one place would have no defined result.
      const int64_t flat_id = tree.retrive_index.at(b, i);
      const bool is_foreign =
          flat_id >= 0 && flat_id < batch_size * num_nodes && flat_id / num_nodes != b;
      if (is_foreign) at(tree.retrive_index, b, i) = -1;
    }
  }
  return params;
}

inline VerifyChainParams any_chain(Builder& build, const Sizes& sizes) {
  Random& random = build.random();
  const auto [batch_size, num_steps, malformed] = sizes;
  VerifyChainParams params{any_round(build, sizes, num_steps + 1), {}, {}, {}, 0};
  params.draft_tokens = build.matrix<const int64_t>(batch_size, num_steps);
  params.target_predict = build.matrix<const int64_t>(batch_size, num_steps + 1);
  params.output_width = num_steps + 1 + random.below(40);
  params.output_token_ids = build.matrix<int32_t>(batch_size, params.output_width);
  const auto token = [&, malformed = malformed] { return random.index(2, malformed); };
  fill(params.draft_tokens, batch_size, num_steps, token);
  fill(params.target_predict, batch_size, num_steps + 1, token);
  return params;
}

// An entry of a row of logits: few distinct values, so that maxima repeat.
template <typename T>
T any_logit(Random& random, bool malformed);
template <>
inline uint16_t any_logit<uint16_t>(Random& random, bool malformed) {
  // NaN, infinities, a subnormal and zeros, as half and bfloat16 alike.
  constexpr uint16_t kOdd[] = {0x7fc1, 0xff80, 0xfc00, 0x7c00, 0x0001, 0x8000, 0x0000};
  if (malformed)
    return random.one_in(3) ? static_cast<uint16_t>(random.bits()) : kOdd[random.below(7)];
  return static_cast<uint16_t>(0x3c00 + random.below(4) * 0x80);
}
template <>
inline float any_logit<float>(Random& random, bool malformed) {
  constexpr float kOdd[] = {NAN, -INFINITY, INFINITY, 1e-42f, -0.0f, 0.0f, 3.0f};
  if (malformed) return kOdd[random.below(7)];
  return static_cast<float>(random.below(4));
}

inline VerifyChainLogitsParams any_chain_logits(Builder& build, const Sizes& sizes,
                                                int64_t max_vocab) {
  Random& random = build.random();
  const auto [batch_size, num_steps, malformed] = sizes;
  VerifyChainLogitsParams params;
  params.round = any_round(build, sizes, num_steps + 1);
  const int64_t vocab_size =
      random.one_in(3) ? random.between(1, max_vocab) : random.between(1, 70);
  params.vocab_size = vocab_size;
  params.position_stride = vocab_size + random.below(3);
  params.request_stride = params.position_stride * (num_steps + 1) + random.below(3);
  params.draft_tokens = build.matrix<const int64_t>(batch_size, num_steps);
  params.output_width = num_steps + 1 + random.below(3);
  params.output_token_ids = build.matrix<int32_t>(batch_size, params.output_width);
  const int64_t size = batch_size == 0 ? 0
                                       : (batch_size - 1) * params.request_stride +
                                             num_steps * params.position_stride + vocab_size;
  const auto generate = [&, malformed = malformed]<typename T>(T* logits) {
    params.target_logits = logits;
    for (int64_t b = 0; b < batch_size; ++b) {
      for (int64_t i = 0; i <= num_steps; ++i) {
        T* row = logits + b * params.request_stride + i * params.position_stride;
        // A mixed row, or one of a single kind.
        const bool is_mixed = !malformed || random.one_in(2);
        const T same = any_logit<T>(random, malformed);
        for (int64_t k = 0; k < vocab_size; ++k) {
          row[k] = is_mixed ? any_logit<T>(random, malformed) : same;
        }
      }
    }
  };
  const int64_t misalignment = random.below(8);
  if (random.one_in(3)) {
    params.logits_type = LogitsType::kFloat32;
    generate(build.memory().add<float>(size, misalignment));
  } else {
    params.logits_type = random.one_in(2) ? LogitsType::kFloat16 : LogitsType::kBFloat16;
    generate(build.memory().add<uint16_t>(size, misalignment));
  }
  // Drafts that are often right: the reference's choice is the first largest entry.
  fill(params.draft_tokens, batch_size, num_steps, [&, malformed = malformed] {
    return random.index(std::min<int64_t>(vocab_size, 3), malformed);
  });
  return params;
}

inline UpdateParams any_update(Builder& build, const Sizes& sizes) {
  Random& random = build.random();
  UpdateParams params;
  params.batch_size = sizes.batch_size;
  params.num_steps = sizes.num_steps;
  params.num_reqs = any_num_reqs(build, sizes.batch_size);
  params.accept_token_num = build.vector<const int32_t>(sizes.batch_size);
  fill(params.accept_token_num, sizes.batch_size, [&] {
    return sizes.malformed && random.one_in(9) ? static_cast<int32_t>(random.bits())
                                               : random.between(0, sizes.num_steps);
  });
  return params;
}

inline ChainTreeParams any_chain_tree(Builder& build, const Sizes& sizes) {
  Random& random = build.random();
  ChainTreeParams params;
  params.batch_size = sizes.batch_size;
  params.num_nodes = sizes.num_steps + 1;
  params.num_reqs = any_num_reqs(build, sizes.batch_size);
  params.retrive_index = build.matrix<int64_t>(params.batch_size, params.num_nodes);
  params.retrive_next_token = build.matrix<int64_t>(params.batch_size, params.num_nodes);
  params.retrive_next_sibling = build.matrix<int64_t>(params.batch_size, params.num_nodes);
  if (random.one_in(2)) {
    params.positions = build.vector<int64_t>(params.batch_size * params.num_nodes);
    params.seq_lens = build.vector<const int64_t>(params.batch_size);
    fill(params.seq_lens, params.batch_size, [&] { return random.below(1000); });
  }
  return params;
}

// An adaptive state and its ring.
struct State {
  std::vector<int64_t> words;
  std::vector<int64_t> ring;

  explicit State(Random& random) {
    const int32_t num_slots = static_cast<int32_t>(random.between(1, 3));
    words.resize(num_state_words(num_slots));
    StateHeader* header = reinterpret_cast<StateHeader*>(words.data());
    *header = {kStateMagic, static_cast<int64_t>(words.size()), num_slots, 8, 0, 0, {}};
    SlotConfig* configs = reinterpret_cast<SlotConfig*>(header + 1);
    for (int32_t slot = 0; slot < num_slots; ++slot) {
      SlotConfig& config = configs[slot];
      config.ema_alpha = 0.3;
      config.down_hysteresis = -0.25;
      config.update_interval = random.between(1, 2);
      config.warmup_batches = random.below(2);
      config.probe_backoff = 1;
      config.batch_size = slot + 1;
      config.num_candidates = 3;
      config.candidate_steps[0] = 0;
      config.candidate_steps[1] = 1;
      config.candidate_steps[2] = 3;
    }
    ring.resize(num_ring_words(8, num_slots));
    reset_state(words.data());
    seed_ring(words.data(), ring.data());
  }
  AdaptiveTarget target(int32_t slot) {
    return {words.data(), ring.data(), static_cast<int64_t>(words.size()),
            static_cast<int64_t>(ring.size()), slot};
  }
  int32_t num_slots() const {
    return reinterpret_cast<const StateHeader*>(words.data())->num_slots;
  }
  bool operator==(const State&) const = default;
};

}  // namespace cases
