// The ring and its readers under a writer that never waits for them. Whatever a reader is told must
// be what exactly that round published, "not yet", or an overrun error. The expected words come
// from a serial run of the same rounds. Built twice, for ThreadSanitizer (the words are the only
// thing shared) and for AddressSanitizer; faults planted in copies of the sources must make it fail
// (CMakeLists.txt).
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "decision_ring.h"
#include "ring.h"
#include "round.h"
#include "step_reader.h"

using namespace adaptive_spec;

namespace {

constexpr int64_t kWrap = int64_t{1} << 32;
constexpr int32_t kNumSlots = 3;

// Random bits that depend on `seed` alone.
uint64_t mix(uint64_t seed) {
  seed += 0x9e3779b97f4a7c15;
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111eb;
  return seed ^ (seed >> 31);
}

// A state with `first_round` as its next round, and a ring seeded from it.
struct Rounds {
  std::vector<int64_t> state_words = std::vector<int64_t>(num_state_words(kNumSlots));
  std::shared_ptr<DecisionRing> ring;

  Rounds(int64_t depth, int64_t first_round)
      : ring(std::make_shared<DecisionRing>(depth, kNumSlots)) {
    auto* header = reinterpret_cast<StateHeader*>(state_words.data());
    *header = {};
    header->magic = kStateMagic;
    header->num_words = num_state_words(kNumSlots);
    header->num_slots = kNumSlots;
    header->ring_depth = static_cast<int32_t>(depth);
    auto* configs = reinterpret_cast<SlotConfig*>(header + 1);
    for (int32_t slot = 0; slot < kNumSlots; ++slot) {
      SlotConfig config{};
      config.ema_alpha = 1.0;  // the last observation alone decides: decisions change all the time
      config.update_interval = 1;
      config.probe_backoff = 1;
      config.batch_size = 1 + slot * 8;
      config.num_candidates = 4;
      for (int32_t i = 0; i < 4; ++i) config.candidate_steps[i] = i * (slot + 1) + 1;
      configs[slot] = config;
    }
    CHECK(state_error(state_words.data(), header->num_words, ring->num_words(), 0) == nullptr);
    reset_state(state_words.data());
    header->next_round = first_round;
    seed_ring(state_words.data(), ring->host_words());
  }

  StateView state() { return StateView(state_words.data()); }

  // The next round: another slot, step count and acceptance each time.
  void run_one() {
    const int64_t round = state().header->next_round;
    const uint64_t bits = mix(static_cast<uint64_t>(round));
    const auto slot = static_cast<int32_t>(bits % kNumSlots);
    const int32_t steps = state().steps(slot);
    const auto num_reqs = static_cast<int64_t>(1 + (bits >> 8) % 100);
    const auto accepted = static_cast<int64_t>((bits >> 32) % (steps * num_reqs + 1));
    finish_round(state_words.data(), ring->host_words(), {slot, steps}, accepted, num_reqs, 0);
  }
};

bool operator==(const DecisionWord& a, const DecisionWord& b) {
  return a.round == b.round && a.steps == b.steps && a.reason == b.reason;
}

bool operator==(const RoundRecord& a, const RoundRecord& b) {
  return a.sum == b.sum && a.num_reqs == b.num_reqs && a.steps == b.steps && a.slot == b.slot;
}

// What every round from `first_round` - `depth` on must be seen to have published.
class Expected {
 public:
  Expected(int64_t depth, int64_t first_round, int64_t num_rounds)
      : begin_(first_round - depth), end_(first_round + num_rounds) {
    Rounds serial(depth, first_round);
    for (int64_t round = begin_; round < first_round; ++round) take(*serial.ring, round);
    for (int64_t round = first_round; round < end_; ++round) {
      serial.run_one();
      take(*serial.ring, round);
    }
  }

