// Random calls of the ops, well-formed and not, as launchers get them: the binding has checked
// shapes and strides, and nothing about values.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "params.h"
#include "records.h"
#include "round.h"
#include "tensors.h"

namespace kernel_cases {

using namespace adaptive_spec;

// What a call is like, apart from its values.
struct Traits {
  int64_t batch_size;
  int64_t num_steps;
  int64_t num_live;
  const int32_t* num_reqs;
  bool is_malformed;
};

// A small number, or the worst there are.
inline int64_t any_int64(Random& random, int64_t typical, bool is_malformed) {
  if (!is_malformed || !random.one_in(10)) return random.below(std::max<int64_t>(typical, 1));
  constexpr int64_t kTwo31 = int64_t{1} << 31;
  return random.any_of({std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                        kTwo31, kTwo31 - 1, 2 * kTwo31, -kTwo31, int64_t{-1}, int64_t{-2}, typical,
                        typical + 1});
}

inline RoundParams any_round(Tensors& tensors, Random& random, const Traits& traits,
                             int64_t num_verified) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  const auto add = [&]<typename T>(Vector<T>& vector, const char* name) {
    vector = tensors.vector<T>(name, batch_size, num_live);
  };
  RoundParams round;
  round.batch_size = batch_size;
  round.num_steps = num_steps;
  round.num_reqs = num_reqs;
  if (random.one_in(3)) {
    add(round.max_accept, "max_accept");
    fill(round.max_accept, num_live, [&] {
      return random.one_in(9) ? static_cast<int32_t>(random.bits())
                              : random.between(-1, num_steps + 1);
    });
  }
  VerifyOutputs& outputs = round.outputs;
  outputs.num_verified = num_verified;
  add(outputs.accept_token_num, "accept_token_num");
  if (random.one_in(2)) add(outputs.accept_lens, "accept_lens");
  if (random.one_in(2)) add(outputs.bonus_tokens, "bonus_tokens");
  if (random.one_in(2)) add(outputs.select_index, "select_index");
  if (random.one_in(2)) {
    add(outputs.seq_lens, "seq_lens");
    add(outputs.new_seq_lens, "new_seq_lens");
    fill(outputs.seq_lens, num_live, [&] { return random.below(100'000); });
  }
  if (random.one_in(2)) {
    outputs.accepted_tokens = tensors.vector<int64_t>(
        "accepted_tokens", batch_size * (num_steps + 1), num_live * (num_steps + 1));
  }
  return round;
}

// Trees in which most walks go deep: a node's target is mostly the token of one of its children.
inline VerifyTreeParams any_tree(Tensors& tensors, Random& random, const Traits& traits,
                                 int64_t num_nodes) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  VerifyTreeParams params{any_round(tensors, random, traits, num_nodes), {}};
  TreeBatch& tree = params.tree;
  const auto input = [&](const char* name) {
    return tensors.matrix<const int64_t>(name, batch_size, num_nodes, num_live);
  };
  tree.num_nodes = num_nodes;
  tree.predicts = tensors.vector<int32_t>("predicts", batch_size * num_nodes, num_live * num_nodes);
  tree.accept_index = tensors.matrix<int32_t>("accept_index", batch_size, num_steps + 1, num_live);
  tree.candidates = input("candidates");
  tree.retrive_index = input("retrive_index");
  tree.retrive_next_token = input("retrive_next_token");
  tree.retrive_next_sibling = input("retrive_next_sibling");
  tree.target_predict = input("target_predict");

  // Flat ids in any order, each once: two requests that write to one place have no defined result.
  std::vector<int64_t> flat_ids(static_cast<size_t>(num_live * num_nodes));
  for (size_t i = 0; i < flat_ids.size(); ++i) flat_ids[i] = static_cast<int64_t>(i);
  const bool is_permuted = !is_malformed && random.one_in(3);
  if (is_permuted) {
    for (size_t i = flat_ids.size(); i > 1; --i) {
      std::swap(flat_ids[i - 1],
                flat_ids[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    }
  }
  const bool is_chain = random.one_in(4);
  for (int64_t b = 0; b < num_live; ++b) {
    for (int64_t i = 0; i < num_nodes; ++i) {
      entry(tree.candidates, b, i) = any_int64(random, 3, is_malformed);
      entry(tree.retrive_index, b, i) = flat_ids[static_cast<size_t>(b * num_nodes + i)];
      entry(tree.retrive_next_token, b, i) = -1;
      entry(tree.retrive_next_sibling, b, i) = -1;
    }
  }
  for (int64_t b = 0; b < num_live; ++b) {
    // By flat id, wherever that lies.
    fill(tree.target_predict.row(b), num_nodes, [&] { return any_int64(random, 3, is_malformed); });
  }
  for (int64_t b = 0; b < num_live; ++b) {
    for (int64_t i = 1; i < num_nodes; ++i) {
      const int64_t parent = is_chain ? i - 1 : random.between(std::max<int64_t>(0, i - 5), i - 1);
      entry(tree.retrive_next_sibling, b, i) = tree.retrive_next_token.at(b, parent);
      entry(tree.retrive_next_token, b, parent) = i;
      const int64_t parent_id = tree.retrive_index.at(b, parent);
      if (!random.one_in(4)) {
        entry(tree.target_predict, parent_id / num_nodes, parent_id % num_nodes) =
            tree.candidates.at(b, i);
      }
    }
    if (!is_malformed) continue;
    for (int64_t i = 0; i < num_nodes; ++i) {
      // Cycles, links out of the tree, ids of nowhere and ids that occur twice.
      const auto link = [&] { return any_int64(random, num_nodes, true); };
      if (random.one_in(10)) entry(tree.retrive_next_token, b, i) = link();
      if (random.one_in(4)) entry(tree.retrive_next_sibling, b, i) = link();
      if (random.one_in(12)) {
        const int64_t id = any_int64(random, num_nodes, true);
        const bool is_foreign = id >= num_nodes && id < num_live * num_nodes;
        entry(tree.retrive_index, b, i) =
            is_foreign || id < 0 || id >= num_nodes ? (is_foreign ? -3 : id) : b * num_nodes + id;
      }
    }
  }
  return params;
}

// Drafts and targets of few distinct tokens: runs of agreement of all lengths.
inline VerifyChainParams any_chain(Tensors& tensors, Random& random, const Traits& traits) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  VerifyChainParams params{any_round(tensors, random, traits, num_steps + 1), {}, {}, {}, 0};
  const int64_t extra = random.one_in(2) ? 0 : random.below(40);
  params.draft_tokens =
      tensors.matrix<const int64_t>("draft_tokens", batch_size, num_steps + extra, num_live);
  params.target_predict =
      tensors.matrix<const int64_t>("target_predict", batch_size, num_steps + 1 + extra, num_live);
  params.output_width = num_steps + 1 + extra;
  params.output_token_ids =
      tensors.matrix<int32_t>("output_token_ids", batch_size, params.output_width, num_live);
  for (int64_t b = 0; b < num_live; ++b) {
    const int64_t variety = random.between(1, 3);
    const auto token = [&] { return any_int64(random, variety, is_malformed); };
    fill(params.draft_tokens.row(b), num_steps, token);
    fill(params.target_predict.row(b), num_steps + 1, token);
    // The best case, which chance alone does not bring.
    for (int64_t i = 0; random.one_in(4) && i < num_steps; ++i) {
      entry(params.draft_tokens, b, i) = params.target_predict.at(b, i);
    }
  }
  return params;
}

// Logits as bits, of any of the three types.
template <typename Bits>
struct Entries;
template <>
struct Entries<uint16_t> {
  // Read as half or as bfloat16: NaN of both signs, infinities, subnormals, zeros of both signs.
  static constexpr uint16_t kOdd[] = {0x7fc1, 0xffff, 0xff80, 0xfc00, 0x7f80, 0x7c00,
                                      0x0001, 0x8001, 0x0000, 0x8000, 0x7bff, 0xfbff};
  static constexpr uint16_t kLowest = 0xfc00;
  static uint16_t ordinary(int64_t k) { return static_cast<uint16_t>(0x3c00 + 0x80 * k); }
};
template <>
struct Entries<uint32_t> {
  static constexpr uint32_t kOdd[] = {0x7fc00001, 0xffffffff, 0xff800000, 0x7f800000, 0x00000001,
                                      0x80000001, 0x00000000, 0x80000000, 0x7f7fffff, 0xff7fffff};
  static constexpr uint32_t kLowest = 0xff800000;
  static uint32_t ordinary(int64_t k) {
    return bits_from_float(static_cast<float>(k) * 0.5f - 1.0f);
  }
};

template <typename Bits>
void fill_row(Random& random, Bits* row, int64_t size, bool is_malformed) {
  using E = Entries<Bits>;
  const auto odd = [&] { return E::kOdd[random.below(static_cast<int64_t>(std::size(E::kOdd)))]; };
  // Few distinct values: maxima that occur many times, at any distance.
  const int64_t variety = random.any_of<int64_t>({1, 2, 2, 9, 60});
  const bool has_odd = is_malformed && random.one_in(2);
  for (int64_t i = 0; i < size; ++i) {
    row[i] = has_odd && random.one_in(4) ? odd() : E::ordinary(random.below(variety));
  }
  if (!is_malformed) return;
  if (random.one_in(6)) std::fill(row, row + size, odd());
  if (random.one_in(6)) {
    std::fill(row, row + size, E::kLowest);
    row[random.below(size)] = odd();
  }
  if (random.one_in(6)) {
    for (int64_t i = 0; i < size; ++i) row[i] = static_cast<Bits>(random.bits());
  }
}

template <typename T>
int64_t choice(const T* row, int64_t size) {
  Argmax<float> best;
  for (int64_t i = 0; i < size; ++i) best.take(comparable(row[i]), i);
  return best.index;
}

// [batch_size, num_positions, vocab_size] logits; behind row i of request b comes
// put_draft(b, i, token that the row would choose if it were greedy).
template <typename PutDraft>
LogitsRows any_logits(Tensors& tensors, Random& random, const Traits& traits, LogitsType type,
                      int64_t num_positions, int64_t vocab_size, const PutDraft& put_draft) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  LogitsRows logits;
  logits.vocab_size = vocab_size;
  logits.type = type;
  // Positions of a request side by side, or requests of a position; rows one after the other, with
  // a gap, or, if huge, gigabytes apart.
  const bool is_by_request = random.one_in(2);
  const int64_t row_stride = tensors.is_huge()
                                 ? Tensors::kHugeStride + random.below(9)
                                 : vocab_size + (random.one_in(2) ? 0 : random.below(9));
  const int64_t outer = row_stride * (is_by_request ? num_positions : batch_size);
  logits.request_stride = is_by_request ? outer : row_stride;
  logits.position_stride = is_by_request ? row_stride : outer;
  const int64_t num_rows = batch_size * num_positions;
  // Only what comes first in memory can be told apart as live by its place.
  const int64_t num_live_rows = is_by_request ? num_live * num_positions : num_rows;
  const auto fill_all = [&, num_live = num_live,
                         malformed = is_malformed]<typename T, typename Bits>(T*, Bits* data) {
    logits.data = data;
    for (int64_t b = 0; b < num_live; ++b) {
      for (int64_t i = 0; i < num_positions; ++i) {
        Bits* row = data + b * logits.request_stride + i * logits.position_stride;
        fill_row(random, row, vocab_size, malformed);
        put_draft(b, i, choice(reinterpret_cast<const T*>(row), vocab_size));
      }
    }
  };
  const auto rows = [&]<typename Bits>(Bits*) {
    return tensors.rows<Bits>("target_logits", num_rows, row_stride, vocab_size, num_live_rows);
  };
  constexpr uint16_t* k16Bits = nullptr;
  constexpr uint32_t* k32Bits = nullptr;
  switch (type) {
    case LogitsType::kFloat16:
      fill_all(static_cast<Half*>(nullptr), rows(k16Bits));
      break;
    case LogitsType::kBFloat16:
      fill_all(static_cast<BFloat16*>(nullptr), rows(k16Bits));
      break;
    default:
      fill_all(static_cast<float*>(nullptr), rows(k32Bits));
  }
  return logits;
}

// Drafts of a chain's logits, of which each request's first few are what the rows would choose
// greedily: by chance alone few would be right.
template <typename Params>
LogitsRows any_chain_rows(Tensors& tensors, Random& random, const Traits& traits, LogitsType type,
                          int64_t vocab_size, Params& params) {
  const int64_t num_steps = traits.num_steps;
  params.round = any_round(tensors, random, traits, num_steps + 1);
  params.draft_tokens =
      tensors.matrix<const int64_t>("draft_tokens", traits.batch_size, num_steps, traits.num_live);
  params.output_width = num_steps + 1 + (random.one_in(2) ? 0 : random.below(40));
  params.output_token_ids = tensors.matrix<int32_t>("output_token_ids", traits.batch_size,
                                                    params.output_width, traits.num_live);
  int64_t num_right = 0;
  return any_logits(tensors, random, traits, type, num_steps + 1, vocab_size,
                    [&](int64_t b, int64_t i, int64_t greedy) {
                      if (i == 0) num_right = random.between(0, 2 * num_steps);
                      if (i == num_steps) return;
                      entry(params.draft_tokens, b, i) =
                          i < num_right ? greedy
                                        : any_int64(random, vocab_size, traits.is_malformed);
                    });
}

inline VerifyChainLogitsParams any_chain_logits(Tensors& tensors, Random& random,
                                                const Traits& traits, LogitsType type,
                                                int64_t vocab_size) {
  VerifyChainLogitsParams params;
  params.logits = any_chain_rows(tensors, random, traits, type, vocab_size, params);
  return params;
}

// Numbers from 0 to 1, often on the borders that simple fractions make, and worse.
inline float any_coin(Random& random, bool is_malformed) {
  if (is_malformed && random.one_in(10)) return random.any_of({NAN, -1.0f, 1.0f, INFINITY});
  if (random.one_in(3)) return random.any_of({0.0f, 0.25f, 0.5f, 0.75f, 0x1.fffffep-1f});
  return static_cast<float>(random.below(1 << 24)) * 0x1p-24f;
}

// A row of probabilities: a few quarters, or many different ones; malformed also all zero, tiny,
// not normalised, or with anything in it.
inline void fill_probabilities(Random& random, float* row, int64_t size, bool is_malformed) {
  std::fill(row, row + size, 0.0f);
  const int64_t kind = random.below(is_malformed ? 8 : 3);
  if (kind == 0) {
    for (int i = 0; i < 4; ++i) row[random.below(size)] += 0.25f;
  } else if (kind < 6) {
    float total = 0.0f;
    for (int64_t i = 0; i < size; ++i) total += row[i] = random.below(100) + 1.0f;
    const float scale = kind < 4 ? total : kind == 4 ? total * 0.999f : total * 1e38f;
    for (int64_t i = 0; i < size; ++i) row[i] /= scale;
  }
  if (is_malformed && kind >= 5) {
    row[random.below(size)] = random.any_of({NAN, INFINITY, -INFINITY, -0.5f, 3e38f, 1e-42f, 1.0f});
  }
}

// [batch_size, num_positions, vocab_size], each row at its own distance from the next.
inline ProbabilityRows any_probabilities(Tensors& tensors, Random& random, const Traits& traits,
                                         const char* name, int64_t num_positions,
                                         int64_t vocab_size) {
  ProbabilityRows rows;
  rows.position_stride = tensors.is_huge() ? Tensors::kHugeStride + random.below(9)
                                           : vocab_size + (random.one_in(2) ? 0 : random.below(9));
  rows.request_stride = rows.position_stride * num_positions;
  rows.data = tensors.rows<float>(name, traits.batch_size * num_positions, rows.position_stride,
                                  vocab_size, traits.num_live * num_positions);
  for (int64_t b = 0; b < traits.num_live; ++b) {
    for (int64_t i = 0; i < num_positions; ++i) {
      fill_probabilities(random, rows.row(b, i), vocab_size, traits.is_malformed);
    }
  }
  return rows;
}

inline SampleTreeParams any_sampled_tree(Tensors& tensors, Random& random, const Traits& traits,
                                         int64_t num_nodes, int64_t vocab_size) {
  const VerifyTreeParams greedy = any_tree(tensors, random, traits, num_nodes);
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  SampleTreeParams params;
  params.round = greedy.round;
  SamplingTreeBatch& tree = params.tree;
  tree.predicts = greedy.tree.predicts;
  tree.accept_index = greedy.tree.accept_index;
  tree.candidates = greedy.tree.candidates;
  tree.retrive_index = greedy.tree.retrive_index;
  tree.retrive_next_token = greedy.tree.retrive_next_token;
  tree.retrive_next_sibling = greedy.tree.retrive_next_sibling;
  tree.num_nodes = num_nodes;
  tree.vocab_size = vocab_size;
  tree.threshold_single = random.one_in(3) ? 0.5f : 1.0f;
  tree.threshold_acc = random.one_in(3) ? 0.75f : 1.0f;
  tree.coins = tensors.matrix<const float>("uniform_samples", batch_size, num_nodes, num_live);
  tree.final_coins =
      tensors.vector<const float>("uniform_samples_for_final_sampling", batch_size, num_live);
  const auto coin = [&, malformed = is_malformed] { return any_coin(random, malformed); };
  fill(tree.coins, num_live, num_nodes, coin);
  fill(tree.final_coins, num_live, coin);
  tree.target_probs =
      any_probabilities(tensors, random, traits, "target_probs", num_nodes, vocab_size);
  tree.draft_probs =
      any_probabilities(tensors, random, traits, "draft_probs", num_nodes, vocab_size);
  return params;
}

inline SampleChainParams any_sampled_chain(Tensors& tensors, Random& random, const Traits& traits,
                                           int64_t vocab_size) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  SampleChainParams params;
  params.round = any_round(tensors, random, traits, num_steps + 1);
  SamplingChainBatch& chain = params.chain;
  chain.vocab_size = vocab_size;
  chain.is_block = random.one_in(2);
  chain.draft_token_ids =
      tensors.matrix<const int32_t>("draft_token_ids", batch_size, num_steps, num_live);
  chain.coins = tensors.matrix<const float>("uniform_samples", batch_size, num_steps, num_live);
  chain.final_coins =
      tensors.vector<const float>("uniform_samples_for_final_sampling", batch_size, num_live);
  const auto coin = [&, malformed = is_malformed] { return any_coin(random, malformed); };
  fill(chain.coins, num_live, num_steps, coin);
  fill(chain.final_coins, num_live, coin);
  fill(chain.draft_token_ids, num_live, num_steps, [&, malformed = is_malformed] {
    return any_int64(random, random.one_in(2) ? vocab_size : 3, malformed);
  });
  chain.target_probs =
      any_probabilities(tensors, random, traits, "target_probs", num_steps + 1, vocab_size);
  if (!random.one_in(3)) {
    chain.draft_probs =
        any_probabilities(tensors, random, traits, "draft_probs", num_steps, vocab_size);
  }
  params.output_width = num_steps + 1 + (random.one_in(2) ? 0 : random.below(40));
  params.output_token_ids =
      tensors.matrix<int32_t>("output_token_ids", batch_size, params.output_width, num_live);
  if (random.one_in(2)) {
    params.accepted_alone = tensors.vector<int32_t>("accepted_alone", batch_size, num_live);
    params.emitted_drafts = tensors.vector<int32_t>("emitted_drafts", batch_size, num_live);
    fill(params.accepted_alone, num_live, [&] { return random.below(100); });
    fill(params.emitted_drafts, num_live, [&] { return random.below(100); });
  }
  return params;
}

// A number near 1, where a rule changes, or the worst there are.
inline float any_knob(Random& random, std::initializer_list<float> usual, bool is_malformed) {
  if (!is_malformed || !random.one_in(6)) return random.any_of(usual);
  return random.any_of({NAN, INFINITY, -INFINITY, -1.0f, 0.0f, -0.0f, 1e-42f, 1e-6f, 1e4f, 3e38f});
}

inline SamplingRules any_rules(Tensors& tensors, Random& random, const Traits& traits,
                               int64_t vocab_size) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  SamplingRules rules;
  const auto add = [&, batch_size = batch_size, num_live = num_live]<typename T>(
                       Vector<const T>& vector, const char* name, const auto& value) {
    vector = tensors.vector<const T>(name, batch_size, num_live);
    fill(vector, num_live, value);
  };
  const auto knob = [&, malformed = is_malformed](std::initializer_list<float> usual) {
    return any_knob(random, usual, malformed);
  };
  add(rules.seeds, "seeds", [&] { return random.one_in(4) ? 7 : random.bits(); });
  if (!random.one_in(4)) {
    add(rules.temperature, "temperature", [&] { return knob({0.0f, 0.3f, 0.7f, 1.0f, 2.0f}); });
  }
  if (random.one_in(3)) {
    add(rules.top_k, "top_k", [&, malformed = is_malformed] {
      return static_cast<int32_t>(any_int64(random, random.one_in(2) ? 5 : vocab_size, malformed));
    });
  }
  if (random.one_in(3)) {
    add(rules.top_p, "top_p", [&] { return knob({0.1f, 0.5f, 0.9f, 0.999f, 1.0f}); });
  }
  if (random.one_in(3)) add(rules.min_p, "min_p", [&] { return knob({0.0f, 0.01f, 0.2f, 0.9f}); });
  rules.stream = kKindsOfNoise * static_cast<uint32_t>(random.below(3));
  return rules;
}

