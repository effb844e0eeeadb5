#include "group.h"
#include "launch.h"
#include "run_round.h"
#include "sampling_rows.h"

namespace adaptive_spec::cpu {
namespace {

RowSum sum_row(const ResidualRow& row, int64_t num_entries, double units) {
  RowSum sum;
  for (int64_t i = 0; i < num_entries; ++i) sum.take(row, units, i);
  return sum;
}

template <typename Params>
void sample(const Params& params) {
  const int64_t num_entries = vocab_size(params);
  const double units = units_per_weight(num_entries);
  float joint[kMaxSteps + 1];
  run_round(params, [&](int64_t b, int64_t num_live) {
    const SerialGroup group;
    const auto reject = [&](int64_t row, int64_t token) { reject_draft(params, b, row, token); };
    SamplingWalk walk = sampling_walk(group, params, num_live, b, true, joint, reject);
    settle(params, b, walk, joint, [&](int64_t i) {
      return sum_row(residual_row(params, b, walk, i, joint), num_entries, units).units;
    });
    const ResidualRow row = residual_row(params, b, walk, 0, joint);
    const RowSum sum = sum_row(row, num_entries, units);
    int64_t drawn = 0;
    if (sum.units > 0) {
      int64_t left = draw_threshold(final_coin(params, b), sum.units);
      while ((left -= weight_units(row.weight(drawn), units)) >= 0) ++drawn;
    }
    complete(walk, sum, drawn);
    write_tokens(group, params, b, walk);
    return walk.result;
  });
}

}  // namespace

void launch_tree_speculative_sampling(const SampleTreeParams& params) { sample(params); }
void launch_chain_speculative_sampling(const SampleChainParams& params) { sample(params); }

}  // namespace adaptive_spec::cpu
