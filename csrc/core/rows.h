// One request's share of every op, and the end of the round: the parts that a CPU loop and a CUDA
// kernel put together in their own way.
#pragma once

#include <cstdint>

#include "macros.h"
#include "params.h"
#include "round.h"
#include "walks.h"

namespace adaptive_spec {

template <typename Group>
AS_HD WalkResult verify_row(const Group& group, const VerifyTreeParams& params, int64_t num_live,
                            int64_t b) {
  return walk_tree_greedy(group, params.tree, num_live, b, params.round.accept_limit(b));
}

template <typename Group>
AS_HD WalkResult verify_row(const Group& group, const VerifyChainParams& params,
                            int64_t /*num_live*/, int64_t b) {
  const int64_t limit = params.round.accept_limit(b);
  const auto choices = group.load(params.target_predict.row(b), limit + 1);
  const auto target = [&](int64_t position) { return target_token(choices[position]); };
  return walk_chain_greedy(group, params.draft_tokens.row(b), limit, kMaxVocabSize, target,
                           params.output_token_ids.row(b), params.output_width);
}

// The j-th token that request b has emitted.
AS_HD int64_t emitted_token(const VerifyTreeParams& params, int64_t b, int64_t j) {
  return params.tree.predicts[params.tree.accept_index.at(b, j)];
}
AS_HD int64_t emitted_token(const VerifyChainParams& params, int64_t b, int64_t j) {
  return params.output_token_ids.at(b, j);
}

// What some of a round's requests add up to.
struct RoundSums {
  int64_t accepted = 0;
  int64_t anomalies = 0;

  AS_HD void add(const WalkResult& walk) {
    accepted += walk.num_accepted;
    anomalies += walk.num_anomalies;
  }
  // A count that came from elsewhere; one that cannot be is taken to the nearest that can.
  AS_HD void add_count(int64_t count, int64_t num_steps) {
    const int64_t in_range = count < 0 ? 0 : count > num_steps ? num_steps : count;
    accepted += in_range;
    anomalies += in_range != count;
  }
};

// The binding has checked a state that it can read; one on a device is checked there, before
// anything of it is written. A round that it cannot take is not counted, and the host's wait for it
// fails by its bound.
AS_HD bool is_usable(const AdaptiveTarget& adaptive) {
  return state_error(adaptive.words, adaptive.num_words, adaptive.num_ring_words, adaptive.slot) ==
         nullptr;
}

// By one thread, once all requests are in `sums`.
AS_HD void close_round(const AdaptiveTarget& adaptive, int64_t num_steps, const RoundSums& sums,
                       int64_t num_live) {
  if (adaptive.words == nullptr || !is_usable(adaptive)) return;
  finish_round(adaptive.words, adaptive.ring, {adaptive.slot, static_cast<int32_t>(num_steps)},
               sums.accepted, num_live, sums.anomalies);
}

// Node i of request b's chain.
AS_HD void write_chain_node(const ChainTreeParams& params, int64_t b, int64_t i) {
  const int64_t num_nodes = params.num_nodes;
  params.retrive_index.at(b, i) = b * num_nodes + i;
  params.retrive_next_token.at(b, i) = i + 1 < num_nodes ? i + 1 : -1;
  params.retrive_next_sibling.at(b, i) = -1;
  if (params.positions) params.positions[b * num_nodes + i] = params.seq_lens[b] + i;
}

}  // namespace adaptive_spec
