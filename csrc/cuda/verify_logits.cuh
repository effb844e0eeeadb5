// verify_chain_greedy_from_logits: argmax and verification in one launch that reads little more
// than the rows it needs.
//
// The grid covers positions x requests x pieces of a row, first positions first. Blocks start in
// about that order, so by the time the later positions' blocks come, the first ones' rows have been
// compared with the drafts, and rows behind a mismatch are passed over. That only saves work:
// a row that the walk asks for is never passed over, whatever the timing, since only a mismatch at
// an earlier position marks a row as unneeded, and the walk ends there. So neither order nor the
// number of pieces shows in the result.
//
// A row's last block merges its pieces, a request's last row walks, and the last request's block
// finishes the round. No block ever waits for another.
#pragma once

#include <cstdint>
#include <cstring>

#include "finish.cuh"
#include "logits_rows.h"
#include "memory.cuh"
#include "plan.h"
#include "rows.h"
#include "warp.cuh"
#include "workspace.h"

namespace adaptive_spec::cuda {

struct LogitsShared {
  Argmax<float> best[kMaxWarps];
  FinishShared finish;
};

// This thread's share of entries begin..end-1, in 16-byte loads wherever the row happens to start.
template <typename T>
__device__ __forceinline__ Argmax<float> scan(const T* row, int64_t begin, int64_t end) {
  constexpr int kRun = sizeof(uint4) / sizeof(T);
  constexpr uint32_t kLoads = 4;  // in flight per thread
  Argmax<float> best;
  const auto take_one = [&](int64_t i) { best.take(comparable(row[i]), i); };
  const auto take_run = [&](const uint4& raw, int64_t first) {
    T entries[kRun];
    std::memcpy(entries, &raw, sizeof raw);
    float values[kRun];
    for (int k = 0; k < kRun; ++k) values[k] = comparable(entries[k]);
    best.take_run(values, first);
  };

  const int64_t misalignment = reinterpret_cast<uintptr_t>(row + begin) % sizeof(uint4) / sizeof(T);
  int64_t first = begin + (misalignment == 0 ? 0 : kRun - misalignment);
  if (first > end) first = end;
  if (begin + threadIdx.x < first) take_one(begin + threadIdx.x);

  // 32 bits hold the number of runs of any row, and index arithmetic in them is cheap.
  const uint4* runs = reinterpret_cast<const uint4*>(row + first);
  const uint32_t num_runs = static_cast<uint32_t>((end - first) / kRun);
  const uint32_t stride = blockDim.x;
  uint32_t i = threadIdx.x;
  for (; i + (kLoads - 1) * stride < num_runs; i += kLoads * stride) {
    uint4 raw[kLoads];
    for (uint32_t k = 0; k < kLoads; ++k) raw[k] = load_once(runs + i + k * stride);
    for (uint32_t k = 0; k < kLoads; ++k) {
      take_run(raw[k], first + static_cast<int64_t>(i + k * stride) * kRun);
    }
  }
  for (; i < num_runs; i += stride) {
    take_run(load_once(runs + i), first + static_cast<int64_t>(i) * kRun);
  }

  const int64_t rest = first + static_cast<int64_t>(num_runs) * kRun + threadIdx.x;
  if (rest < end) take_one(rest);
  return best;
}

// The block's best entry, in every lane of warp 0. Also a barrier.
__device__ __forceinline__ Argmax<float> block_argmax(Argmax<float> best, LogitsShared& shared) {
  const int lane = threadIdx.x % kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  best = warp_argmax(best);
  if (lane == 0) shared.best[threadIdx.x / kWarpSize] = best;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return best;
  return warp_argmax(lane < num_warps ? shared.best[lane] : Argmax<float>{});
}

// T: Half, BFloat16 or float.
template <typename T>
__device__ __forceinline__ void verify_logits_body(const VerifyChainLogitsParams& params,
                                                   const LogitsPlan& plan, LogitsShared& shared) {
  const RoundParams& round = params.round;
  const Workspace& workspace = round.workspace;
  prefetch_state(round.adaptive.words, round.adaptive.num_words);
  const int64_t num_live = num_live_rows(round.num_reqs, round.batch_size);
  if (num_live == 0) {
    if (blockIdx.x == 0) finish(params, RoundSums{}, num_live, shared.finish);
    return;
  }
  // In 32 bits, where division is cheap; they hold any grid.
  const uint32_t num_pieces = static_cast<uint32_t>(plan.num_pieces);
  const uint32_t batch_size = static_cast<uint32_t>(round.batch_size);
  const int64_t piece = blockIdx.x % num_pieces;
  const int64_t b = blockIdx.x / num_pieces % batch_size;
  const int64_t position = blockIdx.x / num_pieces / batch_size;
  if (b >= num_live) return;
  const int64_t limit = round.accept_limit(b);
  if (position > limit) return;

  const int64_t num_positions = round.num_steps + 1;
  const int64_t row_idx = b * num_positions + position;
  RequestProgress* progress = workspace.request(b);
  const auto is_unneeded = [&] {
    return load_relaxed(&progress->stop) > static_cast<uint32_t>(num_positions - position);
  };

  Argmax<float> best;
  // Threads may differ here: if one of them finds the row unneeded, nobody looks at it later.
  if (!is_unneeded()) {
    const T* row = params.logits.template row<T>(b, position);
    const int64_t begin = piece * plan.piece_size;
    const int64_t end = begin + plan.piece_size;
    best = scan(row, begin, end < params.logits.vocab_size ? end : params.logits.vocab_size);
  }
  best = block_argmax(best, shared);

  RoundSums sums;
  bool is_last = false;
  if (threadIdx.x < kWarpSize) {
    const WarpGroup warp;
    const int lane = threadIdx.x;
    const auto row_is_done = [&] {
      if (plan.num_pieces == 1) return true;
      Argmax<float>* partials =
          workspace.partials(round.batch_size * num_positions, row_idx, plan.num_pieces);
      if (lane == 0) partials[piece] = best;
      if (!warp_arrives_last(workspace.row_ticket(round.batch_size, row_idx), plan.num_pieces)) {
        return false;
      }
      best = Argmax<float>{};
      for (int64_t i = lane; i < plan.num_pieces; i += kWarpSize) {
        best = MergeArgmax{}(best, partials[i]);
      }
      best = warp_argmax(best);
      return true;
    };
    if (row_is_done()) {
      if (lane == 0) {
        const TargetToken choice = target_token(best);
        *workspace.choice(row_idx) = pack_choice(choice);
        // If any piece was passed over, the mark that caused it is seen here too.
        if (position < limit && !is_unneeded() &&
            !is_accepted(choice, params.draft_tokens.at(b, position))) {
          max_relaxed(&progress->stop, static_cast<uint32_t>(num_positions - position));
        }
      }
      if (warp_arrives_last(&progress->ticket, limit + 1)) {
        if (lane == 0) progress->stop = 0;
        const auto choices =
            warp.load(Vector<const int64_t>{workspace.choice(b * num_positions)}, limit + 1);
        const WalkResult walk = walk_choices(warp, params, num_live, b,
                                             [&](int64_t i) { return unpack_choice(choices[i]); });
        if (lane == 0) round.outputs.write(b, walk);
        sums.add(walk);
        if (lane == 0 && round.has_finish()) is_last = report(round, num_live, sums);
      }
    }
  }
  if (!round.has_finish()) return;
  if (threadIdx.x == 0) shared.finish.is_last = is_last;
  __syncthreads();
  if (shared.finish.is_last) finish(params, sums, num_live, shared.finish);
}

}  // namespace adaptive_spec::cuda
