#include "argmax_row.h"
#include "group.h"
#include "launch.h"
#include "logits_rows.h"
#include "rows.h"
#include "run_round.h"

namespace adaptive_spec::cpu {
namespace {

template <typename T>
void verify_chain_logits(const VerifyChainLogitsParams& params) {
  const LogitsRows& logits = params.logits;
  run_round(params, [&](int64_t b, int64_t num_live) {
    return walk_choices(SerialGroup{}, params, num_live, b, [&](int64_t i) {
      return target_token(argmax_row(logits.row<T>(b, i), logits.vocab_size));
    });
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
  switch (params.logits.type) {
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
