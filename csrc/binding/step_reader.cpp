#include "step_reader.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace adaptive_spec {

StepReader::StepReader(std::shared_ptr<DecisionRing> ring,
                       const std::vector<int64_t>& slot_batch_sizes,
                       const std::vector<int64_t>& cuda_graph_bs, int64_t lag,
                       int32_t debounce_rounds, int64_t first_round, double timeout_s)
    : ring_(std::move(ring)),
      cuda_graph_bs_(cuda_graph_bs),
      lag_(lag),
      next_round_(first_round),
      timeout_s_(timeout_s) {
  check_timeout(timeout_s);
  if (static_cast<int64_t>(slot_batch_sizes.size()) != ring_->num_slots()) {
    throw std::invalid_argument(
        "StepReader: `slot_batch_sizes` must have one entry for each of the "
        "ring's " +
        std::to_string(ring_->num_slots()) + " slots, got " +
        std::to_string(slot_batch_sizes.size()));
  }
  if (lag < 1 || lag >= ring_->depth()) {
    throw std::invalid_argument("StepReader: `lag` must be at least 1 and below the ring's depth " +
                                std::to_string(ring_->depth()) + ", got " + std::to_string(lag));
  }
  configs_.resize(slot_batch_sizes.size());
  for (size_t i = 0; i < configs_.size(); ++i) {
    configs_[i].batch_size = static_cast<int32_t>(slot_batch_sizes[i]);
  }
  debounce_.rounds = debounce_rounds;
  constexpr int64_t kMaxTableSize = 1 << 16;
  const int64_t table_size =
      cuda_graph_bs.empty() ? 0 : std::min(cuda_graph_bs.back() + 1, kMaxTableSize);
  slot_of_.reserve(table_size);
  for (int64_t batch_size = 0; batch_size < table_size; ++batch_size) {
    slot_of_.push_back(find_slot(batch_size));
  }
}

int32_t StepReader::find_slot(int64_t batch_size) const {
  const int64_t padded = pad_to_cuda_graph_bs(
      cuda_graph_bs_.data(), static_cast<int64_t>(cuda_graph_bs_.size()), batch_size);
  return adaptive_spec::slot_for_batch(configs_.data(), static_cast<int32_t>(configs_.size()),
                                       padded);
}

void StepReader::restart(int64_t first_round) {
  next_round_ = first_round;
  cancellable_ = 0;
  debounce_ = SlotDebounce{.rounds = debounce_.rounds};
}

int32_t StepReader::next_steps(int64_t batch_size, const std::function<void()>& on_idle) {
  SlotDebounce debounce = debounce_;
  const int32_t slot = debounce.follow(slot_for_batch(batch_size));
  const DecisionWord word = ring_->wait(next_round_ - lag_, slot, timeout_s_, on_idle);
  start_round(debounce);
  return word.steps;
}

void StepReader::cancel_round() {
  if (cancellable_ == 0) throw std::logic_error("StepReader: there is no started round to cancel");
  --cancellable_;
  debounce_ = previous_debounce_;
  --next_round_;
}

}  // namespace adaptive_spec
