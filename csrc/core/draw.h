// Drawing a token from a row of weights with one uniform number. The weights are added up as
// integers, so however a row is spread over lanes and blocks, and in whatever order their sums
// meet, the same uniform gives the same token.
#pragma once

#include <cstdint>

#include "argmax.h"
#include "macros.h"

namespace adaptive_spec {

// Units that a weight of 1 counts for: as fine as the sum of a whole row, each entry up to 2, still
// fits 63 bits. A weight below one unit counts as none; with a vocabulary of 2^18 a unit is 2^-43.
AS_HD double units_per_weight(int64_t vocab_size) {
  int bits = 61;
  while (bits > 0 && (vocab_size - 1) >> (61 - bits) > 0) --bits;
  return static_cast<double>(int64_t{1} << bits);
}

// NaN and what is not positive count as none, what is above 2 as 2.
AS_HD int64_t weight_units(float weight, double units_per_weight) {
  if (!(weight > 0.0f)) return 0;
  const float bounded = weight < 2.0f ? weight : 2.0f;
  return static_cast<int64_t>(static_cast<double>(bounded) * units_per_weight);
}

// The drawn token is the first one up to which the units add up to more than this. `total` > 0; a
// coin outside [0, 1), NaN among them, is taken to the nearer end.
AS_HD int64_t draw_threshold(float coin, int64_t total) {
  if (!(coin > 0.0f)) return 0;
  if (!(coin < 1.0f)) return total - 1;
  const int64_t threshold =
      static_cast<int64_t>(static_cast<double>(coin) * static_cast<double>(total));
  return threshold < total ? threshold : total - 1;
}

// What the next token is drawn from after a walk that stopped: the target's probabilities less what
// the rejected draft could have been, as far as that is above zero.
struct ResidualRow {
  const float* target = nullptr;  // [V]
  const float* draft = nullptr;   // [V], null: nothing is taken off
  int64_t excluded = -1;          // a token whose weight is zero
  float scale = 1.0f;             // of the target's probabilities

  AS_HD float weight(int64_t i) const {
    if (i == excluded) return 0.0f;
    const float taken = draft == nullptr ? 0.0f : draft[i];
    // A draft row may be left unwritten by a caller that has no draft probabilities.
    const float scaled = scale * target[i];
    return taken == taken ? scaled - taken : scaled;
  }
};

// What scanning a row gives, mergeable in any order.
struct RowSum {
  int64_t units = 0;   // of all weights
  Argmax<float> best;  // the target's largest probability

  AS_HD void take(const ResidualRow& row, double units_per_weight, int64_t i) {
    units += weight_units(row.weight(i), units_per_weight);
    best.take(row.target[i], i);
  }
};

}  // namespace adaptive_spec
