// verify_chain_greedy_from_logits: argmax and verification in one launch that reads little more
// than the rows it needs.
#pragma once

#include <cstdint>

#include "finish.cuh"
#include "logits_rows.cuh"
#include "plan.h"
#include "warp.cuh"

namespace adaptive_spec::cuda {

struct LogitsShared {
  Argmax<float> best[kMaxWarps];
  FinishShared finish;
};

// T: Half, BFloat16 or float.
template <typename T>
__device__ __forceinline__ void verify_logits_body(const VerifyChainLogitsParams& params,
                                                   const LogitsPlan& plan, LogitsShared& shared) {
  const RowBlock block(params, plan);
  if (!block.has_work()) return block.finish_if_empty(shared.finish);
  Argmax<float> best;
  if (!block.is_unneeded()) {
    for_each_run(block.template row<T>(), block.begin(), block.end(),
                 [&](const auto& logits, int64_t first) { best.take_run(logits, first); });
  }
  best = block_merge(best, shared.best);
  const bool is_done = threadIdx.x < kWarpSize && block.row_is_done(best);
  block.close_row(is_done, target_token(best), shared.finish);
}

}  // namespace adaptive_spec::cuda
