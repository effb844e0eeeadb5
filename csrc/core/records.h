// The adaptive state as it lies in memory: one int64 tensor that holds
//
//   StateHeader | SlotConfig[num_slots] | SlotState[num_slots]
//
// on whatever device runs the verify ops. The configuration is written once by the host; the
// header's counters and the slot states are written only by finish_round (round.h). Python reads
// the sizes and offsets below from the module instead of repeating them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "macros.h"

namespace adaptive_spec {

constexpr int32_t kMaxSlots = 16;
constexpr int32_t kMaxCandidates = 16;
constexpr int32_t kMaxSteps = 64;
constexpr int32_t kMinRingDepth = 8;
// "ASPEC" and a layout version: a tensor that is not a state, or one saved by another layout, is
// refused instead of being read as garbage.
constexpr int64_t kStateMagic = 0x4153'5045'4300'0001;

// Why a slot's step count is what it is: the last rule that looked at it.
enum class DecisionReason : int32_t {
  kNone = 0,      // no observation yet
  kEmpty = 1,     // the batch had no live request
  kStale = 2,     // the sample ran with another step count and was dropped
  kWarmup = 3,    // still counting warm-up batches
  kInterval = 4,  // between two decision points
  kDwell = 5,     // a decision point within min_dwell of the last switch
  kHold = 6,      // decided to stay
  kUp = 7,
  kDown = 8,
  kCeiling = 9,   // capped by ceiling_coeff
  kProbe = 10,    // left S = 0 to see whether drafts are accepted again
  kBackoff = 11,  // stayed at S = 0, waiting for the next probe
};

struct SlotConfig {
  double ema_alpha;
  double up_hysteresis;
  double down_hysteresis;
  double ceiling_coeff;
  int64_t update_interval;  // batches
  int64_t warmup_batches;
  int64_t min_dwell;      // batches; 0 = off
  int64_t probe_backoff;  // factor; 1 = off
  int32_t batch_size;     // lower bound of the slot's batch-size range
  int32_t num_candidates;
  int32_t initial_index;
  int32_t reset_ema_on_switch;              // 0 or 1
  int32_t candidate_steps[kMaxCandidates];  // ascending, the first num_candidates are valid
};

struct SlotState {
  double ema;           // accepted drafts per request, bonus token excluded
  int64_t batch_count;  // observations taken, dropped and empty ones excluded
  int64_t last_switch;  // batch_count at the last switch
  int64_t num_switches;
  int64_t num_stale;
  int32_t index;  // into candidate_steps
  int32_t reason;
  int32_t probe_wait;  // decision points between two probes of S = 0
  int32_t probe_left;  // decision points to sit out before the next one
  int32_t probing;     // 1 from a probe until a decision confirms or undoes it
  int32_t padding;
};

// What the requests of a round that is in flight add up to, and how many blocks have reported; all
// zero between two rounds. Integers, so the order in which blocks report never shows.
struct RoundTotals {
  int64_t accepted;
  int64_t anomalies;
  uint32_t ticket;
  uint32_t padding;
};

struct StateHeader {
  int64_t magic;
  int64_t num_words;  // of the whole state, in int64
  int32_t num_slots;
  int32_t ring_depth;     // power of two
  int64_t next_round;     // number of the round that finishes next; the first is 0
  int64_t num_anomalies;  // NaN rows and draft ids outside the vocabulary, ever seen
  RoundTotals pending;
};

static_assert(sizeof(StateHeader) == 64 && std::is_trivially_copyable_v<StateHeader>);
static_assert(sizeof(SlotConfig) == 144 && std::is_trivially_copyable_v<SlotConfig>);
static_assert(sizeof(SlotState) == 64 && std::is_trivially_copyable_v<SlotState>);
static_assert(offsetof(StateHeader, next_round) == 24);
static_assert(offsetof(StateHeader, pending) == 40);
static_assert(offsetof(SlotConfig, candidate_steps) == 80);
static_assert(offsetof(SlotState, index) == 40);

constexpr int64_t kWordSize = sizeof(int64_t);

AS_HD constexpr int64_t num_state_words(int64_t num_slots) {
  return (sizeof(StateHeader) + num_slots * (sizeof(SlotConfig) + sizeof(SlotState))) / kWordSize;
}

// Typed access to a state tensor's memory.
struct StateView {
  StateHeader* header;
  const SlotConfig* configs;
  SlotState* slots;

  AS_HD explicit StateView(int64_t* words) {
    header = reinterpret_cast<StateHeader*>(words);
    configs = reinterpret_cast<const SlotConfig*>(header + 1);
    slots = reinterpret_cast<SlotState*>(const_cast<SlotConfig*>(configs + header->num_slots));
  }
  AS_HD int32_t steps(int32_t slot) const {
    return configs[slot].candidate_steps[slots[slot].index];
  }
};

}  // namespace adaptive_spec
