// The end of a decode round: one call, made by exactly one thread, that takes the round's exact
// integer sums into the state and publishes every slot's decision.
#pragma once

#include <cstdint>

#include "ema_policy.h"
#include "macros.h"
#include "records.h"
#include "ring.h"

namespace adaptive_spec {

// What the round ran with, fixed when it was launched.
struct RoundTag {
  int32_t slot;
  int32_t steps;
};

// sum, num_reqs: accepted drafts (bonus excluded) of the live requests, and their number.
AS_HD void finish_round(int64_t* state_words, int64_t* ring_words, RoundTag tag, int64_t sum,
                        int64_t num_reqs, int64_t num_anomalies) {
  StateView state(state_words);
  RingView ring{reinterpret_cast<uint64_t*>(ring_words), state.header->ring_depth,
                state.header->num_slots};
  observe(state.configs[tag.slot], state.slots[tag.slot], tag.steps, sum, num_reqs);
  state.header->num_anomalies += num_anomalies;
  const int64_t round = state.header->next_round++;
  ring.publish(round, RoundRecord{sum, num_reqs, tag.steps, tag.slot}, state);
}

// Fills the ring as if the state had stood still for the last `depth` rounds. For a state that is
// new, reset or loaded; not while rounds are in flight.
AS_HD void seed_ring(int64_t* state_words, int64_t* ring_words) {
  StateView state(state_words);
  RingView ring{reinterpret_cast<uint64_t*>(ring_words), state.header->ring_depth,
                state.header->num_slots};
  for (int64_t age = 1; age <= ring.depth; ++age) {
    ring.publish(state.header->next_round - age, RoundRecord{}, state);
  }
}

AS_HD void reset_state(int64_t* state_words) {
  StateView state(state_words);
  state.header->next_round = 0;
  state.header->num_anomalies = 0;
  state.header->pending = RoundTotals{};
  for (int32_t slot = 0; slot < state.header->num_slots; ++slot) {
    reset_slot(state.configs[slot], state.slots[slot]);
  }
}

// What is wrong with a (state, ring, slot) triple, or null. Reads the header, so the state must lie
// in memory that the caller can read.
AS_HD const char* state_error(const int64_t* state_words, int64_t state_numel, int64_t ring_numel,
                              int64_t slot) {
  constexpr int64_t kHeaderWords = sizeof(StateHeader) / kWordSize;
  if (state_numel < kHeaderWords) return "`state` is too short to be an adaptive state";
  const StateHeader& header = *reinterpret_cast<const StateHeader*>(state_words);
  if (header.magic != kStateMagic) {
    return "`state` is not an adaptive state, or one of another layout version";
  }
  if (header.num_slots < 1 || header.num_slots > kMaxSlots ||
      header.num_words != num_state_words(header.num_slots) || state_numel != header.num_words) {
    return "`state` has a size that does not match its header";
  }
  if (header.ring_depth < kMinRingDepth || (header.ring_depth & (header.ring_depth - 1)) != 0) {
    return "`state` names a ring depth that is not a power of two";
  }
  if (ring_numel != num_ring_words(header.ring_depth, header.num_slots)) {
    return "`ring` has a size that does not match `state`";
  }
  if (slot < 0 || slot >= header.num_slots) return "`slot` is not a slot of `state`";
  return nullptr;
}

// What is wrong with the slots of a state that is otherwise sound, or null: an index from outside
// would be looked up in memory that belongs to something else.
AS_HD const char* slots_error(int64_t* state_words) {
  const StateView state(state_words);
  for (int32_t slot = 0; slot < state.header->num_slots; ++slot) {
    const SlotConfig& config = state.configs[slot];
    if (config.num_candidates < 1 || config.num_candidates > kMaxCandidates ||
        state.slots[slot].index < 0 || state.slots[slot].index >= config.num_candidates) {
      return "`state` is damaged: a slot's step count is not one of its candidates";
    }
  }
  return nullptr;
}

}  // namespace adaptive_spec
