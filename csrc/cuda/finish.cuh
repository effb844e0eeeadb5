// How a launch ends: the last block to arrive has all requests' results before it, packs the
// emitted tokens, and one thread of it updates the state and publishes the decisions.
#pragma once

#include <cstdint>

#include "memory.cuh"
#include "rows.h"
#include "warp.cuh"

namespace adaptive_spec::cuda {

struct FinishShared {
  RoundSums sums[kMaxWarps];
  int64_t num_tokens[kMaxWarps];
  bool is_last;
};

// By a warp: whether it is the last of `count` to arrive. Lane 0, which writes whatever others are
// to see, arrives for it; behind the barrier all lanes see what lane 0 then sees.
__device__ __forceinline__ bool warp_arrives_last(uint32_t* ticket, int64_t count) {
  bool last = false;
  if (threadIdx.x % kWarpSize == 0) last = arrive_last(ticket, static_cast<uint32_t>(count));
  last = __shfl_sync(kAllLanes, static_cast<int>(last), 0) != 0;
  __syncwarp();
  return last;
}

// By one thread; true if it was the last of `count` to report, and then `sums` are the launch's.
// Nobody is last where the totals would lie in a tensor that is no state.
__device__ __forceinline__ bool report(const RoundParams& round, int64_t count, RoundSums& sums) {
  if (round.adaptive.words != nullptr && !is_usable(round.adaptive)) return false;
  RoundTotals* totals = round.totals();
  add_relaxed(&totals->accepted, sums.accepted);
  add_relaxed(&totals->anomalies, sums.anomalies);
  if (!arrive_last(&totals->ticket, static_cast<uint32_t>(count))) return false;
  sums = {totals->accepted, totals->anomalies};
  totals->accepted = 0;
  totals->anomalies = 0;
  return true;
}

// The warps' sums, each in its lane 0, added up in thread 0. Also a barrier.
__device__ __forceinline__ RoundSums block_sums(const RoundSums& own, FinishShared& shared) {
  const int num_warps = blockDim.x / kWarpSize;
  if (threadIdx.x % kWarpSize == 0) shared.sums[threadIdx.x / kWarpSize] = own;
  __syncthreads();
  RoundSums all;
  if (threadIdx.x != 0) return all;
  for (int warp = 0; warp < num_warps; ++warp) {
    all.accepted += shared.sums[warp].accepted;
    all.anomalies += shared.sums[warp].anomalies;
  }
  return all;
}

// All emitted tokens side by side, in request order. By one block, which sees every request's
// results.
template <typename Params>
__device__ __forceinline__ void pack_tokens(const Params& params, int64_t num_live,
                                            FinishShared& shared) {
  const VerifyOutputs& outputs = params.round.outputs;
  const int warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  int64_t base = 0;
  for (int64_t first = 0; first < num_live; first += blockDim.x) {
    const int64_t b = first + threadIdx.x;
    const int64_t length = b < num_live ? outputs.accept_token_num[b] + 1 : 0;
    const int64_t prefix = warp_prefix_sum(length);
    if (threadIdx.x % kWarpSize == kWarpSize - 1) shared.num_tokens[warp] = prefix;
    __syncthreads();
    int64_t place = base + prefix - length;
    for (int w = 0; w < num_warps; ++w) {
      if (w < warp) place += shared.num_tokens[w];
      base += shared.num_tokens[w];
    }
    for (int64_t j = 0; j < length; ++j) {
      outputs.accepted_tokens[place + j] = emitted_token(params, b, j);
    }
    // Before the next batch of requests overwrites the warps' counts.
    __syncthreads();
  }
}

// By the last block; `sums` are those of thread 0.
template <typename Params>
__device__ __forceinline__ void finish(const Params& params, const RoundSums& sums,
                                       int64_t num_live, FinishShared& shared) {
  if (threadIdx.x == 0) {
    close_round(params.round.adaptive, params.round.num_steps, sums, num_live);
  }
  if (params.round.outputs.accepted_tokens) pack_tokens(params, num_live, shared);
}

}  // namespace adaptive_spec::cuda
