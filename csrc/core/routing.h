// Which slot a batch size belongs to, and which slot's step count a round runs with.
#pragma once

#include <cstdint>

#include "macros.h"
#include "records.h"

namespace adaptive_spec {

// The smallest captured size that holds the batch, or the batch itself where none does (it then
// runs without a graph). `sizes` ascends.
AS_HD int64_t pad_to_cuda_graph_bs(const int64_t* sizes, int64_t num_sizes, int64_t batch_size) {
  for (int64_t i = 0; i < num_sizes; ++i) {
    if (sizes[i] >= batch_size) return sizes[i];
  }
  return batch_size;
}

// The last slot whose lower bound is not above the (padded) batch size; the first slot where all
// are.
AS_HD int32_t slot_for_batch(const SlotConfig* configs, int32_t num_slots, int64_t batch_size) {
  int32_t slot = 0;
  while (slot + 1 < num_slots && configs[slot + 1].batch_size <= batch_size) ++slot;
  return slot;
}

// Keeps a batch size that hovers at a slot boundary from swapping runtime states every round: the
// active slot changes only when the same other slot was routed `rounds` times in a row.
struct SlotDebounce {
  int32_t rounds = 0;  // 0 or 1: follow the routing at once
  int32_t active = -1;
  int32_t pending = -1;
  int32_t seen = 0;

  AS_HD int32_t follow(int32_t routed) {
    if (active < 0 || routed == active) {
      active = routed;
      seen = 0;
      return active;
    }
    seen = routed == pending ? seen + 1 : 1;
    pending = routed;
    if (seen >= rounds) {
      active = routed;
      seen = 0;
    }
    return active;
  }
};

}  // namespace adaptive_spec
