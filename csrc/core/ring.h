// The decision ring: the only memory that the device writes and the host reads while rounds are in
// flight. For each of the last `depth` rounds it holds, in 64-bit words,
//
//   DecisionWord[num_slots] | RoundRecord (3 words)
//
// Each word carries the number of the round that wrote it, so a reader sees it whole or sees that
// it is not there; no lock and no order between words is needed. A word that has not been written
// yet carries the number of an earlier round, and the ring starts out filled with the rounds before
// 0: reading round -1 gives the step counts to start with.
#pragma once

#include <cstdint>

#include "macros.h"
#include "records.h"

namespace adaptive_spec {

// 64 bits: round number (low 32) | steps (8) | reason (8) | spare (16).
struct DecisionWord {
  uint32_t round;
  uint8_t steps;
  uint8_t reason;

  AS_HD static uint64_t pack(int64_t round, int32_t steps, int32_t reason) {
    return static_cast<uint32_t>(round) | static_cast<uint64_t>(static_cast<uint8_t>(steps)) << 32 |
           static_cast<uint64_t>(static_cast<uint8_t>(reason)) << 40;
  }
  AS_HD static DecisionWord unpack(uint64_t bits) {
    return {static_cast<uint32_t>(bits), static_cast<uint8_t>(bits >> 32),
            static_cast<uint8_t>(bits >> 40)};
  }
};

// What one round observed. Each of its three words repeats the round number (low 32 bits), since
// the device may be overwriting them while the host reads.
struct RoundRecord {
  int64_t sum;       // accepted drafts over the live requests, 32 bits
  int64_t num_reqs;  // live requests, 32 bits
  int32_t steps;     // draft steps the round ran with
  int32_t slot;

  static constexpr int64_t kNumWords = 3;

  AS_HD uint64_t word(int64_t i, int64_t round) const {
    const uint64_t high = i == 0   ? static_cast<uint32_t>(sum)
                          : i == 1 ? static_cast<uint32_t>(num_reqs)
                                   : static_cast<uint32_t>(steps | slot << 8);
    return static_cast<uint32_t>(round) | high << 32;
  }
  AS_HD static RoundRecord from_words(const uint64_t* words) {
    const uint32_t tag = static_cast<uint32_t>(words[2] >> 32);
    return {static_cast<int64_t>(words[0] >> 32), static_cast<int64_t>(words[1] >> 32),
            static_cast<int32_t>(tag & 0xff), static_cast<int32_t>(tag >> 8)};
  }
};

AS_HD constexpr int64_t num_ring_words(int64_t depth, int64_t num_slots) {
  return depth * (num_slots + RoundRecord::kNumWords);
}

// How a word's round relates to the one asked for. Round numbers wrap at 2^32, and the two are
// never further apart than the ring is deep, so the sign of their difference tells.
enum class RingStatus { kReady, kNotYet, kOverrun };

AS_HD RingStatus ring_status(uint32_t found, int64_t wanted) {
  const int32_t ahead = static_cast<int32_t>(found - static_cast<uint32_t>(wanted));
  return ahead == 0 ? RingStatus::kReady : ahead < 0 ? RingStatus::kNotYet : RingStatus::kOverrun;
}

// What the host may see of the words is ordered in one direction only: behind everything that the
// publishing thread wrote before (docs/cuda.md, "Memory ordering of the ring"). On the device one
// fence does that for all words; a release per word would be a fence per word, each waiting for the
// word before to cross the bus. A host that publishes pays nothing for a release per word, and
// ThreadSanitizer understands it, as it does not understand fences.
AS_HD void release_to_system() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}

// After release_to_system().
AS_HD void store_for_system(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

// The words of one ring, wherever they lie.
struct RingView {
  uint64_t* words;
  int64_t depth;  // power of two
  int64_t num_slots;

  AS_HD uint64_t* at(int64_t round) const {
    return words + (round & (depth - 1)) * (num_slots + RoundRecord::kNumWords);
  }
  AS_HD uint64_t* decision(int64_t round, int32_t slot) const { return at(round) + slot; }
  AS_HD uint64_t* record(int64_t round) const { return at(round) + num_slots; }

  AS_HD void publish(int64_t round, const RoundRecord& observed, const StateView& state) const {
    release_to_system();
    for (int64_t i = 0; i < RoundRecord::kNumWords; ++i) {
      store_for_system(record(round) + i, observed.word(i, round));
    }
    // Every slot's word, not just the routed one's: a reader that wants "slot k as of round r" then
    // needs no history of which rounds ran where.
    for (int32_t slot = 0; slot < state.header->num_slots; ++slot) {
      store_for_system(decision(round, slot),
                       DecisionWord::pack(round, state.steps(slot), state.slots[slot].reason));
    }
  }
};

}  // namespace adaptive_spec
