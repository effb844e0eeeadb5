// Verification by sampling, for one request: which drafts the target's distribution accepts, and
// which row the token behind them is drawn from. The uniform numbers ("coins") are inputs, so every
// backend takes the same decisions. Rules and their sources are in docs/semantics.md.
//
// As with the greedy walks (walks.h), a walk ends on any input, stays inside the tensors and leaves
// it to the caller to emit at least one token.
#pragma once

#include <cstdint>

#include "draw.h"
#include "group.h"
#include "macros.h"
#include "strided.h"
#include "walks.h"

namespace adaptive_spec {

// A batch of rows of probabilities, V contiguous entries each.
struct ProbabilityRows {
  float* data = nullptr;
  int64_t request_stride = 0;
  int64_t position_stride = 0;

  AS_HD float* row(int64_t b, int64_t i) const {
    return data + b * request_stride + i * position_stride;
  }
  AS_HD explicit operator bool() const { return data != nullptr; }
};

struct SamplingWalk {
  WalkResult result;         // without the bonus token, which is yet to be drawn
  int64_t last_id = 0;       // trees: where in predicts the bonus token goes
  int64_t row = 0;           // the row it is drawn from, or the first of those it may be
  int64_t num_rows = 1;      // how many that are; more than one until `settle`
  bool is_complete = false;  // the drafts ended, or their limit did: nothing was rejected there
  int64_t num_alone = 0;     // chains, if asked for: drafts that would be accepted by themselves
};

// A batch of trees whose drafts are verified against the target's probabilities alone.
struct SamplingTreeBatch : Trees {
  Matrix<const float> coins;        // [B, D]
  Vector<const float> final_coins;  // [B]
  ProbabilityRows target_probs;     // [B, D, V]
  ProbabilityRows draft_probs;      // [B, D, V]
  int64_t vocab_size = 0;
  float threshold_single = 1.0f;
  float threshold_acc = 1.0f;
};

// At a node, the coin is compared with the target's probability of its children added up one by
// one, so that each child is accepted with its own probability. `reject(row, token)` is called for
// each child that was not. is_writer: false for a group that repeats another one's walk.
template <typename Group, typename Reject>
AS_HD SamplingWalk walk_tree_sampling(const Group& group, const SamplingTreeBatch& batch,
                                      int64_t num_live, int64_t b, int64_t num_steps,
                                      bool is_writer, const Reject& reject) {
  const Tree<Group> tree(group, batch, num_live, b);
  const auto coins = group.load(batch.coins.row(b), batch.num_nodes);
  const auto accept_index = batch.accept_index.row(b);
  const bool writes = is_writer && group.rank() == 0;
  const float scale = batch.threshold_acc > 1e-9f ? batch.threshold_acc : 1e-9f;

  SamplingWalk walk;
  int64_t& num_anomalies = walk.result.num_anomalies;
  walk.last_id = tree.root_id(num_anomalies);
  while (true) {
    if (writes) accept_index[walk.result.num_accepted] = static_cast<int32_t>(walk.last_id);
    if (walk.result.num_accepted == num_steps) {
      walk.is_complete = true;
      break;
    }
    const float coin = coins[walk.row];
    const float* probs = batch.target_probs.row(b, walk.row);
    float mass = 0.0f;
    const int64_t child = tree.find_child(walk.row, num_anomalies, [&](int64_t token, bool has_id) {
      if (token < 0 || token >= batch.vocab_size || !has_id) {
        ++num_anomalies;
        return false;
      }
      const float p = probs[token];
      if (p > 0.0f) {
        mass += p;
        if (coin < mass / scale || p >= batch.threshold_single) return true;
      }
      reject(walk.row, token);
      return false;
    });
    if (child == -1) break;
    const int64_t accepted = tree.token(child);
    if (writes) batch.predicts[walk.last_id] = static_cast<int32_t>(accepted);
    walk.row = child;
    walk.last_id = tree.flat_id(child);
    ++walk.result.num_accepted;
  }
  return walk;
}

// A batch of chains whose drafts were sampled from known distributions, or are certain.
struct SamplingChainBatch {
  Matrix<const int32_t> draft_token_ids;  // [B, >= S]
  Matrix<const float> coins;              // [B, >= S]
  Vector<const float> final_coins;        // [B]
  ProbabilityRows target_probs;           // [B, >= S + 1, V]
  ProbabilityRows draft_probs;            // [B, >= S, V]; null: each draft had probability 1
  int64_t vocab_size = 0;
  bool is_block = false;  // verify a request's drafts as a block; S is at most kMaxSteps then
};

// What the target and the draft say of one draft token.
struct DraftChance {
  float p = 0.0f;
  float q = 1.0f;
  bool is_token = false;
};

AS_HD DraftChance draft_chance(const SamplingChainBatch& batch, int64_t b, int64_t i,
                               int64_t token) {
  if (token < 0 || token >= batch.vocab_size) return {};
  return {batch.target_probs.row(b, i)[token],
          batch.draft_probs ? batch.draft_probs.row(b, i)[token] : 1.0f, true};
}

// How probable the target finds a block of drafts, compared with the draft and never above 1, after
// one more of them.
AS_HD float joint_ratio(float before, const DraftChance& chance) {
  const float scaled = before * chance.p;
  if (!chance.is_token || !(scaled > 0.0f)) return 0.0f;
  if (scaled >= chance.q) return 1.0f;
  const float ratio = scaled / chance.q;
  return ratio > 0.0f ? ratio : 0.0f;
}

// A coin below residual / (residual + 1 - joint), where the residual is what the row behind a draft
// has left.
AS_HD bool passes_block(float coin, float joint, double residual) {
  return static_cast<double>(coin) * (residual + (1.0 - static_cast<double>(joint))) < residual;
}

// Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): a draft is accepted with
// probability min(1, p / q), and the first one that is not ends the walk. For a block (Sun et al.
// 2024) only the joint ratios after 0, 1, ... num_steps drafts are computed here; the last draft
// that passes ends it, which takes the sums of all rows (`settle`). joint: [num_steps + 1], blocks
// only; written by lane 0, so that a barrier has to follow.
template <typename Group>
AS_HD SamplingWalk walk_chain_sampling(const Group& group, const SamplingChainBatch& batch,
                                       int64_t b, int64_t num_steps, bool counts_alone,
                                       float* joint) {
  const auto drafts = group.load(batch.draft_token_ids.row(b), num_steps);
  const auto coins = group.load(batch.coins.row(b), num_steps);
  const bool is_writer = group.rank() == 0;
  SamplingWalk walk;
  bool goes_on = true;
  float ratio = 1.0f;
  if (batch.is_block && is_writer) joint[0] = ratio;
  for (int64_t i = 0; i < num_steps && (goes_on || counts_alone || batch.is_block); ++i) {
    const DraftChance chance = draft_chance(batch, b, i, drafts[i]);
    const bool is_accepted = chance.is_token && coins[i] * chance.q < chance.p;
    walk.num_alone += is_accepted;
    walk.result.num_anomalies += goes_on && !chance.is_token;
    if (batch.is_block) {
      ratio = joint_ratio(ratio, chance);
      if (is_writer) joint[i + 1] = ratio;
      goes_on = goes_on && chance.is_token;
    } else {
      goes_on = goes_on && is_accepted;
      walk.result.num_accepted += goes_on;
    }
  }
  walk.row = batch.is_block ? 0 : walk.result.num_accepted;
  walk.num_rows = batch.is_block ? num_steps + 1 : 1;
  walk.is_complete = walk.result.num_accepted == num_steps;
  return walk;
}

}  // namespace adaptive_spec
