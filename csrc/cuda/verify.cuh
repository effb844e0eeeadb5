// verify_tree_greedy and verify_chain_greedy: a warp per request. Up to kMaxSoloRequests requests
// run in one block, which then needs no ticket; more are spread over blocks.
#pragma once

#include <cstdint>

#include "finish.cuh"
#include "memory.cuh"
#include "rows.h"
#include "warp.cuh"

namespace adaptive_spec::cuda {

// Params: VerifyTreeParams or VerifyChainParams.
template <typename Params>
__device__ __forceinline__ void verify_body(const Params& params, FinishShared& shared) {
  const RoundParams& round = params.round;
  prefetch_state(round.adaptive.words, round.adaptive.num_words);
  const int64_t num_live = num_live_rows(round.num_reqs, round.batch_size);
  const WarpGroup warp;
  const int64_t num_warps = blockDim.x / kWarpSize;
  RoundSums sums;
  for (int64_t b = blockIdx.x * num_warps + threadIdx.x / kWarpSize; b < num_live;
       b += gridDim.x * num_warps) {
    const WalkResult walk = verify_row(warp, params, num_live, b);
    if (warp.rank() == 0) round.outputs.write(b, walk);
    sums.add(walk);
  }
  if (!round.has_finish()) return;

  // Behind its barrier, thread 0 reports for the whole block.
  sums = block_sums(sums, shared);
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) shared.is_last = report(round, gridDim.x, sums);
    __syncthreads();
    if (!shared.is_last) return;
  }
  finish(params, sums, num_live, shared);
}

}  // namespace adaptive_spec::cuda
