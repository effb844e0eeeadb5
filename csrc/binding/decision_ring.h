// The host's end of the decision ring: it owns the memory and, while rounds are in flight, only
// ever reads the words.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "mapped_memory.h"
#include "ring.h"

namespace adaptive_spec {

// The host asked for a round that the ring no longer holds.
struct RingOverrunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A round's decision did not arrive within the bound.
struct RingTimeoutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws std::invalid_argument for what is no time to wait.
void check_timeout(double timeout_s);

class DecisionRing {
 public:
  // device_index: of the CUDA device whose ops publish to the ring, or -1 for the CPU.
  DecisionRing(int64_t depth, int64_t num_slots, int device_index = -1);

  // The decision that exactly `round` published for `slot`; nothing if it has not yet.
  std::optional<DecisionWord> read(int64_t round, int32_t slot) const {
    const DecisionWord word =
        DecisionWord::unpack(__atomic_load_n(view_.decision(round, slot), __ATOMIC_ACQUIRE));
    switch (ring_status(word.round, round)) {
      case RingStatus::kReady:
        return word;
      case RingStatus::kNotYet:
        return std::nullopt;
      case RingStatus::kOverrun:
        break;
    }
    throw_overrun(round);
  }

  // What `round` observed; nothing if it has not finished yet.
  std::optional<RoundRecord> record(int64_t round) const;

  // The newest decision for `slot`, of whatever round.
  DecisionWord latest(int32_t slot) const;

  // As read(), but waits up to `timeout_s` seconds; each call that had to wait counts as one stall.
  // `on_idle` is called now and then meanwhile, and may throw to give up.
  DecisionWord wait(int64_t round, int32_t slot, double timeout_s,
                    const std::function<void()>& on_idle = {});

  void check_slot(int64_t slot) const;

  // Where the host finds the words, and where the device does.
  int64_t* host_words() { return static_cast<int64_t*>(memory_.host()); }
  int64_t* device_words() { return static_cast<int64_t*>(memory_.device()); }
  int64_t num_words() const { return num_ring_words(view_.depth, view_.num_slots); }
  int device_index() const { return memory_.device_index(); }
  int64_t depth() const { return view_.depth; }
  int64_t num_slots() const { return view_.num_slots; }
  int64_t stalls() const { return stalls_.load(std::memory_order_relaxed); }

 private:
  [[noreturn]] void throw_overrun(int64_t round) const;

  MappedMemory memory_;
  RingView view_;
  std::atomic<int64_t> stalls_ = 0;  // several threads may wait at once
};

}  // namespace adaptive_spec
