// The token that a row of logits chooses when it is sampled: with a temperature, from the tokens
// that top-k, top-p and min-p leave, by the largest of score and noise (Gumbel-max). It needs no
// probabilities, and depends on nothing but the row, the rule and the noise. Where drafts come with
// the probabilities that they were sampled from, the choice is made by speculative sampling
// instead: the draft if it is accepted, else a token of the residual.
//
// Everything that is taken over a whole row is a maximum or a sum of integers, so it does not show
// how a row was spread over lanes and blocks. How a row is gone through is each backend's own: a
// *scan* offers
//
//   value(i)                        a logit, as binary32
//   best_of_all()                   where score and noise are largest
//   above<with_scores>(pivot)       RowSums of the entries above a logit
//   residual(race)                  Argmax<double> of `race` over the row
//
// with results that are the same in all lanes.
#pragma once

#include <cstdint>
#include <limits>

#include "argmax.h"
#include "draw.h"
#include "elementary.h"
#include "macros.h"
#include "noise.h"
#include "strided.h"

namespace adaptive_spec {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr float kSmallestNormal = std::numeric_limits<float>::min();
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Leading bits of a binary32 that tell the logits of a type apart.
template <typename T>
constexpr int kLogitBits = 32;
template <>
constexpr int kLogitBits<BFloat16> = 16;
template <>
constexpr int kLogitBits<Half> = 19;

// How each request of a batch samples. Absent: temperature 1, no filter.
struct SamplingRules {
  Vector<const int64_t> seeds;      // [B]
  Vector<const float> temperature;  // [B]
  Vector<const int32_t> top_k;      // [B]
  Vector<const float> top_p;        // [B]
  Vector<const float> min_p;        // [B]
  uint32_t stream = 0;              // of RowNoise
};

// One request's, ready for use.
struct RowRule {
  float scale = 1.0f;  // a logit in log2 units: log2(e) / temperature
  float top_p = 1.0f;
  float min_score = -kInfinity;  // log2(min_p), below the row's best
  int64_t top_k = kNoLimit;
  bool is_greedy = false;
  bool has_filter = false;

  // How many units may lie above a token that top-p keeps, and one more.
  AS_HD int64_t top_p_units(int64_t all_units) const {
    if (top_p >= 1.0f) return kNoLimit;
    const double wanted = static_cast<double>(top_p) * static_cast<double>(all_units);
    const int64_t whole = static_cast<int64_t>(wanted);
    const int64_t units = whole + (static_cast<double>(whole) < wanted);
    return units < 1 ? 1 : units > all_units ? all_units : units;
  }
};

// Whatever is not above its lower end, NaN among it, is taken to be off, but for a temperature,
// which is then 0. What leaves nothing but the likeliest token is greedy: the first of equals.
AS_HD RowRule row_rule(const SamplingRules& rules, int64_t b, int64_t vocab_size) {
  const float temperature = rules.temperature ? rules.temperature[b] : 1.0f;
  const int64_t top_k = rules.top_k ? rules.top_k[b] : 0;
  const float top_p = rules.top_p ? rules.top_p[b] : 1.0f;
  const float min_p = rules.min_p ? rules.min_p[b] : 0.0f;
  RowRule rule;
  rule.is_greedy = !(temperature > 0.0f) || top_k == 1 || top_p <= 0.0f || min_p >= 1.0f;
  if (rule.is_greedy) return rule;
  constexpr float kLog2E = 0x1.715476p+0f;
  const float scale = kLog2E / temperature;
  rule.scale = scale < kLargestFloat ? scale : kLargestFloat;
  if (top_k > 0 && top_k < vocab_size) rule.top_k = top_k;
  if (top_p < 1.0f) rule.top_p = top_p;
  if (min_p >= kSmallestNormal) rule.min_score = log2_of(min_p);
  rule.has_filter = rule.top_k < kNoLimit || rule.top_p < 1.0f || rule.min_score > -kInfinity;
  return rule;
}

// NaN and +inf make a row unusable for sampling; -inf is a token that may not be chosen.
AS_HD bool is_bad(float logit) { return !(logit < kInfinity); }
AS_HD bool is_bad(double logit) { return !(logit < static_cast<double>(kInfinity)); }

// The best finite entries of a row, and (has_nan) whether it has a bad one. As Argmax::take_run.
template <typename T, int n>
AS_HD void take_finite(Argmax<T>& best, const T (&logits)[n], int64_t first) {
  T finite[n];
  for (int k = 0; k < n; ++k) {
    const bool bad = is_bad(logits[k]);
    finite[k] = bad ? -static_cast<T>(kInfinity) : logits[k];
    best.has_nan |= bad;
  }
  best.take_run(finite, first);
}

// Entries of a row in log2 units below its best, and what they weigh there.
struct RowScale {
  float best = 0.0f;
  float scale = 1.0f;
  float min_score = -kInfinity;
  double units_per_weight = 1.0;

