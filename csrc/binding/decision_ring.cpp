#include "decision_ring.h"

#include <chrono>

namespace adaptive_spec {
namespace {

constexpr auto kIdleInterval = std::chrono::milliseconds(50);

std::size_t checked_num_bytes(int64_t depth, int64_t num_slots) {
  if (depth < kMinRingDepth || (depth & (depth - 1)) != 0 || depth > (int64_t{1} << 20)) {
    throw std::invalid_argument("DecisionRing: `depth` must be a power of two from " +
                                std::to_string(kMinRingDepth) + " to 2^20, got " +
                                std::to_string(depth));
  }
  if (num_slots < 1 || num_slots > kMaxSlots) {
    throw std::invalid_argument("DecisionRing: `num_slots` must be from 1 to " +
                                std::to_string(kMaxSlots) + ", got " + std::to_string(num_slots));
  }
  return num_ring_words(depth, num_slots) * sizeof(uint64_t);
}

}  // namespace

DecisionRing::DecisionRing(int64_t depth, int64_t num_slots, int device_index)
    : memory_(checked_num_bytes(depth, num_slots), device_index),
      view_{static_cast<uint64_t*>(memory_.host()), depth, num_slots} {}

std::optional<RoundRecord> DecisionRing::record(int64_t round) const {
  uint64_t words[RoundRecord::kNumWords];
  for (int64_t i = 0; i < RoundRecord::kNumWords; ++i) {
    words[i] = __atomic_load_n(view_.record(round) + i, __ATOMIC_ACQUIRE);
    switch (ring_status(static_cast<uint32_t>(words[i]), round)) {
      case RingStatus::kReady:
        break;
      case RingStatus::kNotYet:
        return std::nullopt;
      case RingStatus::kOverrun:
        throw_overrun(round);
    }
  }
  return RoundRecord::from_words(words);
}

DecisionWord DecisionRing::latest(int32_t slot) const {
  DecisionWord newest =
      DecisionWord::unpack(__atomic_load_n(view_.decision(0, slot), __ATOMIC_ACQUIRE));
  for (int64_t round = 1; round < view_.depth; ++round) {
    const DecisionWord word =
        DecisionWord::unpack(__atomic_load_n(view_.decision(round, slot), __ATOMIC_ACQUIRE));
    if (ring_status(word.round, newest.round) == RingStatus::kOverrun) newest = word;
  }
  return newest;
}

void check_timeout(double timeout_s) {
  constexpr double kMaxTimeout = 1e6;
  if (!(timeout_s >= 0.0 && timeout_s <= kMaxTimeout)) {
    throw std::invalid_argument("`timeout_s` must be from 0 to 1e6 seconds, got " +
                                std::to_string(timeout_s));
  }
}

DecisionWord DecisionRing::wait(int64_t round, int32_t slot, double timeout_s,
                                const std::function<void()>& on_idle) {
  check_timeout(timeout_s);
  if (auto word = read(round, slot)) return *word;
  stalls_.fetch_add(1, std::memory_order_relaxed);
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  auto next_idle = Clock::now() + kIdleInterval;
  do {
    // A batch of reads between two looks at the clock keeps the reaction time well under 1 µs.
    for (int i = 0; i < 64; ++i) {
      if (auto word = read(round, slot)) return *word;
    }
    if (on_idle && Clock::now() >= next_idle) {
      on_idle();
      next_idle = Clock::now() + kIdleInterval;
    }
  } while (Clock::now() < deadline);
  throw RingTimeoutError("the decision of round " + std::to_string(round) + " for slot " +
                         std::to_string(slot) + " did not arrive within " +
                         std::to_string(timeout_s) +
                         " s; was a verify op launched with this state in that round?");
}

void DecisionRing::check_slot(int64_t slot) const {
  if (slot < 0 || slot >= view_.num_slots) {
    throw std::invalid_argument("DecisionRing: `slot` must be from 0 to " +
                                std::to_string(view_.num_slots - 1) + ", got " +
                                std::to_string(slot));
  }
}

void DecisionRing::throw_overrun(int64_t round) const {
  throw RingOverrunError("round " + std::to_string(round) +
                         " was overwritten: the ring holds the last " +
                         std::to_string(view_.depth) + " rounds");
}

}  // namespace adaptive_spec
