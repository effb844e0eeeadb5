// verify_chain_sampling_from_logits and its tree form: each row's choice and verification in one
// launch. A row's pieces are gone through once for the best logit and the best of score and noise,
// which is all that most rows need. What filters and draft probabilities need besides, the block of
// the row's last piece takes from the whole row, which by then lies in the second-level cache.
#pragma once

#include <cstdint>

#include "finish.cuh"
#include "logits_rows.cuh"
#include "plan.h"
#include "row_choice.h"
#include "warp.cuh"

namespace adaptive_spec::cuda {

// What is kept of a piece of a row.
struct RowBest {
  Argmax<float> logit;   // of the finite ones
  Argmax<double> score;  // with noise
};
__device__ __forceinline__ RowBest merge(const RowBest& a, const RowBest& b) {
  return {merge(a.logit, b.logit), merge(a.score, b.score)};
}
__device__ __forceinline__ RowBest warp_merge(const RowBest& best) {
  return {warp_merge(best.logit), warp_merge(best.score)};
}

struct SampleLogitsShared {
  RowBest best[kMaxWarps];
  RowSums sums[kMaxWarps];
  RowBest row_best;
  RowSums row_sums;
  bool is_done;
  bool is_unneeded;
  FinishShared finish;
};

// As the core's scans go through a row, by a block.
template <typename T>
class BlockScan {
 public:
  __device__ __forceinline__ BlockScan(const T* row, int64_t vocab_size, const RowRule& rule,
                                       const RowNoise& noise, const RowBest& best,
                                       SampleLogitsShared& shared)
      : row_(row),
        vocab_size_(vocab_size),
        noise_(noise),
        scale_(rule, best.logit.value, vocab_size),
        best_of_all_(best.score.index),
        shared_(shared) {}

  __device__ __forceinline__ float value(int64_t i) const { return comparable(row_[i]); }
  __device__ __forceinline__ int64_t best_of_all() const { return best_of_all_; }

  template <bool with_scores>
  __device__ __forceinline__ RowSums above(float pivot) const {
    RowSums sums;
    NoisyMax max{noise_, scale_.scale, {}};
    for_each_run(row_, 0, vocab_size_, [&](const auto& logits, int64_t first) {
      take_above<with_scores>(sums, max, scale_, logits, first, pivot);
    });
    sums.best = max.best;
    return merged(sums);
  }
  __device__ __forceinline__ Argmax<double> residual(const ResidualRace& race) const {
    RowSums sums;
    for_each_run(row_, 0, vocab_size_, [&](const auto& logits, int64_t first) {
      take_run(sums.best, race, logits, first);
    });
    return merged(sums).best;
  }

 private:
  __device__ __forceinline__ RowSums merged(const RowSums& own) const {
    const RowSums all = block_merge(own, shared_.sums);
    if (threadIdx.x == 0) shared_.row_sums = all;
    __syncthreads();
    return shared_.row_sums;
  }

  const T* row_;
  int64_t vocab_size_;
  RowNoise noise_;
  RowScale scale_;
  int64_t best_of_all_;
  SampleLogitsShared& shared_;
};

// T: Half, BFloat16 or float. Params: SampleChainLogitsParams or SampleTreeLogitsParams.
template <typename T, typename Params>
__device__ __forceinline__ void sample_logits_body(const Params& params, const LogitsPlan& plan,
                                                   SampleLogitsShared& shared) {
  const RowBlock block(params, plan);
  if (!block.has_work()) return block.finish_if_empty(shared.finish);
  const int64_t b = block.request();
  const int64_t i = block.row_idx();
  const int64_t vocab_size = params.logits.rows.vocab_size;
  const T* row = block.template row<T>();
  const RowRule rule = row_rule(params.logits.rules, b, vocab_size);
  const RowNoise noise = row_noise(params, b, i);
  const RowDraft draft = row_draft(params, b, i);

  RowBest best;
  if (!block.is_unneeded()) {
    const bool has_scores = !rule.is_greedy && draft.probs == nullptr;
    NoisyMax max{noise, rule.scale, {}};
    for_each_run(row, block.begin(), block.end(),
                 [&]<int n>(const float (&logits)[n], int64_t first) {
                   take_finite(best.logit, logits, first);
                   if (has_scores) take_run(max, logits, first, -kInfinity);
                 });
    best.score = max.best;
  }
  best = block_merge(best, shared.best);
  if (threadIdx.x < kWarpSize) {
    const bool is_done = block.row_is_done(best);
    if (threadIdx.x == 0) {
      shared.is_done = is_done;
      shared.is_unneeded = block.is_unneeded();
      shared.row_best = best;
    }
  }
  __syncthreads();
  if (!shared.is_done) return;

  best = shared.row_best;
  TargetToken choice = target_token(best.logit);
  if (!rule.is_greedy && !shared.is_unneeded) {
    const BlockScan<T> scan(row, vocab_size, rule, noise, best, shared);
    choice = sampled_choice<kLogitBits<T>>(rule, noise, best.logit, vocab_size, draft, scan);
  }
  block.close_row(true, choice, shared.finish);
}

}  // namespace adaptive_spec::cuda