  const DecisionWord& decision(int64_t round, int32_t slot) const {
    CHECK(round >= begin_ && round < end_);
    return decisions_[(round - begin_) * kNumSlots + slot];
  }
  const RoundRecord& record(int64_t round) const {
    CHECK(round >= begin_ && round < end_);
    return records_[round - begin_];
  }
  // The whole number of a round from the 32 bits that a word has of it.
  int64_t round_of(const DecisionWord& word) const {
    return begin_ + static_cast<uint32_t>(word.round - static_cast<uint32_t>(begin_));
  }

 private:
  void take(const DecisionRing& ring, int64_t round) {
    for (int32_t slot = 0; slot < kNumSlots; ++slot) {
      decisions_.push_back(ring.read(round, slot).value());
    }
    records_.push_back(ring.record(round).value());
  }

  int64_t begin_, end_;
  std::vector<DecisionWord> decisions_;
  std::vector<RoundRecord> records_;
};

enum class Seen { kValue, kNotYet, kOverrun };

// A read's outcome; a value is checked against what the round must have published.
Seen read(const DecisionRing& ring, const Expected& expected, int64_t round, int32_t slot) {
  try {
    const auto word = ring.read(round, slot);
    if (!word) return Seen::kNotYet;
    CHECK("wrong decision" && *word == expected.decision(round, slot));
    return Seen::kValue;
  } catch (const RingOverrunError&) {
    return Seen::kOverrun;
  }
}

Seen record(const DecisionRing& ring, const Expected& expected, int64_t round) {
  try {
    const auto found = ring.record(round);
    if (!found) return Seen::kNotYet;
    CHECK("wrong record" && *found == expected.record(round));
    return Seen::kValue;
  } catch (const RingOverrunError&) {
    return Seen::kOverrun;
  }
}

// Reads rounds around the newest. A word only ever moves on to later rounds, so what was seen once
// stays seen, and an overrun means that the round `depth` later has begun to publish.
int64_t read_around_the_newest(const DecisionRing& ring, const Expected& expected,
                               int64_t last_round, uint64_t seed) {
  int64_t num_values = 0;
  int64_t newest[kNumSlots] = {};
  for (int32_t slot = 0; newest[slot] < last_round;
       slot = static_cast<int32_t>(mix(seed++) % kNumSlots)) {
    const DecisionWord latest = ring.latest(slot);
    const int64_t found = expected.round_of(latest);
    CHECK("wrong latest decision" && latest == expected.decision(found, slot));
    CHECK("the latest decision went back" && found >= newest[slot]);
    newest[slot] = found;
    CHECK(read(ring, expected, found, slot) != Seen::kNotYet);

    const int64_t round = found + 2 - static_cast<int64_t>(mix(seed) % (ring.depth() + 4));
    const Seen decision = read(ring, expected, round, slot);
    const Seen observed = record(ring, expected, round);
    num_values += (decision == Seen::kValue) + (observed == Seen::kValue);
    if (decision == Seen::kOverrun) {
      const int64_t now = expected.round_of(ring.latest(slot));
      CHECK("overrun without a reason" && now >= round + ring.depth());
      CHECK(read(ring, expected, round, slot) == Seen::kOverrun);
    }
  }
  return num_values;
}

// The writer runs free; readers are overtaken all the time.
void test_free_running_writer(int64_t first_round) {
  constexpr int64_t kNumRounds = 100'000, kDepth = 8;
  const Expected expected(kDepth, first_round, kNumRounds);
  Rounds rounds(kDepth, first_round);
  std::atomic<int64_t> num_values = 0;
  std::vector<std::thread> readers;
  for (uint64_t seed : {1, 2}) {
    readers.emplace_back([&, seed] {
      num_values +=
          read_around_the_newest(*rounds.ring, expected, first_round + kNumRounds - 1, seed << 40);
    });
  }
  for (int64_t i = 0; i < kNumRounds; ++i) rounds.run_one();
  for (std::thread& reader : readers) reader.join();
  CHECK("the readers saw nothing" && num_values > 1000);
}

// The writer stays less than the depth ahead of the slowest reader, as rounds in flight do: then
// every reader gets every round. The pacing is relaxed, so that it orders nothing that the ring
// does not.
void test_every_round_arrives(int64_t first_round) {
  constexpr int64_t kNumRounds = 5'000, kDepth = 16;
  const Expected expected(kDepth, first_round, kNumRounds);
  Rounds rounds(kDepth, first_round);
  std::atomic<int64_t> next[2] = {first_round, first_round};
  std::vector<std::thread> readers;
  for (std::atomic<int64_t>& mine : next) {
    readers.emplace_back([&] {
      for (int64_t round = first_round; round < first_round + kNumRounds; ++round) {
        for (int32_t slot = 0; slot < kNumSlots; ++slot) {
          const DecisionWord word = rounds.ring->wait(round, slot, 60.0);
          CHECK("wrong decision" && word == expected.decision(round, slot));
        }
        Seen observed;
        while ((observed = record(*rounds.ring, expected, round)) == Seen::kNotYet) {
        }
        CHECK(observed == Seen::kValue);
        mine.store(round + 1, std::memory_order_relaxed);
      }
    });
  }
  for (int64_t i = 0; i < kNumRounds; ++i) {
    const int64_t round = first_round + i;
    while (round - next[0].load(std::memory_order_relaxed) >= kDepth ||
           round - next[1].load(std::memory_order_relaxed) >= kDepth) {
      std::this_thread::yield();
    }
    rounds.run_one();
  }
  for (std::thread& reader : readers) reader.join();
  CHECK("no stall was counted" && rounds.ring->stalls() > 0);
}

// One round caught at any stage: its words may reach the host in any order, so every subset of them
// together with the overwritten round's others is a ring that a reader can find.
void test_no_order_between_words_is_needed(int64_t first_round) {
  constexpr int64_t kDepth = 8;
  constexpr int kNumWords = kNumSlots + RoundRecord::kNumWords;
  constexpr uint32_t kRecordBits = (1u << RoundRecord::kNumWords) - 1;
  const Expected expected(kDepth, first_round, kDepth + 1);
  Rounds rounds(kDepth, first_round);
  for (int64_t i = 0; i < kDepth; ++i) rounds.run_one();
  DecisionRing& ring = *rounds.ring;
  const RingView view{reinterpret_cast<uint64_t*>(ring.host_words()), kDepth, kNumSlots};
  uint64_t* words = view.at(first_round);
  CHECK(view.record(first_round) == words + kNumSlots);
  const std::vector<uint64_t> old_words(words, words + kNumWords);
  rounds.run_one();
  const std::vector<uint64_t> new_words(words, words + kNumWords);

  const int64_t old_round = first_round, new_round = first_round + kDepth;
  for (uint32_t arrived = 0; arrived < (1u << kNumWords); ++arrived) {
    for (int i = 0; i < kNumWords; ++i) {
      words[i] = arrived >> i & 1 ? new_words[i] : old_words[i];
    }
    for (int32_t slot = 0; slot < kNumSlots; ++slot) {
      const bool is_new = arrived >> slot & 1;
      CHECK("stale or torn decision" &&
            read(ring, expected, new_round, slot) == (is_new ? Seen::kValue : Seen::kNotYet));
      CHECK("overwritten decision" &&
            read(ring, expected, old_round, slot) == (is_new ? Seen::kOverrun : Seen::kValue));
      const DecisionWord latest = ring.latest(slot);
      CHECK("wrong latest decision" &&
            latest == expected.decision(is_new ? new_round : new_round - 1, slot));
    }
    const uint32_t arrived_of_record = arrived >> kNumSlots;
    const Seen new_record = record(ring, expected, new_round);
    CHECK(new_record == (arrived_of_record == kRecordBits ? Seen::kValue : Seen::kNotYet));
    const Seen old_record = record(ring, expected, old_round);
    CHECK(old_record == (arrived_of_record == 0 ? Seen::kValue : Seen::kOverrun));
  }
}

std::unique_ptr<StepReader> make_reader(const Rounds& rounds, int64_t lag, double timeout_s) {
  return std::make_unique<StepReader>(rounds.ring, std::vector<int64_t>{1, 9, 17},
                                      std::vector<int64_t>{}, lag, 1, 0, timeout_s);
}

constexpr int64_t kBatchSizes[kNumSlots] = {1, 9, 17};

// As the binding calls it.
int32_t next_steps(StepReader& reader, int32_t slot) {
  const auto steps = reader.try_next_steps(kBatchSizes[slot]);
  return steps ? *steps : reader.next_steps(kBatchSizes[slot]);
}

void test_a_device_index_without_cuda_code_says_so() {
  std::string message;
  try {
    DecisionRing(8, kNumSlots, 0);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(message.find("this build has no CUDA code") != std::string::npos);
}

// As the host does it: with a lag of 2, round r runs with the decision of r - 2.
void test_step_reader_waits_for_a_slow_writer() {
  constexpr int64_t kNumRounds = 100, kDepth = 8;
  const Expected expected(kDepth, 0, kNumRounds);
  Rounds rounds(kDepth, 0);
  const auto reader = make_reader(rounds, 2, 60.0);
  std::atomic<int64_t> launched = 0;
  std::thread writer([&] {
    for (int64_t round = 0; round < kNumRounds; ++round) {
      while (launched.load(std::memory_order_relaxed) <= round) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      rounds.run_one();
    }
  });
  for (int64_t round = 0; round < kNumRounds; ++round) {
    const auto slot = static_cast<int32_t>(mix(round) % kNumSlots);
    const int32_t steps = expected.decision(round - 2, slot).steps;
    CHECK("another round's decision" && next_steps(*reader, slot) == steps);
    launched.store(round + 1, std::memory_order_relaxed);
  }
  writer.join();
  // The first two rounds have their decisions from the start; the others wait for a writer that
  // sleeps.
  CHECK(rounds.ring->stalls() > kNumRounds / 2 && rounds.ring->stalls() <= kNumRounds - 2);
}

// The writer is ahead: fresher decisions are there, and differ, and must not be used.
void test_step_reader_uses_no_fresher_decision() {
  constexpr int64_t kDepth = 8, kNumRounds = 400;
  const Expected expected(kDepth, 0, kNumRounds);
  Rounds rounds(kDepth, 0);
  const auto reader = make_reader(rounds, 2, 0.0);
  int64_t num_different = 0;
  for (int64_t round = 0; round < kNumRounds; ++round) {
    rounds.run_one();
    const auto slot = static_cast<int32_t>(mix(round) % kNumSlots);
    const int32_t steps = expected.decision(round - 2, slot).steps;
    CHECK("another round's decision" && next_steps(*reader, slot) == steps);
    num_different += steps != rounds.ring->latest(slot).steps;
  }
  CHECK("a fresher decision never differed: nothing was tested" && num_different > 20);
  CHECK(rounds.ring->stalls() == 0);
}

void test_step_reader_gives_up_and_starts_no_round() {
  Rounds rounds(8, 0);
  const auto reader = make_reader(rounds, 2, 0.01);
  next_steps(*reader, 0);
  next_steps(*reader, 0);
  for (int attempt = 1; attempt <= 2; ++attempt) {
    bool timed_out = false;
    try {
      next_steps(*reader, 0);
    } catch (const RingTimeoutError&) {
      timed_out = true;
    }
    CHECK(timed_out && reader->next_round() == 2 && rounds.ring->stalls() == attempt);
  }
  for (int64_t i = 0; i < 9; ++i) rounds.run_one();
  bool overrun = false;
  try {
    next_steps(*reader, 0);
  } catch (const RingOverrunError&) {
    overrun = true;
  }
  CHECK(overrun && reader->next_round() == 2);
}

}  // namespace

int main() {
  for (int64_t first_round : {int64_t{0}, kWrap - 20, kWrap - 4}) {
    test_no_order_between_words_is_needed(first_round);
  }
  test_a_device_index_without_cuda_code_says_so();
  test_step_reader_uses_no_fresher_decision();
  test_step_reader_gives_up_and_starts_no_round();
  test_step_reader_waits_for_a_slow_writer();
  test_every_round_arrives(0);
  test_every_round_arrives(kWrap - 2'500);
  test_free_running_writer(kWrap - 50'000);
}
