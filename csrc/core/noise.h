// Random numbers without a state: each is a function of a seed, a number that the caller counts up
// (the position of a token in its sequence), a stream and a token. So they do not depend on batch
// row, neighbours or history, and two streams never share one.
#pragma once

#include <cstdint>

#include "argmax.h"
#include "elementary.h"
#include "macros.h"

namespace adaptive_spec {

// What the numbers of one row of logits have in common.
struct RowNoise {
  uint64_t seed = 0;
  uint64_t number = 0;
  uint32_t stream = 0;  // a multiple of kKindsOfNoise

  // The kinds of numbers that a stream holds, each independent of the others.
  enum Kind : uint32_t { kChoice, kCoin, kResidual };
};
constexpr uint32_t kKindsOfNoise = 4;
constexpr int64_t kMaxNoiseStream = int64_t{1} << 24;
constexpr int kNoiseBlock = 4;
constexpr int kNoiseBlockBits = 2;

struct NoiseWords {
  uint32_t words[kNoiseBlock];
};

// Philox 4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
AS_HD NoiseWords philox(NoiseWords counter, uint32_t key0, uint32_t key1) {
  uint32_t (&c)[kNoiseBlock] = counter.words;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t high0 = static_cast<uint32_t>(product0 >> 32);
    const uint32_t high1 = static_cast<uint32_t>(product1 >> 32);
    c[0] = high1 ^ c[1] ^ key0;
    c[1] = static_cast<uint32_t>(product1);
    c[2] = high0 ^ c[3] ^ key1;
    c[3] = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// The words of tokens kNoiseBlock * block and the following ones.
AS_HD NoiseWords noise_words(const RowNoise& noise, RowNoise::Kind kind, int64_t block) {
  const NoiseWords counter{{static_cast<uint32_t>(block), static_cast<uint32_t>(noise.number),
                            static_cast<uint32_t>(noise.number >> 32),
                            noise.stream + static_cast<uint32_t>(kind)}};
  return philox(counter, static_cast<uint32_t>(noise.seed),
                static_cast<uint32_t>(noise.seed >> 32));
}

// The words of tokens first .. first + n - 1. No array is indexed by a variable, which would take
// it out of registers.
template <int n>
AS_HD void noise_run(const RowNoise& noise, RowNoise::Kind kind, int64_t first,
                     uint32_t (&words)[n]) {
  constexpr int kBlocks = (n + kNoiseBlock - 2) / kNoiseBlock + 1;
  // Rounded down, also where a run begins before the row.
  const int64_t block = first >> kNoiseBlockBits;
  const int shift = static_cast<int>(first & (kNoiseBlock - 1));
  uint32_t all[kBlocks * kNoiseBlock];
  AS_UNROLL
  for (int j = 0; j < kBlocks; ++j) {
    // The last one is needed only where a run begins within a block.
    NoiseWords own{};
    if (j * kNoiseBlock < shift + n) own = noise_words(noise, kind, block + j);
    for (int k = 0; k < kNoiseBlock; ++k) all[j * kNoiseBlock + k] = own.words[k];
  }
  AS_UNROLL
  for (int k = 0; k < n; ++k) {
    words[k] = all[k];
    AS_UNROLL
    for (int j = 1; j < kNoiseBlock; ++j) words[k] = shift == j ? all[k + j] : words[k];
  }
}
AS_HD uint32_t noise_word(const RowNoise& noise, RowNoise::Kind kind, int64_t token) {
  uint32_t word[1];
  noise_run(noise, kind, token, word);
  return word[0];
}

// Calls take(value, word, k) for the bits k of `open` that are set, in ascending order. One text of
// `take` serves the whole run.
template <int n, typename Take>
AS_HD void for_each_open(uint32_t open, const float (&values)[n], const uint32_t (&words)[n],
                         const Take& take) {
  while (open != 0) {
    float value = 0.0f;
    uint32_t word = 0;
    int at = 0;
    for (int k = n - 1; k >= 0; --k) {
      const bool is_set = (open >> k & 1) != 0;
      value = is_set ? values[k] : value;
      word = is_set ? words[k] : word;
      at = is_set ? k : at;
    }
    take(value, word, at);
    open &= open - 1;
  }
}

// A word as a uniform number in [0, 1).
AS_HD float uniform(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// A word as a uniform number in (0, 1], taken from 1.
AS_HD float from_one(uint32_t word) { return (static_cast<float>(~word) + 0.5f) * 0x1p-32f; }

// A word as an exponentially distributed number, times log2(e); never below from_one(word). Exact
// at both ends: the smallest, which win races, come from their distance to 1.
AS_HD float exponential(uint32_t word) {
  const float distance = from_one(word);
  if (distance < 0.25f) return -log2_near_one(-distance);
  return -log2_of((static_cast<float>(word) + 0.5f) * 0x1p-32f);
}

// A word as a number with Gumbel's distribution, in units of ln 2 and up to a constant: the largest
// of score + gumbel, one number for each token, is at a token with probability proportional to
// 2^score.
AS_HD float gumbel(uint32_t word) { return -log2_of(exponential(word)); }

// No gumbel(word) is above this, which takes no logarithm. For from_one in [2^e, 2^(e + 1)) it is
// -e, and the number itself at most -e - log2(log2(e)).
AS_HD float gumbel_bound(uint32_t word) {
  return static_cast<float>(127 - static_cast<int32_t>(bits_from_float(from_one(word)) >> 23));
}
constexpr float kMaxGumbel = 33.0f;

}  // namespace adaptive_spec
