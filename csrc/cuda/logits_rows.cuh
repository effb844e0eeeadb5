// What the kernels that are given logits have in common.
//
// The grid covers rows x requests x pieces of a row, a request's first rows first. Blocks start in
// about that order, so by the time the later rows' blocks come, the first ones have been compared
// with the drafts, and rows behind a mismatch are passed over. That only saves work: a row that the
// walk asks for is never passed over, whatever the timing, since only a mismatch at an earlier
// position marks a row as unneeded, and the walk ends there. So neither order nor the number of
// pieces shows in the result.
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

// -inf, a token that may not be chosen.
template <typename T>
constexpr T kMasked{};
template <>
constexpr Half kMasked<Half>{0xfc00};
template <>
constexpr BFloat16 kMasked<BFloat16>{0xff80};
template <>
constexpr float kMasked<float> = -kInfinity;

// Hands this thread's share of entries begin .. end - 1 of a row to take(logits, first), in runs of
// 16 bytes and in ascending order. A run that lies across an end of the row or piece has -inf for
// what is outside, and may begin before the row.
template <typename T, typename Take>
__device__ __forceinline__ void for_each_run(const T* row, int64_t begin, int64_t end,
                                             const Take& take) {
  constexpr int kRun = sizeof(uint4) / sizeof(T);
  constexpr uint32_t kLoads = 4;  // in flight per thread

  const int64_t misalignment = reinterpret_cast<uintptr_t>(row + begin) % sizeof(uint4) / sizeof(T);
  const int64_t base = begin - misalignment;
  // 32 bits hold the number of runs of any row, and index arithmetic in them is cheap.
  const uint32_t num_runs = static_cast<uint32_t>((end - base + kRun - 1) / kRun);
  const uint32_t first_whole = misalignment == 0 ? 0 : 1;
  const uint32_t num_whole = static_cast<uint32_t>((end - base) / kRun);
  const auto load = [&](uint32_t run) {
    const int64_t first = base + static_cast<int64_t>(run) * kRun;
    if (run >= first_whole && run < num_whole) {
      return load_once(reinterpret_cast<const uint4*>(row + first));
    }
    T entries[kRun];
    for (int k = 0; k < kRun; ++k) {
      const int64_t i = first + k;
      entries[k] = i >= begin && i < end ? row[i] : kMasked<T>;
    }
    uint4 raw;
    std::memcpy(&raw, entries, sizeof raw);
    return raw;
  };

  const uint32_t stride = blockDim.x;
  for (uint32_t i = threadIdx.x; i < num_runs; i += kLoads * stride) {
    uint4 raw[kLoads];
    for (uint32_t k = 0; k < kLoads; ++k) {
      if (i + k * stride < num_runs) raw[k] = load(i + k * stride);
    }
    // The next one moves up, so that they stay in registers without a copy of `take` for each.
    for (uint32_t k = i; k < num_runs && k - i < kLoads * stride; k += stride) {
      T entries[kRun];
      std::memcpy(entries, &raw[0], sizeof raw[0]);
      float logits[kRun];
      for (int j = 0; j < kRun; ++j) logits[j] = comparable(entries[j]);
      take(logits, base + static_cast<int64_t>(k) * kRun);
      for (uint32_t j = 1; j < kLoads; ++j) raw[j - 1] = raw[j];
    }
  }
}

// A block and its piece of a row.
template <typename Params>
class RowBlock {
 public:
  __device__ __forceinline__ RowBlock(const Params& params, const LogitsPlan& plan)
      : params_(params),
        plan_(plan),
        num_live_(num_live_rows(params.round.num_reqs, params.round.batch_size)) {
    prefetch_state(params.round.adaptive.words, params.round.adaptive.num_words);
    // In 32 bits, where division is cheap; they hold any grid.
    const uint32_t num_pieces = static_cast<uint32_t>(plan.num_pieces);
    const uint32_t batch_size = static_cast<uint32_t>(params.round.batch_size);
    if (num_live_ == 0) return;
    piece_ = blockIdx.x % num_pieces;
    b_ = blockIdx.x / num_pieces % batch_size;
    i_ = blockIdx.x / num_pieces / batch_size;
    has_work_ = b_ < num_live_ && i_ < num_rows(params, b_);
  }

