// The loop over a batch's requests that all verify ops share.
#pragma once

#include <cstdint>

#include "rows.h"

namespace adaptive_spec::cpu {

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

}  // namespace adaptive_spec::cpu
