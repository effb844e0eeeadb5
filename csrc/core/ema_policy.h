// The `ema` step policy: what one batch's accepted-draft counts do to one slot. The rules
// are listed in docs/semantics.md; they follow SGLang's adaptive speculation, plus four optional
// rules (min_dwell, probe_backoff, reset_ema_on_switch and the dropping of stale samples).
//
// Every backend must produce the same bits, so the order of the binary64 operations is part of the
// rule and no multiply-add may be fused: the build sets -ffp-contract=off and -fmad=false.
#pragma once

#include <cmath>
#include <cstdint>

#include "macros.h"
#include "records.h"

namespace adaptive_spec {

// The EMA of a slot that starts, or restarts, at `steps` draft steps.
AS_HD double initial_ema(int32_t steps) { return static_cast<double>(steps) - 1.0; }

// At or below this EMA the slot leaves the candidate above `lower` for `lower`.
AS_HD double down_threshold(const SlotConfig& config, int32_t lower) {
  double midpoint = lower == 0 ? 0.5 : static_cast<double>(lower) - 0.5;
  return midpoint + config.down_hysteresis;
}

// Above this EMA the slot leaves candidate `steps` for the next larger one.
AS_HD double up_threshold(const SlotConfig& config, int32_t steps) {
  return static_cast<double>(steps) - 0.5 + config.up_hysteresis;
}

// Decision points that two probes of S = 0 are apart at most.
constexpr int64_t kMaxProbeWait = 4096;

namespace detail {

// S = 0 shows nothing of the drafter, so the only way to learn is to run it again.
AS_HD DecisionReason decide_at_zero(const SlotConfig& config, SlotState& slot, int32_t& index) {
  if (config.num_candidates == 1) return DecisionReason::kHold;
  if (slot.probe_left > 0) {
    --slot.probe_left;
    return DecisionReason::kBackoff;
  }
  ++index;
  slot.probing = 1;
  if (slot.ema < 0.0) slot.ema = initial_ema(config.candidate_steps[index]);
  return DecisionReason::kProbe;
}

AS_HD DecisionReason decide_by_ema(const SlotConfig& config, const SlotState& slot,
                                   int32_t& index) {
  const int32_t* steps = config.candidate_steps;
  const int32_t old_index = index;
  DecisionReason reason = DecisionReason::kHold;
  while (index > 0 && slot.ema <= down_threshold(config, steps[index - 1])) --index;
  if (index != old_index) {
    reason = DecisionReason::kDown;
  } else {
    while (index < config.num_candidates - 1 && slot.ema > up_threshold(config, steps[index])) {
      ++index;
    }
    if (index != old_index) reason = DecisionReason::kUp;
  }
  if (config.ceiling_coeff > 0.0 && index <= old_index) {
    double ceiling = std::ceil(slot.ema * config.ceiling_coeff);
    if (!(ceiling > 1.0)) ceiling = 1.0;
    while (index > 0 && static_cast<double>(steps[index]) > ceiling) {
      --index;
      reason = DecisionReason::kCeiling;
    }
  }
  return reason;
}

// Failed probes of S = 0 are spaced geometrically; a decision that stays above 0 ends the series.
AS_HD void track_probe(const SlotConfig& config, SlotState& slot, int32_t new_steps) {
  if (new_steps > 0) {
    slot.probe_wait = 1;
  } else if (slot.probing) {
    int64_t wait = slot.probe_wait * config.probe_backoff;
    slot.probe_wait = static_cast<int32_t>(wait < kMaxProbeWait ? wait : kMaxProbeWait);
    slot.probe_left = slot.probe_wait - 1;
  }
  slot.probing = 0;
}

AS_HD DecisionReason decide(const SlotConfig& config, SlotState& slot) {
  const int64_t past_warmup = slot.batch_count - config.warmup_batches;
  if (past_warmup <= 0) return DecisionReason::kWarmup;
  if (past_warmup % config.update_interval != 0) return DecisionReason::kInterval;
  if (slot.num_switches > 0 && slot.batch_count - slot.last_switch < config.min_dwell) {
    return DecisionReason::kDwell;
  }
  const int32_t old_index = slot.index;
  const bool at_zero = config.candidate_steps[old_index] == 0;
  int32_t index = old_index;
  DecisionReason reason =
      at_zero ? decide_at_zero(config, slot, index) : decide_by_ema(config, slot, index);
  const int32_t new_steps = config.candidate_steps[index];
  if (!at_zero) track_probe(config, slot, new_steps);
  if (index != old_index) {
    slot.index = index;
    slot.last_switch = slot.batch_count;
    ++slot.num_switches;
    if (config.reset_ema_on_switch && slot.ema > initial_ema(new_steps)) {
      slot.ema = initial_ema(new_steps);
    }
  }
  return reason;
}

}  // namespace detail

// Takes the observation of one batch into `slot`: `sum` accepted drafts over `num_reqs` requests
// that all ran with `executed_steps`. A sample of another step count is dropped: it says nothing
// about the current one, and counting it makes late feedback oscillate.
AS_HD void observe(const SlotConfig& config, SlotState& slot, int32_t executed_steps, int64_t sum,
                   int64_t num_reqs) {
  const int32_t steps = config.candidate_steps[slot.index];
  DecisionReason reason;
  if (num_reqs <= 0) {
    reason = DecisionReason::kEmpty;
  } else if (executed_steps != steps) {
    ++slot.num_stale;
    reason = DecisionReason::kStale;
  } else {
    if (steps > 0) {
      const double mean = static_cast<double>(sum) / static_cast<double>(num_reqs);
      const double kept = (1.0 - config.ema_alpha) * slot.ema;
      const double added = config.ema_alpha * mean;
      slot.ema = kept + added;
    }
    ++slot.batch_count;
    reason = detail::decide(config, slot);
  }
  slot.reason = static_cast<int32_t>(reason);
}

AS_HD void reset_slot(const SlotConfig& config, SlotState& slot) {
  slot = SlotState{};
  slot.index = config.initial_index;
  slot.ema = initial_ema(config.candidate_steps[slot.index]);
  slot.probe_wait = 1;
}

}  // namespace adaptive_spec
