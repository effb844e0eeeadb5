// The ops that verify by sampling. A request's drafts are looked up at a few places of its rows of
// probabilities, but the last token is drawn from a whole row, so that row is cut into pieces, a
// block each, and a single request has all of the device.
//
// Every block walks for itself, which is cheap, adds up its piece and arrives; the last one knows
// all pieces' sums, finds the piece that the coin falls into, and looks for the place there. Where
// drafts are verified as a block, which row that is depends on the sums of all rows, so each block
// adds up its piece of all of them.
#pragma once

#include <cstdint>

#include "finish.cuh"
#include "memory.cuh"
#include "plan.h"
#include "sampling_rows.h"
#include "warp.cuh"
#include "workspace.h"

namespace adaptive_spec::cuda {

struct SampleShared {
  SamplingWalk walk;
  float joint[kMaxSteps + 1];
  int64_t row_units[kMaxSteps + 1];
  RowSum sums[kMaxWarps];
  int64_t units[kMaxWarps];
  RowSum total;   // of the row that is drawn from
  int64_t piece;  // where the coin falls
  int64_t left;   // units from that piece's start to the coin
  int64_t drawn;
  bool is_last;
  FinishShared finish;
};

// By warp 0: the sum of a row's pieces, in every lane. sums: the first piece's, `stride` apart.
__device__ __forceinline__ RowSum add_pieces(const RowSum* sums, int64_t stride,
                                             int64_t num_pieces) {
  RowSum total;
  for (int64_t i = threadIdx.x; i < num_pieces; i += kWarpSize) {
    total = merge(total, sums[i * stride]);
  }
  return warp_merge(total);
}

// By warp 0: the piece in which the units add up to more than `left`, which is made relative to it.
__device__ __forceinline__ void find_piece(const RowSum* sums, int64_t stride, int64_t num_pieces,
                                           int64_t left, SampleShared& shared) {
  const int lane = threadIdx.x;
  for (int64_t first = 0; first < num_pieces; first += kWarpSize) {
    const int64_t units = first + lane < num_pieces ? sums[(first + lane) * stride].units : 0;
    const int64_t prefix = warp_prefix_sum(units);
    if (prefix > left && prefix - units <= left) {
      shared.piece = first + lane;
      shared.left = left - (prefix - units);
    }
    const int64_t all = __shfl_sync(kAllLanes, prefix, kWarpSize - 1);
    if (all > left) return;
    left -= all;
  }
}

// By a block: the entry of begin..end-1 at which the units add up to more than `left`.
__device__ __forceinline__ void find_entry(const ResidualRow& row, double units_per_weight,
                                           int64_t begin, int64_t end, int64_t left,
                                           SampleShared& shared) {
  const int warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  for (int64_t first = begin; first < end; first += blockDim.x) {
    const int64_t i = first + threadIdx.x;
    const int64_t units = i < end ? weight_units(row.weight(i), units_per_weight) : 0;
    int64_t prefix = warp_prefix_sum(units);
    if (threadIdx.x % kWarpSize == kWarpSize - 1) shared.units[warp] = prefix;
    __syncthreads();
    int64_t all = 0;
    for (int w = 0; w < num_warps; ++w) {
      if (w < warp) prefix += shared.units[w];
      all += shared.units[w];
    }
    if (prefix > left && prefix - units <= left) shared.drawn = i;
    __syncthreads();
    if (all > left) return;
    left -= all;
  }
}

// Params: SampleTreeParams or SampleChainParams.
template <typename Params>
__device__ __forceinline__ void sample_body(const Params& params, const LogitsPlan& plan,
                                            SampleShared& shared) {
  const RoundParams& round = params.round;
  prefetch_state(round.adaptive.words, round.adaptive.num_words);
  const int64_t num_live = num_live_rows(round.num_reqs, round.batch_size);
  if (num_live == 0) {
    if (blockIdx.x == 0) finish(params, RoundSums{}, num_live, shared.finish);
    return;
  }
  const uint32_t num_pieces = static_cast<uint32_t>(plan.num_pieces);
  const int64_t piece = blockIdx.x % num_pieces;
  const int64_t b = blockIdx.x / num_pieces;
  if (b >= num_live) return;
  const auto end_of = [&](int64_t begin) {
    const int64_t end = begin + plan.piece_size;
    return end < vocab_size(params) ? end : vocab_size(params);
  };
  const int64_t begin = piece * plan.piece_size;
  const int64_t end = end_of(begin);
  const double units = units_per_weight(vocab_size(params));

  const WarpGroup warp;
  if (threadIdx.x < kWarpSize) {
    // Each block marks the rejected drafts of its own piece, which nobody else reads.
    const auto reject = [&](int64_t row, int64_t token) {
      if (threadIdx.x == 0 && token >= begin && token < end) reject_draft(params, b, row, token);
    };
    const SamplingWalk walk =
        sampling_walk(warp, params, num_live, b, piece == 0, shared.joint, reject);
    if (threadIdx.x == 0) shared.walk = walk;
  }
  __syncthreads();
  const int64_t max_rows = max_rows_to_sum(params);
  RowSum* const sums = round.workspace.row_sums(b * num_pieces * max_rows);
  for (int64_t row_idx = 0; row_idx < shared.walk.num_rows; ++row_idx) {
    const ResidualRow row = residual_row(params, b, shared.walk, row_idx, shared.joint);
    RowSum sum;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) sum.take(row, units, i);
    sum = block_merge(sum, shared.sums);
    if (threadIdx.x == 0) sums[piece * max_rows + row_idx] = sum;
    // Before the next row's sums overwrite the warps'.
    __syncthreads();
  }

  if (threadIdx.x < kWarpSize) {
    const bool last = warp_arrives_last(&round.workspace.request(b)->ticket, num_pieces);
    if (last) {
      for (int64_t i = 0; i < shared.walk.num_rows; ++i) {
        const RowSum total = add_pieces(sums + i, max_rows, num_pieces);
        if (threadIdx.x == 0) shared.row_units[i] = total.units;
      }
      __syncwarp();
      if (threadIdx.x == 0) {
        settle(params, b, shared.walk, shared.joint,
               [&](int64_t i) { return shared.row_units[i]; });
      }
      __syncwarp();
      const RowSum* chosen = sums + (max_rows == 1 ? 0 : shared.walk.row);
      const RowSum total = add_pieces(chosen, max_rows, num_pieces);
      if (threadIdx.x == 0) shared.total = total;
      if (total.units > 0) {
        find_piece(chosen, max_rows, num_pieces, draw_threshold(final_coin(params, b), total.units),
                   shared);
      }
    }
    if (threadIdx.x == 0) shared.is_last = last;
  }
  __syncthreads();
  if (!shared.is_last) return;

  if (shared.total.units > 0) {
    const ResidualRow row = residual_row(params, b, shared.walk, 0, shared.joint);
    const int64_t chosen = shared.piece * plan.piece_size;
    find_entry(row, units, chosen, end_of(chosen), shared.left, shared);
  }
  RoundSums round_sums;
  if (threadIdx.x < kWarpSize) {
    SamplingWalk walk = shared.walk;
    complete(walk, shared.total, shared.drawn);
    write_tokens(warp, params, b, walk);
    round_sums.add(walk.result);
    // Lane 0 reports for the warp.
    __syncwarp();
    if (threadIdx.x == 0) {
      round.outputs.write(b, walk.result);
      shared.finish.is_last = round.has_finish() && report(round, num_live, round_sums);
    }
  }
  __syncthreads();
  if (shared.finish.is_last) finish(params, round_sums, num_live, shared.finish);
}

}  // namespace adaptive_spec::cuda
