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

// reject(row, token): see walk_tree_sampling; only trees write rejected drafts back.
template <typename Group, typename Reject>
AS_HD SamplingWalk sampling_walk(const Group& group, const SampleTreeParams& params,
                                 int64_t num_live, int64_t b, bool is_writer,
                                 const Reject& reject) {
  return walk_tree_sampling(group, params.tree, num_live, b, params.round.accept_limit(b),
                            is_writer, reject);
}
template <typename Group, typename Reject>
AS_HD SamplingWalk sampling_walk(const Group& group, const SampleChainParams& params,
                                 int64_t /*num_live*/, int64_t b, bool is_writer,
                                 const Reject& /*reject*/) {
  const bool counts_alone = static_cast<bool>(params.accepted_alone);
  const SamplingWalk walk =
      walk_chain_sampling(group, params.chain, b, params.round.accept_limit(b), is_writer,
                          params.output_token_ids.row(b), counts_alone);
  if (!is_writer) return walk;
  if (group.rank() == 0 && counts_alone) {
    params.accepted_alone[b] += static_cast<int32_t>(walk.num_alone);
  }
  if (group.rank() == 0 && params.emitted_drafts) {
    params.emitted_drafts[b] += static_cast<int32_t>(walk.result.num_accepted);
  }
  for (int64_t i = walk.result.num_accepted + 1 + group.rank(); i < params.output_width;
       i += group.size()) {
    params.output_token_ids.at(b, i) = -1;
  }
  return walk;
}

// A tree's rejected drafts are marked in draft_probs: the target's probability is taken off whole.
AS_HD void reject_draft(const SampleTreeParams& params, int64_t b, int64_t row, int64_t token) {
  params.tree.draft_probs.row(b, row)[token] = params.tree.target_probs.row(b, row)[token];
}
AS_HD void reject_draft(const SampleChainParams&, int64_t, int64_t, int64_t) {}

AS_HD ResidualRow residual_row(const SampleTreeParams& params, int64_t b,
                               const SamplingWalk& walk) {
  const SamplingTreeBatch& tree = params.tree;
  return {tree.target_probs.row(b, walk.row),
          walk.is_complete ? nullptr : tree.draft_probs.row(b, walk.row), -1};
}
AS_HD ResidualRow residual_row(const SampleChainParams& params, int64_t b,
                               const SamplingWalk& walk) {
  const SamplingChainBatch& chain = params.chain;
  ResidualRow residual{chain.target_probs.row(b, walk.row), nullptr, -1};
  if (walk.is_complete) return residual;
  if (chain.draft_probs) {
    residual.draft = chain.draft_probs.row(b, walk.row);
  } else {
    residual.excluded = chain.draft_token_ids.at(b, walk.row);
  }
  return residual;
}

AS_HD int64_t vocab_size(const SampleTreeParams& params) { return params.tree.vocab_size; }
AS_HD int64_t vocab_size(const SampleChainParams& params) { return params.chain.vocab_size; }
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

AS_HD void write_bonus(const SampleTreeParams& params, int64_t /*b*/, const SamplingWalk& walk) {
  params.tree.predicts[walk.last_id] = static_cast<int32_t>(walk.result.bonus);
}
AS_HD void write_bonus(const SampleChainParams& params, int64_t b, const SamplingWalk& walk) {
  params.output_token_ids.at(b, walk.result.num_accepted) = static_cast<int32_t>(walk.result.bonus);
}

AS_HD int64_t emitted_token(const SampleTreeParams& params, int64_t b, int64_t j) {
  return params.tree.predicts[params.tree.accept_index.at(b, j)];
}
AS_HD int64_t emitted_token(const SampleChainParams& params, int64_t b, int64_t j) {
  return params.output_token_ids.at(b, j);
}

}  // namespace adaptive_spec