inline SampleChainLogitsParams any_sampled_chain_logits(Tensors& tensors, Random& random,
                                                        const Traits& traits, LogitsType type,
                                                        int64_t vocab_size) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  SampleChainLogitsParams params;
  params.logits.rows = any_chain_rows(tensors, random, traits, type, vocab_size, params);
  params.logits.rules = any_rules(tensors, random, traits, vocab_size);
  params.positions = tensors.vector<const int64_t>("positions", batch_size, num_live);
  fill(params.positions, num_live,
       [&, malformed = is_malformed] { return any_int64(random, 100'000, malformed); });
  if (random.one_in(3)) {
    params.draft_probs =
        any_probabilities(tensors, random, traits, "draft_probs", num_steps, vocab_size);
  }
  if (random.one_in(2)) {
    params.logits.error_mask = tensors.vector<bool>("error_mask", batch_size, num_live);
    fill(params.logits.error_mask, num_live, [&] { return random.one_in(4); });
  }
  return params;
}

inline SampleTreeLogitsParams any_sampled_tree_logits(Tensors& tensors, Random& random,
                                                      const Traits& traits, LogitsType type,
                                                      int64_t num_nodes, int64_t vocab_size) {
  const auto [batch_size, num_steps, num_live, num_reqs, is_malformed] = traits;
  const VerifyTreeParams greedy = any_tree(tensors, random, traits, num_nodes);
  SampleTreeLogitsParams params;
  params.round = greedy.round;
  static_cast<Trees&>(params.tree) = greedy.tree;
  params.logits.rows = any_logits(tensors, random, traits, type, num_nodes, vocab_size,
                                  [&](int64_t b, int64_t i, int64_t greedy_token) {
                                    // A few rows are followed by what they would choose greedily.
                                    const int64_t child = params.tree.retrive_next_token.at(b, i);
                                    if (child <= 0 || child >= num_nodes || random.one_in(3))
                                      return;
                                    entry(params.tree.candidates, b, child) = greedy_token;
                                  });
  params.logits.rules = any_rules(tensors, random, traits, vocab_size);
  params.positions = tensors.matrix<const int64_t>("positions", batch_size, num_nodes, num_live);
  fill(params.positions, num_live, num_nodes,
       [&, malformed = is_malformed] { return any_int64(random, 100'000, malformed); });
  if (random.one_in(2)) {
    params.logits.error_mask = tensors.vector<bool>("error_mask", batch_size, num_live);
    fill(params.logits.error_mask, num_live, [&] { return random.one_in(4); });
  }
  return params;
}

inline UpdateParams any_update(Tensors& tensors, Random& random, const Traits& traits) {
  UpdateParams params;
  params.batch_size = traits.batch_size;
  params.num_steps = traits.num_steps;
  params.num_reqs = traits.num_reqs;
  params.accept_token_num =
      tensors.vector<const int32_t>("accept_token_num", traits.batch_size, traits.num_live);
  fill(params.accept_token_num, traits.num_live, [&] {
    return traits.is_malformed && random.one_in(5) ? static_cast<int32_t>(random.bits())
                                                   : random.between(0, traits.num_steps);
  });
  return params;
}

inline ChainTreeParams any_chain_tree(Tensors& tensors, Random& random, const Traits& traits,
                                      int64_t num_nodes) {
  const auto output = [&](const char* name) {
    return tensors.matrix<int64_t>(name, traits.batch_size, num_nodes, traits.num_live);
  };
  ChainTreeParams params;
  params.batch_size = traits.batch_size;
  params.num_nodes = num_nodes;
  params.num_reqs = traits.num_reqs;
  params.retrive_index = output("retrive_index");
  params.retrive_next_token = output("retrive_next_token");
  params.retrive_next_sibling = output("retrive_next_sibling");
  if (random.one_in(2)) {
    params.positions = tensors.vector<int64_t>("positions", traits.batch_size * num_nodes,
                                               traits.num_live * num_nodes);
    params.seq_lens = tensors.vector<const int64_t>("seq_lens", traits.batch_size, traits.num_live);
    fill(params.seq_lens, traits.num_live, [&] { return random.below(100'000); });
  }
  return params;
}

// An adaptive state with its ring, in exactly the memory that it needs.
class State {
 public:
  explicit State(Random& random) {
    const int32_t num_slots = static_cast<int32_t>(random.between(1, 3));
    const int32_t ring_depth = static_cast<int32_t>(random.any_of<int64_t>({8, 16}));
    words_.resize(static_cast<size_t>(num_state_words(num_slots)));
    ring_.resize(static_cast<size_t>(num_ring_words(ring_depth, num_slots)));
    StateHeader& header = *reinterpret_cast<StateHeader*>(words_.data());
    header = {kStateMagic, static_cast<int64_t>(words_.size()), num_slots, ring_depth, 0, 0, {}};
    SlotConfig* configs = reinterpret_cast<SlotConfig*>(&header + 1);
    for (int32_t slot = 0; slot < num_slots; ++slot) {
      SlotConfig& config = configs[slot];
      config.ema_alpha = random.any_of({0.2, 0.7, 1.0});
      config.down_hysteresis = random.any_of({0.0, -0.25});
      config.ceiling_coeff = random.any_of({0.0, 1.5});
      config.update_interval = random.between(1, 3);
      config.warmup_batches = random.below(2);
      config.probe_backoff = random.between(1, 2);
      config.batch_size = 1 << slot;
      for (int32_t steps : {0, 1, 2, 3, 5, 9, 17, 40, 64}) {
        if (random.one_in(2)) config.candidate_steps[config.num_candidates++] = steps;
      }
      if (config.num_candidates == 0) config.candidate_steps[config.num_candidates++] = 2;
      config.initial_index = config.num_candidates / 2;
    }
    reset_state(words_.data());
    seed_ring(words_.data(), ring_.data());
  }
  AdaptiveTarget target(int32_t slot) {
    return {words_.data(), ring_.data(), static_cast<int64_t>(words_.size()),
            static_cast<int64_t>(ring_.size()), slot};
  }
  int32_t num_slots() const {
    return reinterpret_cast<const StateHeader*>(words_.data())->num_slots;
  }
  int32_t steps(int32_t slot) { return StateView(words_.data()).steps(slot); }
  // Makes it none, and one again.
  void spoil() { words_[0] ^= 1; }
  bool operator==(const State&) const = default;

 private:
  std::vector<int64_t> words_;
  std::vector<int64_t> ring_;
};

}  // namespace kernel_cases
