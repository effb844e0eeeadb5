// One request's share of the ops that verify by sampling: the walk, the row that the last token is
// drawn from, and what is written once it has been. The drawing in between is each backend's own,
// since there the row is spread over lanes.
#pragma once

#include <cstdint>

#include "argmax.h"
#include "draw.h"
#include "macros.h"
#include "params.h"
#include "sampling_walks.h"

namespace adaptive_spec {

// reject(row, token): see walk_tree_sampling; only trees write rejected drafts back. joint: see
// walk_chain_sampling; [kMaxSteps + 1].
template <typename Group, typename Reject>
AS_HD SamplingWalk sampling_walk(const Group& group, const SampleTreeParams& params,
                                 int64_t num_live, int64_t b, bool is_writer, float* /*joint*/,
                                 const Reject& reject) {
  return walk_tree_sampling(group, params.tree, num_live, b, params.round.accept_limit(b),
                            is_writer, reject);
}
template <typename Group, typename Reject>
AS_HD SamplingWalk sampling_walk(const Group& group, const SampleChainParams& params,
                                 int64_t /*num_live*/, int64_t b, bool /*is_writer*/, float* joint,
                                 const Reject& /*reject*/) {
  return walk_chain_sampling(group, params.chain, b, params.round.accept_limit(b),
                             static_cast<bool>(params.accepted_alone), joint);
}

// A tree's rejected drafts are marked in draft_probs: the target's probability is taken off whole.
AS_HD void reject_draft(const SampleTreeParams& params, int64_t b, int64_t row, int64_t token) {
  params.tree.draft_probs.row(b, row)[token] = params.tree.target_probs.row(b, row)[token];
}
AS_HD void reject_draft(const SampleChainParams&, int64_t, int64_t, int64_t) {}

// Row i of those that the walk has left to draw from, counted from walk.row.
AS_HD ResidualRow residual_row(const SampleTreeParams& params, int64_t b, const SamplingWalk& walk,
                               int64_t /*i*/, const float* /*joint*/) {
  const SamplingTreeBatch& tree = params.tree;
  return {tree.target_probs.row(b, walk.row),
          walk.is_complete ? nullptr : tree.draft_probs.row(b, walk.row)};
}
AS_HD ResidualRow residual_row(const SampleChainParams& params, int64_t b, const SamplingWalk& walk,
                               int64_t i, const float* joint) {
  const SamplingChainBatch& chain = params.chain;
  const int64_t row = walk.row + i;
  ResidualRow residual{chain.target_probs.row(b, row)};
  if (row == params.round.accept_limit(b)) return residual;
  if (chain.is_block) residual.scale = joint[row];
  if (chain.draft_probs) {
    residual.draft = chain.draft_probs.row(b, row);
  } else {
    residual.excluded = chain.draft_token_ids.at(b, row);
  }
  return residual;
}

// Ends a walk that has several rows left, given each row's sum: total_units(i).
template <typename Units>
AS_HD void settle(const SampleTreeParams&, int64_t, SamplingWalk&, const float*, const Units&) {}
template <typename Units>
AS_HD void settle(const SampleChainParams& params, int64_t b, SamplingWalk& walk,
                  const float* joint, const Units& total_units) {
  const SamplingChainBatch& chain = params.chain;
  if (!chain.is_block) return;
  const int64_t limit = walk.num_rows - 1;
  const double units = units_per_weight(chain.vocab_size);
  int64_t last = 0;
  for (int64_t i = 1; i <= limit; ++i) {
    const float coin = chain.coins.at(b, i - 1);
    const bool passes =
        i == limit ? coin < joint[i] : passes_block(coin, joint[i], total_units(i) / units);
    if (passes) last = i;
  }
  walk.result.num_accepted = last;
  walk.row = last;
  walk.num_rows = 1;
  walk.is_complete = last == limit;
}

AS_HD int64_t vocab_size(const SampleTreeParams& params) { return params.tree.vocab_size; }
AS_HD int64_t vocab_size(const SampleChainParams& params) { return params.chain.vocab_size; }
// Rows whose sums a request may need: the share of a workspace that it takes.
AS_HD int64_t max_rows_to_sum(const SampleTreeParams&) { return 1; }
AS_HD int64_t max_rows_to_sum(const SampleChainParams& params) {
  return params.chain.is_block ? params.round.num_steps + 1 : 1;
}
AS_HD float final_coin(const SampleTreeParams& params, int64_t b) {
  return params.tree.final_coins[b];
}
AS_HD float final_coin(const SampleChainParams& params, int64_t b) {
  return params.chain.final_coins[b];
}

// Ends a walk with the token that was drawn from its row. Where nothing was left to draw from (the
// draft was exactly the target, or what remains is too little to count), that is the target's most
// likely token; where it has none either, token 0.
AS_HD void complete(SamplingWalk& walk, const RowSum& sum, int64_t drawn) {
  const bool has_best = sum.best.value > 0.0f;
  walk.result.bonus = sum.units > 0 ? drawn : has_best ? sum.best.index : kFallbackToken;
  walk.result.num_anomalies += sum.best.has_nan || !has_best;
}

// What a request has emitted, as far as the walk itself has not written it; by all lanes.
template <typename Group>
AS_HD void write_tokens(const Group& group, const SampleTreeParams& params, int64_t /*b*/,
                        const SamplingWalk& walk) {
  if (group.rank() == 0)
    params.tree.predicts[walk.last_id] = static_cast<int32_t>(walk.result.bonus);
}
template <typename Group>
AS_HD void write_tokens(const Group& group, const SampleChainParams& params, int64_t b,
                        const SamplingWalk& walk) {
  const int64_t n = walk.result.num_accepted;
  const Vector<int32_t> output = params.output_token_ids.row(b);
  for (int64_t i = group.rank(); i < params.output_width; i += group.size()) {
    output[i] = i < n    ? params.chain.draft_token_ids.at(b, i)
                : i == n ? static_cast<int32_t>(walk.result.bonus)
                         : -1;
  }
  if (group.rank() != 0) return;
  if (params.accepted_alone) params.accepted_alone[b] += static_cast<int32_t>(walk.num_alone);
  if (params.emitted_drafts) params.emitted_drafts[b] += static_cast<int32_t>(n);
}

AS_HD int64_t emitted_token(const SampleTreeParams& params, int64_t b, int64_t j) {
  return params.tree.predicts[params.tree.accept_index.at(b, j)];
}
AS_HD int64_t emitted_token(const SampleChainParams& params, int64_t b, int64_t j) {
  return params.output_token_ids.at(b, j);
}

}  // namespace adaptive_spec
