// The core's argmax at the speed of memory: compilers vectorise a running maximum, but not one that
// drags an index along. So each block is first asked for its maximum, and only a block that beats
// all before it is searched for the place.
#pragma once

#include <cstdint>

#include "argmax.h"

namespace adaptive_spec::cpu {

template <typename T>
auto argmax_row(const T* logits, int64_t vocab_size) {
  constexpr int64_t kLanes = 16;
  constexpr int64_t kBlock = 1024;
  Argmax<decltype(comparable(T{}))> best;
  using Value = decltype(best.value);

  int64_t begin = 0;
  for (; begin + kBlock <= vocab_size; begin += kBlock) {
    Value lane_max[kLanes];
    int32_t lane_nan[kLanes] = {};
    for (Value& value : lane_max) value = best.value;
    for (int64_t i = begin; i < begin + kBlock; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const Value x = comparable(logits[i + lane]);
        lane_nan[lane] |= x != x;
        lane_max[lane] = x > lane_max[lane] ? x : lane_max[lane];
      }
    }
    Value block_max = best.value;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      best.has_nan |= lane_nan[lane] != 0;
      if (lane_max[lane] > block_max) block_max = lane_max[lane];
    }
    if (block_max > best.value) {
      int64_t i = begin;
      while (comparable(logits[i]) != block_max) ++i;
      best.value = block_max;
      best.index = i;
    }
  }
  for (int64_t i = begin; i < vocab_size; ++i) best.take(comparable(logits[i]), i);
  return best;
}

}  // namespace adaptive_spec::cpu
