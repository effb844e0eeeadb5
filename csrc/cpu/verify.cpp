#include "argmax_row.h"
#include "group.h"
#include "launch.h"
#include "rows.h"

namespace adaptive_spec::cpu {
namespace {

// walk_row(b, num_live) verifies request b.
template <typename Params, typename WalkRow>
void run_round(const Params& params, const WalkRow& walk_row) {
  const RoundParams& round = params.round;
  const VerifyOutputs& outputs = round.outputs;
  const int64_t num_live = num_live_rows(round.num_reqs, round.batch_size);
  RoundSums sums;
  for (int64_t b = 0; b < num_live; ++b) {
    const WalkResult walk = walk_row(b, num_live);
    outputs.write(b, walk);
    sums.add(walk);
  }
  if (outputs.accepted_tokens) {
    int64_t packed = 0;
    for (int64_t b = 0; b < num_live; ++b) {
      for (int64_t j = 0; j <= outputs.accept_token_num[b]; ++j) {
        outputs.accepted_tokens[packed++] = emitted_token(params, b, j);
      }
    }
  }
  close_round(round.adaptive, round.num_steps, sums, num_live);
}

template <typename T>
void verify_chain_logits(const VerifyChainLogitsParams& params) {
  const T* logits = static_cast<const T*>(params.target_logits);
  run_round(params, [&](int64_t b, int64_t /*num_live*/) {
    const auto target = [&](int64_t position) {
      return target_token(
          argmax_row(logits + b * params.request_stride + position * params.position_stride,
                     params.vocab_size));
    };
    return verify_logits_row(SerialGroup{}, params, b, target);
  });
}

}  // namespace

void launch_verify_tree_greedy(const VerifyTreeParams& params) {
  run_round(params, [&](int64_t b, int64_t num_live) {
    return verify_row(SerialGroup{}, params, num_live, b);
  });
}

void launch_verify_chain_greedy(const VerifyChainParams& params) {
  run_round(params, [&](int64_t b, int64_t num_live) {
    return verify_row(SerialGroup{}, params, num_live, b);
  });
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
    sums.add_count(params.accept_token_num[b], params.num_steps);
  }
  close_round(params.adaptive, params.num_steps, sums, num_live);
}

}  // namespace adaptive_spec::cpu
