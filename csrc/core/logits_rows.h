// One request's share of the ops that are given logits. Each of its rows makes a choice, in any
// order; then the choices are walked greedily. A row that stands behind a draft which is not the
// choice of the row before it is not needed.
#pragma once

#include <cstdint>

#include "macros.h"
#include "params.h"
#include "row_choice.h"
#include "walks.h"

namespace adaptive_spec {

AS_HD const LogitsRows& logits_rows(const VerifyChainLogitsParams& params) { return params.logits; }
template <typename Params>
AS_HD const LogitsRows& logits_rows(const Params& params) {
  return params.logits.rows;
}

// Rows of a request that a walk may come to.
template <typename Params>
AS_HD int64_t num_rows(const Params& params, int64_t b) {
  return params.round.accept_limit(b) + 1;
}
AS_HD int64_t num_rows(const SampleTreeLogitsParams& params, int64_t /*b*/) {
  return params.tree.num_nodes;
}
// The same for every request: how far apart they are in a workspace.
template <typename Params>
AS_HD int64_t max_rows(const Params& params) {
  return params.round.num_steps + 1;
}
AS_HD int64_t max_rows(const SampleTreeLogitsParams& params) { return params.tree.num_nodes; }

// Whether the rows behind row i are not needed, whatever the rows before it say.
template <typename Params>
AS_HD bool ends_at(const Params& params, int64_t b, int64_t i, const TargetToken& choice) {
  return i < params.round.accept_limit(b) && !is_accepted(choice, params.draft_tokens.at(b, i));
}
AS_HD bool ends_at(const SampleTreeLogitsParams&, int64_t, int64_t, const TargetToken&) {
  return false;
}

// By all lanes; one of them writes.
template <typename Group>
AS_HD void mark_error(const Group& group, const SampledLogits& logits, int64_t b, bool has_error) {
  if (has_error && logits.error_mask && group.rank() == 0) logits.error_mask[b] = true;
}

// choice(i): what the request's row i has chosen.
template <typename Group, typename Choice>
AS_HD WalkResult walk_choices(const Group& group, const VerifyChainLogitsParams& params,
                              int64_t /*num_live*/, int64_t b, const Choice& choice) {
  return walk_chain_greedy(group, params.draft_tokens.row(b), params.round.accept_limit(b),
                           params.logits.vocab_size, choice, params.output_token_ids.row(b),
                           params.output_width);
}
template <typename Group, typename Choice>
AS_HD WalkResult walk_choices(const Group& group, const SampleChainLogitsParams& params,
                              int64_t /*num_live*/, int64_t b, const Choice& choice) {
  bool has_error = false;
  const WalkResult result = walk_chain_greedy(
      group, params.draft_tokens.row(b), params.round.accept_limit(b),
      params.logits.rows.vocab_size,
      [&](int64_t i) {
        const TargetToken token = choice(i);
        has_error |= token.is_anomaly;
        return token;
      },
      params.output_token_ids.row(b), params.output_width);
  mark_error(group, params.logits, b, has_error);
  return result;
}
template <typename Group, typename Choice>
AS_HD WalkResult walk_choices(const Group& group, const SampleTreeLogitsParams& params,
                              int64_t num_live, int64_t b, const Choice& choice) {
  const Tree<Group> tree(group, params.tree, num_live, b);
  bool has_error = false;
  const WalkResult result = walk_tree(group, params.tree, tree, b, params.round.accept_limit(b),
                                      [&](int64_t node, int64_t /*flat_id*/) {
                                        const TargetToken token = choice(node);
                                        has_error |= token.is_anomaly;
                                        return token;
                                      });
  mark_error(group, params.logits, b, has_error);
  return result;
}

// How a row of a request is sampled.
AS_HD RowNoise row_noise(const SamplingRules& rules, int64_t b, uint64_t number) {
  return {static_cast<uint64_t>(rules.seeds[b]), number, rules.stream};
}
AS_HD RowNoise row_noise(const SampleChainLogitsParams& params, int64_t b, int64_t i) {
  return row_noise(params.logits.rules, b,
                   static_cast<uint64_t>(params.positions[b]) + static_cast<uint64_t>(i));
}
AS_HD RowNoise row_noise(const SampleTreeLogitsParams& params, int64_t b, int64_t i) {
  return row_noise(params.logits.rules, b, static_cast<uint64_t>(params.positions.at(b, i)));
}
// What row i has to accept or reject.
AS_HD RowDraft row_draft(const SampleChainLogitsParams& params, int64_t b, int64_t i) {
  if (!params.draft_probs || i >= params.round.accept_limit(b)) return {};
  return {params.draft_tokens.at(b, i), params.draft_probs.row(b, i)};
}
AS_HD RowDraft row_draft(const SampleTreeLogitsParams&, int64_t, int64_t) { return {}; }

// The choice of a row that is not greedy. best: of its finite entries.
template <int kBits, typename Scan>
AS_HD TargetToken sampled_choice(const RowRule& rule, const RowNoise& noise,
                                 const Argmax<float>& best, int64_t vocab_size,
                                 const RowDraft& draft, const Scan& scan) {
  TargetToken choice = target_token(best);
  if (choice.is_anomaly) return choice;
  choice.id = draft.probs == nullptr
                  ? choose_token(rule, best.value, vocab_size, scan)
                  : choose_or_reject<kBits>(rule, noise, best, vocab_size, draft, scan);
  return choice;
}

AS_HD int64_t emitted_token(const VerifyChainLogitsParams& params, int64_t b, int64_t j) {
  return params.output_token_ids.at(b, j);
}
AS_HD int64_t emitted_token(const SampleChainLogitsParams& params, int64_t b, int64_t j) {
  return params.output_token_ids.at(b, j);
}
AS_HD int64_t emitted_token(const SampleTreeLogitsParams& params, int64_t b, int64_t j) {
  return params.tree.predicts[params.tree.accept_index.at(b, j)];
}

}  // namespace adaptive_spec