  AS_HD RowScale(const RowRule& rule, float best_logit, int64_t vocab_size)
      : best(best_logit),
        scale(rule.scale),
        min_score(rule.min_score),
        units_per_weight(adaptive_spec::units_per_weight(vocab_size)) {}

  AS_HD float score(float logit) const { return (logit - best) * scale; }
  AS_HD float weight(float logit) const { return exp2_of(score(logit)); }
  AS_HD int64_t units(float logit) const { return weight_units(weight(logit), units_per_weight); }
  AS_HD bool passes_min_p(float logit) const { return score(logit) >= min_score; }
};

// Gumbel-max over entries that are taken in ascending order.
struct NoisyMax {
  RowNoise noise;
  float scale = 1.0f;
  Argmax<double> best;

  // In binary64, so that noise tells equal logits apart at low temperatures too.
  AS_HD void take(float logit, uint32_t word, int64_t i) {
    if (is_hopeless(logit, gumbel_bound(word))) return;
    best.take(
        static_cast<double>(logit) * static_cast<double>(scale) + static_cast<double>(gumbel(word)),
        i);
  }
  // Whether such a logit cannot win with that much noise. With room for the rounding of binary32;
  // what is not a number may win.
  AS_HD bool is_hopeless(float logit, float most_noise) const {
    const float score = logit * scale;
    const float room = (score < 0.0f ? -score : score) * 0x1p-21f;
    return static_cast<float>(best.value) - score > most_noise + room;
  }
};

// Entries first .. first + n - 1, those above `pivot`.
template <int n>
AS_HD void take_run(NoisyMax& max, const float (&logits)[n], int64_t first, float pivot) {
  float top = -kInfinity;
  for (int k = 0; k < n; ++k) top = logits[k] > top ? logits[k] : top;
  if (!(top > pivot) || max.is_hopeless(top, kMaxGumbel)) return;
  uint32_t words[n];
  noise_run(max.noise, RowNoise::kChoice, first, words);
  uint32_t open = 0;
  for (int k = 0; k < n; ++k) {
    const bool may_win = logits[k] > pivot && !max.is_hopeless(logits[k], gumbel_bound(words[k]));
    open |= static_cast<uint32_t>(may_win) << k;
  }
  for_each_open(open, logits, words,
                [&](float logit, uint32_t word, int k) { max.take(logit, word, first + k); });
}

// What a row has above a logit. Mergeable in any order.
struct RowSums {
  int64_t count = 0;
  int64_t units = 0;
  int64_t kept_units = 0;  // of those that pass min-p
  Argmax<double> best;     // of score and noise, among these

  AS_HD void take(const RowScale& scale, float logit) {
    const int64_t units_here = scale.units(logit);
    ++count;
    units += units_here;
    if (scale.passes_min_p(logit)) kept_units += units_here;
  }
};

// Those of entries first .. first + n - 1 that are above `pivot`.
template <bool with_scores, int n>
AS_HD void take_above(RowSums& sums, NoisyMax& max, const RowScale& scale, const float (&logits)[n],
                      int64_t first, float pivot) {
  for (int k = 0; k < n; ++k) {
    if (logits[k] > pivot) sums.take(scale, logits[k]);
  }
  if (with_scores) take_run(max, logits, first, pivot);
}

// What the residual of a row races for: weight over an exponential number, the largest wins.
struct ResidualRace {
  RowNoise noise;
  RowScale scale;
  float border;                  // only logits above it are kept
  float share;                   // a weight as a probability
  const float* draft = nullptr;  // [V]