  __device__ __forceinline__ bool has_work() const { return has_work_; }
  __device__ __forceinline__ int64_t request() const { return b_; }
  __device__ __forceinline__ int64_t row_idx() const { return i_; }
  __device__ __forceinline__ int64_t begin() const { return piece_ * plan_.piece_size; }
  __device__ __forceinline__ int64_t end() const {
    const int64_t end = begin() + plan_.piece_size;
    const int64_t vocab_size = logits_rows(params_).vocab_size;
    return end < vocab_size ? end : vocab_size;
  }
  template <typename T>
  __device__ __forceinline__ const T* row() const {
    return logits_rows(params_).template row<T>(b_, i_);
  }

  // Once it is true, it stays so for the block. Threads that ask may get different answers: if one
  // of them finds the row unneeded, nobody looks at it later.
  __device__ __forceinline__ bool is_unneeded() const {
    return load_relaxed(&progress()->stop) > stop_mark();
  }

  // By warp 0: whether this was the row's last piece. `own` is the piece's result, and then the
  // row's.
  template <typename Partial>
  __device__ __forceinline__ bool row_is_done(Partial& own) const {
    if (plan_.num_pieces == 1) return true;
    const int lane = threadIdx.x;
    const Workspace& workspace = params_.round.workspace;
    const int64_t batch_size = params_.round.batch_size;
    Partial* partials =
        workspace.partials<Partial>(batch_size * max_rows(params_), flat_row(), plan_.num_pieces);
    if (lane == 0) partials[piece_] = own;
    if (!warp_arrives_last(workspace.row_ticket(batch_size, flat_row()), plan_.num_pieces)) {
      return false;
    }
    own = {};
    for (int64_t i = lane; i < plan_.num_pieces; i += kWarpSize) own = merge(own, partials[i]);
    own = warp_merge(own);
    return true;
  }

  // By the block of a row's last piece, with the row's choice in warp 0, where is_done.
  __device__ __forceinline__ void close_row(bool is_done, const TargetToken& choice,
                                            FinishShared& shared) const {
    const RoundParams& round = params_.round;
    RoundSums sums;
    bool is_last = false;
    if (threadIdx.x < kWarpSize && is_done) {
      const int lane = threadIdx.x;
      if (lane == 0) {
        *round.workspace.choice(flat_row()) = pack_choice(choice);
        // If any piece was passed over, the mark that caused it is seen here too.
        if (!is_unneeded() && ends_at(params_, b_, i_, choice)) {
          max_relaxed(&progress()->stop, stop_mark());
        }
      }
      if (warp_arrives_last(&progress()->ticket, num_rows(params_, b_))) {
        if (lane == 0) progress()->stop = 0;
        const WarpGroup warp;
        const auto choices =
            warp.load(Vector<const int64_t>{round.workspace.choice(b_ * max_rows(params_))},
                      num_rows(params_, b_));
        const WalkResult walk = walk_choices(warp, params_, num_live_, b_,
                                             [&](int64_t i) { return unpack_choice(choices[i]); });
        if (lane == 0) round.outputs.write(b_, walk);
        sums.add(walk);
        if (lane == 0 && round.has_finish()) is_last = report(round, num_live_, sums);
      }
    }
    if (!round.has_finish()) return;
    if (threadIdx.x == 0) shared.is_last = is_last;
    __syncthreads();
    if (shared.is_last) finish(params_, sums, num_live_, shared);
  }

  // For a launch without live requests, which still is a round.
  __device__ __forceinline__ void finish_if_empty(FinishShared& shared) const {
    if (num_live_ == 0 && blockIdx.x == 0) finish(params_, RoundSums{}, num_live_, shared);
  }

 private:
  __device__ __forceinline__ RequestProgress* progress() const {
    return params_.round.workspace.request(b_);
  }
  __device__ __forceinline__ uint32_t stop_mark() const {
    return static_cast<uint32_t>(max_rows(params_) - i_);
  }
  __device__ __forceinline__ int64_t flat_row() const { return b_ * max_rows(params_) + i_; }

  const Params& params_;
  const LogitsPlan& plan_;
  int64_t num_live_;
  int64_t piece_ = 0;
  int64_t b_ = 0;
  int64_t i_ = 0;
  bool has_work_ = false;
};

}  // namespace adaptive_spec::cuda
