// The two small ops: the adaptive step alone, and the tree arrays of chains.
#pragma once

#include <cstdint>

#include "finish.cuh"
#include "memory.cuh"
#include "rows.h"
#include "warp.cuh"

namespace adaptive_spec::cuda {

// One block.
__device__ __forceinline__ void update_body(const UpdateParams& params, FinishShared& shared) {
  prefetch_state(params.adaptive.words, params.adaptive.num_words);
  const int64_t num_live = num_live_rows(params.num_reqs, params.batch_size);
  RoundSums sums;
  for (int64_t b = threadIdx.x; b < num_live; b += blockDim.x) {
    sums.add_count(params.accept_token_num[b], params.num_steps);
  }
  sums = block_sums({warp_sum(sums.accepted), warp_sum(sums.anomalies)}, shared);
  if (threadIdx.x == 0) close_round(params.adaptive, params.num_steps, sums, num_live);
}

__device__ __forceinline__ void chain_tree_body(const ChainTreeParams& params) {
  const int64_t num_live = num_live_rows(params.num_reqs, params.batch_size);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < num_live * params.num_nodes; i += stride) {
    write_chain_node(params, i / params.num_nodes, i % params.num_nodes);
  }
}

}  // namespace adaptive_spec::cuda