  AS_HD float left(float logit, int64_t i) const {
    if (!(logit > border && scale.passes_min_p(logit))) return 0.0f;
    const float taken = draft[i] == draft[i] ? draft[i] : 0.0f;
    return scale.weight(logit) * share - taken;
  }
};

template <int n>
AS_HD void take_run(Argmax<double>& best, const ResidualRace& race, const float (&logits)[n],
                    int64_t first) {
  float left[n];
  bool has_any = false;
  for (int k = 0; k < n; ++k) {
    left[k] = race.left(logits[k], first + k);
    has_any |= left[k] > 0.0f;
  }
  if (!has_any) return;
  uint32_t words[n];
  noise_run(race.noise, RowNoise::kResidual, first, words);
  uint32_t open = 0;
  for (int k = 0; k < n; ++k) {
    // At best it takes that long.
    const double time = static_cast<double>(from_one(words[k]));
    const bool may_win = left[k] > 0.0f && static_cast<double>(left[k]) > best.value * time;
    open |= static_cast<uint32_t>(may_win) << k;
  }
  for_each_open(open, left, words, [&](float weight, uint32_t word, int k) {
    best.take(static_cast<double>(weight) / static_cast<double>(exponential(word)), first + k);
  });
}

// Floats in ascending order as integers, and back; -0 is below 0.
AS_HD int64_t ordered_key(float x) {
  const int32_t bits = static_cast<int32_t>(bits_from_float(x));
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
AS_HD float from_ordered_key(int64_t key) {
  const int32_t bits = static_cast<int32_t>(key);
  return float_from_bits(static_cast<uint32_t>(bits < 0 ? bits ^ 0x7fffffff : bits));
}

// Target only: a candidate is drawn from all tokens; while the filters do not keep it, another one
// is drawn from those above it, with the same noise. The first that is kept is the best of the kept
// ones, since all of those took part. Most rows are done with the first.
template <typename Scan>
AS_HD int64_t choose_token(const RowRule& rule, float best, int64_t vocab_size, const Scan& scan) {
  int64_t candidate = scan.best_of_all();
  if (!rule.has_filter) return candidate;
  const RowScale scale(rule, best, vocab_size);
  const int64_t units =
      rule.top_p < 1.0f ? rule.top_p_units(scan.template above<false>(-kInfinity).units) : kNoLimit;
  while (true) {
    const float logit = scan.value(candidate);
    const RowSums sums = scan.template above<true>(logit);
    // The row's best is kept, so this ends.
    if (sums.count < rule.top_k && sums.units < units && scale.passes_min_p(logit)) {
      return candidate;
    }
    candidate = sums.best.index;
  }
}

// The tokens that top-k and top-p keep are those above `border`; all_kept: their units, as far as
// min-p keeps them too.
struct KeptTokens {
  float border = -kInfinity;
  int64_t units = 0;
};

// The border is looked for bit by bit, one scan for each of the logits' leading `kBits`.
template <int kBits, typename Scan>
AS_HD KeptTokens find_kept(const RowRule& rule, float best, const Scan& scan) {
  const RowSums all = scan.template above<false>(-kInfinity);
  KeptTokens kept{-kInfinity, all.kept_units};
  const int64_t units = rule.top_p_units(all.units);
  if (all.count < rule.top_k && all.units < units) return kept;
  constexpr int kShift = 32 - kBits;
  int64_t low = ordered_key(-kInfinity) >> kShift;  // not kept
  int64_t high = ordered_key(best) >> kShift;       // kept
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const float pivot = from_ordered_key((middle << kShift) | ((int64_t{1} << kShift) - 1));
    const RowSums sums = scan.template above<false>(pivot);
    if (sums.count < rule.top_k && sums.units < units) {
      high = middle;
    } else {
      low = middle;
      kept = {pivot, sums.kept_units};
    }
  }
  return kept;
}

// The draft that a row accepts or rejects by its probability; null probabilities: none.
struct RowDraft {
  int64_t token = -1;
  const float* probs = nullptr;  // [V]
};

// Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): the draft, or a token of the
// residual.
template <int kBits, typename Scan>
AS_HD int64_t choose_or_reject(const RowRule& rule, const RowNoise& noise,
                               const Argmax<float>& best, int64_t vocab_size, const RowDraft& draft,
                               const Scan& scan) {
  const RowScale scale(rule, best.value, vocab_size);
  const KeptTokens kept = find_kept<kBits>(rule, best.value, scan);
  if (draft.token >= 0 && draft.token < vocab_size) {
    const float logit = scan.value(draft.token);
    const bool is_kept = logit > kept.border && scale.passes_min_p(logit);
    const float coin = uniform(noise_word(noise, RowNoise::kCoin, 0));
    const float prob = draft.probs[draft.token];
    const float q = prob == prob ? prob : 0.0f;
    const double scaled =
        static_cast<double>(coin) * static_cast<double>(q) * static_cast<double>(kept.units);
    if (is_kept && scaled < static_cast<double>(scale.units(logit))) return draft.token;
  }
  const float share = static_cast<float>(scale.units_per_weight / static_cast<double>(kept.units));
  const Argmax<double> drawn = scan.residual({noise, scale, kept.border, share, draft.probs});
  return drawn.is_usable() ? drawn.index : best.index;
}

}  // namespace adaptive_spec
