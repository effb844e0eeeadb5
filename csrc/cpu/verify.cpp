#include "argmax_row.h"
#include "group.h"
#include "launch.h"
#include "round.h"
#include "walks.h"

namespace adaptive_spec::cpu {
namespace {

struct RoundSums {
  int64_t accepted = 0;
  int64_t anomalies = 0;
};

void finish(const AdaptiveTarget& adaptive, int64_t num_steps, const RoundSums& sums,
            int64_t num_live) {
  if (adaptive.words == nullptr) return;
  finish_round(adaptive.words, adaptive.ring, {adaptive.slot, static_cast<int32_t>(num_steps)},
               sums.accepted, num_live, sums.anomalies);
}

// walk_row(b, limit) verifies request b; emitted_token(b, j) is the j-th token it then emits.
template <typename WalkRow, typename EmittedToken>
void run_round(const RoundParams& round, const WalkRow& walk_row,
               const EmittedToken& emitted_token) {
  const VerifyOutputs& outputs = round.outputs;
  const int64_t num_live = num_live_rows(round.num_reqs, round.batch_size);
  RoundSums sums;
  for (int64_t b = 0; b < num_live; ++b) {
    const WalkResult walk = walk_row(b, round.accept_limit(b));
    outputs.write(b, walk);
    sums.accepted += walk.num_accepted;
    sums.anomalies += walk.num_anomalies;
  }
  if (outputs.accepted_tokens) {
    int64_t packed = 0;
    for (int64_t b = 0; b < num_live; ++b) {
      for (int64_t j = 0; j <= outputs.accept_token_num[b]; ++j) {
        outputs.accepted_tokens[packed++] = emitted_token(b, j);
      }
    }
  }
  finish(round.adaptive, round.num_steps, sums, num_live);
}

template <typename T>
void verify_chain_logits(const VerifyChainLogitsParams& params) {
  const T* logits = static_cast<const T*>(params.target_logits);
  const auto walk_row = [&](int64_t b, int64_t limit) {
    const auto target = [&](int64_t position) -> TargetToken {
      const auto best =
          argmax_row(logits + b * params.request_stride + position * params.position_stride,
                     params.vocab_size);
      return {best.index, best.is_usable(), best.has_nan || !best.is_usable()};
    };
    return walk_chain_greedy(SerialGroup{}, params.draft_tokens.row(b), limit, params.vocab_size,
                             target, params.output_token_ids.row(b), params.output_width);
  };
  run_round(params.round, walk_row,
            [&](int64_t b, int64_t j) { return params.output_token_ids.at(b, j); });
}

}  // namespace

void launch_verify_tree_greedy(const VerifyTreeParams& params) {
  TreeBatch tree = params.tree;
  tree.num_live = num_live_rows(params.round.num_reqs, params.round.batch_size);
  run_round(
      params.round,
      [&](int64_t b, int64_t limit) { return walk_tree_greedy(SerialGroup{}, tree, b, limit); },
      [&](int64_t b, int64_t j) { return tree.predicts[tree.accept_index.at(b, j)]; });
}

void launch_verify_chain_greedy(const VerifyChainParams& params) {
  const auto walk_row = [&](int64_t b, int64_t limit) {
    const auto targets = params.target_predict.row(b);
    const auto target = [&](int64_t position) { return target_token(targets[position]); };
    return walk_chain_greedy(SerialGroup{}, params.draft_tokens.row(b), limit, kMaxVocabSize,
                             target, params.output_token_ids.row(b), params.output_width);
  };
  run_round(params.round, walk_row,
            [&](int64_t b, int64_t j) { return params.output_token_ids.at(b, j); });
}

void launch_verify_chain_greedy_from_logits(const VerifyChainLogitsParams& params) {
  switch (params.logits_type) {
    case LogitsType::kFloat16:
      return verify_chain_logits<Half>(params);
    case LogitsType::kBFloat16:
      return verify_chain_logits<BFloat16>(params);
    case LogitsType::kFloat32:
      return verify_chain_logits<float>(params);
    case LogitsType::kFloat64:
      return verify_chain_logits<double>(params);
  }
}

void launch_update_and_select(const UpdateParams& params) {
  const int64_t num_live = num_live_rows(params.num_reqs, params.batch_size);
  RoundSums sums;
  for (int64_t b = 0; b < num_live; ++b) {
    const int64_t count = params.accept_token_num[b];
    const int64_t in_range = count < 0 ? 0 : count > params.num_steps ? params.num_steps : count;
    sums.accepted += in_range;
    sums.anomalies += in_range != count;
  }
  finish(params.adaptive, params.num_steps, sums, num_live);
}

}  // namespace adaptive_spec::cpu
