#include "argmax_row.h"
#include "group.h"
#include "launch.h"
#include "logits_rows.h"
#include "row_choice.h"
#include "run_round.h"

namespace adaptive_spec::cpu {
namespace {

template <typename T>
float as_float(T logit) {
  return static_cast<float>(comparable(logit));
}

// As the core's scans go through a row, by one thread.
template <typename T>
class RowScan {
 public:
  RowScan(const T* row, int64_t vocab_size, const RowRule& rule, const RowNoise& noise, float best)
      : row_(row), vocab_size_(vocab_size), noise_(noise), scale_(rule, best, vocab_size) {}

  float value(int64_t i) const { return as_float(row_[i]); }

  template <bool with_scores>
  RowSums above(float pivot) const {
    RowSums sums;
    NoisyMax max{noise_, scale_.scale, {}};
    for_each_run([&](const auto& logits, int64_t first) {
      take_above<with_scores>(sums, max, scale_, logits, first, pivot);
    });
    sums.best = max.best;
    return sums;
  }
  int64_t best_of_all() const {
    NoisyMax max{noise_, scale_.scale, {}};
    for_each_run(
        [&](const auto& logits, int64_t first) { take_run(max, logits, first, -kInfinity); });
    return max.best.index;
  }
  Argmax<double> residual(const ResidualRace& race) const {
    Argmax<double> best;
    for_each_run([&](const auto& logits, int64_t first) { take_run(best, race, logits, first); });
    return best;
  }

 private:
  template <typename Take>
  void for_each_run(const Take& take) const {
    constexpr int kRun = 8;
    int64_t first = 0;
    for (; first + kRun <= vocab_size_; first += kRun) {
      float logits[kRun];
      for (int k = 0; k < kRun; ++k) logits[k] = value(first + k);
      take(logits, first);
    }
    for (; first < vocab_size_; ++first) {
      const float logits[1] = {value(first)};
      take(logits, first);
    }
  }

  const T* row_;
  int64_t vocab_size_;
  RowNoise noise_;
  RowScale scale_;
};

// Value: what the logits are compared as.
template <typename Value, typename T>
Argmax<Value> finite_argmax(const T* row, int64_t vocab_size) {
  if constexpr (std::is_same_v<Value, decltype(comparable(T{}))>) {
    const Argmax<Value> best = argmax_row(row, vocab_size);
    if (!best.has_nan && !is_bad(best.value)) return best;
  }
  Argmax<Value> best;
  for (int64_t i = 0; i < vocab_size; ++i) {
    const Value logit[1] = {static_cast<Value>(comparable(row[i]))};
    take_finite(best, logit, i);
  }
  return best;
}

template <typename T>
TargetToken choose(const T* row, int64_t vocab_size, const RowRule& rule, const RowNoise& noise,
                   const RowDraft& draft) {
  if (rule.is_greedy) {
    return target_token(finite_argmax<decltype(comparable(T{}))>(row, vocab_size));
  }
  const Argmax<float> best = finite_argmax<float>(row, vocab_size);
  const RowScan<T> scan(row, vocab_size, rule, noise, best.value);
  return sampled_choice<kLogitBits<T>>(rule, noise, best, vocab_size, draft, scan);
}

template <typename T, typename Params>
void sample_rows(const Params& params) {
  const LogitsRows& rows = params.logits.rows;
  run_round(params, [&](int64_t b, int64_t num_live) {
    const RowRule rule = row_rule(params.logits.rules, b, rows.vocab_size);
    return walk_choices(SerialGroup{}, params, num_live, b, [&](int64_t i) {
      return choose(rows.row<T>(b, i), rows.vocab_size, rule, row_noise(params, b, i),
                    row_draft(params, b, i));
    });
  });
}

template <typename Params>
void sample(const Params& params) {
  switch (params.logits.rows.type) {
    case LogitsType::kFloat16:
      return sample_rows<Half>(params);
    case LogitsType::kBFloat16:
      return sample_rows<BFloat16>(params);
    case LogitsType::kFloat32:
      return sample_rows<float>(params);
    case LogitsType::kFloat64:
      return sample_rows<double>(params);
  }
}

}  // namespace

void launch_chain_sampling_from_logits(const SampleChainLogitsParams& params) { sample(params); }
void launch_tree_sampling_from_logits(const SampleTreeLogitsParams& params) { sample(params); }

}  // namespace adaptive_spec::cpu
