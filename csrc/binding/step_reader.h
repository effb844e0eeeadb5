// What the host does per decode round: route the batch size to a slot and read that slot's decision
// of `lag` rounds ago. Everything else about adaptivity happened inside the verify op.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decision_ring.h"
#include "routing.h"

namespace adaptive_spec {

class StepReader {
 public:
  // slot_batch_sizes: each slot's lower bound, ascending. cuda_graph_bs: captured batch sizes,
  // ascending; empty where batches are not padded. first_round: number of the next round.
  StepReader(std::shared_ptr<DecisionRing> ring, const std::vector<int64_t>& slot_batch_sizes,
             const std::vector<int64_t>& cuda_graph_bs, int64_t lag, int32_t debounce_rounds,
             int64_t first_round, double timeout_s);

  int32_t slot_for_batch(int64_t batch_size) const {
    if (batch_size < static_cast<int64_t>(slot_of_.size())) return slot_of_[batch_size];
    return find_slot(batch_size);
  }

  // Starts a round and returns the steps it must run with, or nothing if the decision has not
  // arrived (the round is then not started). It always uses the decision of exactly `lag` rounds
  // before, never a fresher one that happens to be there, so that a run can be replayed and ranks
  // agree without talking.
  std::optional<int32_t> try_next_steps(int64_t batch_size) {
    SlotDebounce debounce = debounce_;
    const int32_t slot = debounce.follow(slot_for_batch(batch_size));
    const auto word = ring_->read(next_round_ - lag_, slot);
    if (!word) return std::nullopt;
    start_round(debounce);
    return word->steps;
  }

  // As above, but waits for the decision; on_idle: see DecisionRing::wait.
  int32_t next_steps(int64_t batch_size, const std::function<void()>& on_idle = {});

  // Takes back a round that was started: it failed, and its verify op has not run. Rounds started
  // after it keep running, under numbers one lower. At most `lag` in a row, the most that can be in
  // flight.
  void cancel_round();

  // The state was set to another round, with none in flight.
  void restart(int64_t first_round);

  int64_t next_round() const { return next_round_; }
  int64_t lag() const { return lag_; }

 private:
  int32_t find_slot(int64_t batch_size) const;

  void start_round(const SlotDebounce& debounce) {
    previous_debounce_ = debounce_;
    debounce_ = debounce;
    ++next_round_;
    cancellable_ = std::min(cancellable_ + 1, lag_);
  }

  std::shared_ptr<DecisionRing> ring_;
  std::vector<SlotConfig> configs_;  // only batch_size is set: what routing needs
  std::vector<int64_t> cuda_graph_bs_;
  std::vector<int32_t> slot_of_;  // by batch size, up to the largest captured one
  SlotDebounce debounce_;
  SlotDebounce previous_debounce_;
  int64_t lag_;
  int64_t next_round_;
  double timeout_s_;
  int64_t cancellable_ = 0;  // rounds that may be in flight
};

}  // namespace adaptive_spec
