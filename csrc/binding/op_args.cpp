#include "op_args.h"

#include <limits>
#include <string>
#include <utility>

#include "round.h"
#include "workspace.h"

namespace adaptive_spec {
namespace {

constexpr int64_t kMaxFlatId = std::numeric_limits<int32_t>::max();

const int32_t* num_reqs_pointer(const Checker& check, const OptionalTensor& num_reqs) {
  return check.vector<const int32_t>("num_reqs", num_reqs, 1).data;
}

void check_together(const Checker& check, const char* name_a, bool has_a, const char* name_b,
                    bool has_b) {
  if (has_a == has_b) return;
  const std::string missing = has_a ? name_b : name_a;
  const std::string given = has_a ? name_a : name_b;
  fail_argument(check.op(), missing.c_str(), "a tensor, since `" + given + "` is given", "None");
}

// A state, ring or workspace: one flat block of words.
int64_t* words(const Checker& check, const char* name, const Tensor& tensor, int64_t min_size) {
  const auto vector = check.vector<int64_t>(name, tensor, at_least(min_size));
  if (vector.stride != 1) {
    fail_argument(check.op(), name, "a contiguous tensor",
                  "one with stride " + std::to_string(vector.stride));
  }
  return vector.data;
}

AdaptiveTarget adaptive_target(const Checker& check, const Tensor& state, const Tensor& ring,
                               int64_t slot, StateMemory memory) {
  AdaptiveTarget target;
  target.words = words(check, "state", state, num_state_words(1));
  target.ring = words(check, "ring", ring, num_ring_words(kMinRingDepth, 1));
  target.num_words = state.numel();
  target.num_ring_words = ring.numel();
  target.slot = static_cast<int32_t>(check.integer("slot", slot, 0, kMaxSlots - 1));
  if (memory == StateMemory::kHostReadable) {
    const char* error = state_error(target.words, target.num_words, target.num_ring_words, slot);
    if (error == nullptr) error = slots_error(target.words);
    if (error != nullptr) fail(check.op(), error);
  }
  return target;
}

// num_steps: S, already checked; num_verified: D; num_positions: rows of logits of a request that
// the op works through, 0 if it is given the choices.
RoundParams round_params(const Checker& check, const CommonArgs& common,
                         const Tensor& accept_token_num, int64_t batch_size, int64_t num_steps,
                         int64_t num_verified, int64_t num_positions, StateMemory memory) {
  RoundParams round;
  round.batch_size = batch_size;
  round.num_steps = num_steps;
  round.num_reqs = num_reqs_pointer(check, common.num_reqs);
  round.max_accept = check.vector<const int32_t>("max_accept", common.max_accept, batch_size);

  VerifyOutputs& outputs = round.outputs;
  outputs.accept_token_num =
      check.vector<int32_t>("accept_token_num", accept_token_num, batch_size);
  outputs.accept_lens = check.vector<int32_t>("accept_lens", common.accept_lens, batch_size);
  outputs.bonus_tokens = check.vector<int64_t>("bonus_tokens", common.bonus_tokens, batch_size);
  check_together(check, "seq_lens", common.seq_lens.has_value(), "new_seq_lens",
                 common.new_seq_lens.has_value());
  outputs.seq_lens = check.vector<const int64_t>("seq_lens", common.seq_lens, batch_size);
  outputs.new_seq_lens = check.vector<int64_t>("new_seq_lens", common.new_seq_lens, batch_size);
  outputs.select_index = check.vector<int64_t>("select_index", common.select_index, batch_size);
  outputs.accepted_tokens = check.vector<int64_t>("accepted_tokens", common.accepted_tokens,
                                                  at_least(batch_size * (num_steps + 1)));
  outputs.num_verified = num_verified;
  if (common.workspace) {
    const Tensor& workspace = *common.workspace;
    const int64_t num_words = Workspace::num_words(batch_size, num_positions);
    round.workspace = Workspace(words(check, "workspace", workspace, num_words), workspace.numel());
  }

  check_together(check, "state", common.state.has_value(), "ring", common.ring.has_value());
  if (common.state) {
    round.adaptive = adaptive_target(check, *common.state, *common.ring, common.slot, memory);
    check.integer("speculative_num_steps", num_steps, 0, kMaxSteps);
  }
  return round;
}

// S: as given, or all that the buffers have room for.
int64_t num_steps(const Checker& check, const CommonArgs& common, int64_t max_steps) {
  return check.integer("speculative_num_steps", common.speculative_num_steps.value_or(max_steps), 0,
                       max_steps);
}

// The tree arrays of an op; returns B and D.
template <typename Args>
std::pair<int64_t, int64_t> check_trees(const Checker& check, const Args& args, Trees& trees) {
  check.rank("candidates", args.candidates, 2);
  const int64_t batch_size = args.candidates.size(0);
  const int64_t num_nodes = args.candidates.size(1);
  trees.num_nodes = num_nodes;
  const auto input = [&](const char* name, const Tensor& tensor) {
    return check.matrix<const int64_t>(name, tensor, batch_size, num_nodes);
  };
  trees.candidates =
      check.matrix<const int64_t>("candidates", args.candidates, batch_size, at_least(1));
  if (batch_size > kMaxFlatId / num_nodes) {
    fail_argument(check.op(), "candidates",
                  "at most " + std::to_string(kMaxFlatId) + " nodes (flat ids are int32)",
                  std::to_string(batch_size) + " x " + std::to_string(num_nodes));
  }
  trees.retrive_index = input("retrive_index", args.retrive_index);
  trees.retrive_next_token = input("retrive_next_token", args.retrive_next_token);
  trees.retrive_next_sibling = input("retrive_next_sibling", args.retrive_next_sibling);
  trees.predicts =
      check.vector<int32_t>("predicts", args.predicts, at_least(batch_size * num_nodes));
  trees.accept_index =
      check.matrix<int32_t>("accept_index", args.accept_index, batch_size, at_least(1));
  return {batch_size, num_nodes};
}

// Rows of logits or probabilities: [B, positions, V], contiguous along V.
void check_rows(const Checker& check, const char* name, const Tensor& tensor, int64_t batch_size,
                Dim num_positions, Dim vocab_size) {
  check.shape(name, tensor, {batch_size, num_positions, vocab_size});
  if (tensor.size(2) > kMaxVocabSize) {
    fail_argument(check.op(), name, "a vocabulary of at most 2^31 tokens",
                  std::to_string(tensor.size(2)));
  }
  if (tensor.size(2) > 1 && tensor.stride(2) != 1) {
    fail_argument(check.op(), name, "stride 1 along the vocabulary",
                  std::to_string(tensor.stride(2)));
  }
}

LogitsRows logits_rows(const Checker& check, const Tensor& logits, int64_t batch_size,
                       Dim num_positions, StateMemory memory) {
  const char* name = "target_logits";
  LogitsRows rows;
  const int32_t dtype = dtype_of(logits);
  if (dtype == aoti_torch_dtype_float32()) {
    rows.type = LogitsType::kFloat32;
  } else if (dtype == aoti_torch_dtype_bfloat16()) {
    rows.type = LogitsType::kBFloat16;
  } else if (dtype == aoti_torch_dtype_float16()) {
    rows.type = LogitsType::kFloat16;
  } else if (dtype == aoti_torch_dtype_float64() && memory == StateMemory::kHostReadable) {
    rows.type = LogitsType::kFloat64;
  } else {
    fail_argument(check.op(), name, "dtype float16, bfloat16, float32 or, on the CPU, float64",
                  dtype_name(dtype));
  }
  check_rows(check, name, logits, batch_size, num_positions, at_least(1));
  rows.vocab_size = logits.size(2);
  rows.data = logits.const_data_ptr();
  rows.request_stride = logits.stride(0);
  rows.position_stride = logits.stride(1);
  return rows;
}

// Arguments of the ops that sample from logits, apart from the positions.
template <typename Args>
SampledLogits sampled_logits(const Checker& check, const Args& args, int64_t batch_size,
                             Dim num_positions, StateMemory memory) {
  SampledLogits logits;
  logits.rows = logits_rows(check, args.target_logits, batch_size, num_positions, memory);
  SamplingRules& rules = logits.rules;
  const SamplingArgs& sampling = args.sampling;
  rules.seeds = check.vector<const int64_t>("seeds", args.seeds, batch_size);
  rules.temperature = check.vector<const float>("temperature", sampling.temperature, batch_size);
  rules.top_k = check.vector<const int32_t>("top_k", sampling.top_k, batch_size);
  rules.top_p = check.vector<const float>("top_p", sampling.top_p, batch_size);
  rules.min_p = check.vector<const float>("min_p", sampling.min_p, batch_size);
  rules.stream = kKindsOfNoise * static_cast<uint32_t>(check.integer(
                                     "noise_stream", args.noise_stream, 0, kMaxNoiseStream));
  logits.error_mask = check.vector<bool>("error_mask", args.error_mask, batch_size);
  return logits;
}

// Also for tensors that are only read; which they are is up to the walks.
ProbabilityRows probability_rows(const Checker& check, const char* name, const Tensor& tensor,
                                 int64_t batch_size, Dim num_positions, Dim vocab_size) {
  check.dtype<float>(name, tensor);
  check_rows(check, name, tensor, batch_size, num_positions, vocab_size);
  return {const_cast<float*>(static_cast<const float*>(tensor.const_data_ptr())), tensor.stride(0),
          tensor.stride(1)};
}

float check_threshold(const Checker& check, const char* name, double threshold) {
  if (!(threshold >= 0.0 && threshold <= 1.0)) {
    fail_argument(check.op(), name, "a number from 0 to 1", std::to_string(threshold));
  }
  return static_cast<float>(threshold);
}

}  // namespace

VerifyTreeParams to_params(const VerifyTreeArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  VerifyTreeParams params;
  const auto [batch_size, num_nodes] = check_trees(check, args, params.tree);
  params.tree.target_predict =
      check.matrix<const int64_t>("target_predict", args.target_predict, batch_size, num_nodes);
  const int64_t steps = num_steps(check, args.common, args.accept_index.size(1) - 1);
  params.round = round_params(check, args.common, args.accept_token_num, batch_size, steps,
                              num_nodes, 0, memory);
  return params;
}

VerifyChainParams to_params(const VerifyChainArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  check.rank("draft_tokens", args.draft_tokens, 2);
  const int64_t batch_size = args.draft_tokens.size(0);
  const int64_t steps = num_steps(check, args.common, args.draft_tokens.size(1));
  VerifyChainParams params;
  params.draft_tokens =
      check.matrix<const int64_t>("draft_tokens", args.draft_tokens, batch_size, at_least(steps));
  params.target_predict = check.matrix<const int64_t>("target_predict", args.target_predict,
                                                      batch_size, at_least(steps + 1));
  params.output_token_ids = check.matrix<int32_t>("output_token_ids", args.output_token_ids,
                                                  batch_size, at_least(steps + 1));
  params.output_width = args.output_token_ids.size(1);
  params.round = round_params(check, args.common, args.accept_token_num, batch_size, steps,
                              steps + 1, 0, memory);
  return params;
}

VerifyChainLogitsParams to_params(const VerifyChainLogitsArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  check.rank("draft_tokens", args.draft_tokens, 2);
  const int64_t batch_size = args.draft_tokens.size(0);
  const int64_t steps = num_steps(check, args.common, args.draft_tokens.size(1));
  VerifyChainLogitsParams params;
  params.draft_tokens =
      check.matrix<const int64_t>("draft_tokens", args.draft_tokens, batch_size, at_least(steps));

  params.logits = logits_rows(check, args.target_logits, batch_size, at_least(steps + 1), memory);
  params.output_token_ids = check.matrix<int32_t>("output_token_ids", args.output_token_ids,
                                                  batch_size, at_least(steps + 1));
  params.output_width = args.output_token_ids.size(1);
  params.round = round_params(check, args.common, args.accept_token_num, batch_size, steps,
                              steps + 1, steps + 1, memory);
  return params;
}

SampleTreeParams to_params(const SampleTreeArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  SampleTreeParams params;
  SamplingTreeBatch& tree = params.tree;
  const auto [batch_size, num_nodes] = check_trees(check, args, tree);
  tree.coins =
      check.matrix<const float>("uniform_samples", args.uniform_samples, batch_size, num_nodes);
  tree.final_coins = check.vector<const float>("uniform_samples_for_final_sampling",
                                               args.uniform_samples_for_final_sampling, batch_size);
  tree.target_probs = probability_rows(check, "target_probs", args.target_probs, batch_size,
                                       num_nodes, at_least(1));
  tree.vocab_size = args.target_probs.size(2);
  tree.draft_probs = probability_rows(check, "draft_probs", args.draft_probs, batch_size, num_nodes,
                                      tree.vocab_size);
  tree.threshold_single = check_threshold(check, "threshold_single", args.threshold_single);
  tree.threshold_acc = check_threshold(check, "threshold_acc", args.threshold_acc);
  const int64_t steps = num_steps(check, args.common, args.accept_index.size(1) - 1);
  params.round = round_params(check, args.common, args.accept_token_num, batch_size, steps,
                              num_nodes, 1, memory);
  return params;
}

SampleChainParams to_params(const SampleChainArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  check.rank("draft_token_ids", args.draft_token_ids, 2);
  const int64_t batch_size = args.draft_token_ids.size(0);
  const int64_t steps = num_steps(check, args.common, args.draft_token_ids.size(1));
  SampleChainParams params;
  SamplingChainBatch& chain = params.chain;
  chain.draft_token_ids = check.matrix<const int32_t>("draft_token_ids", args.draft_token_ids,
                                                      batch_size, at_least(steps));
  chain.target_probs = probability_rows(check, "target_probs", args.target_probs, batch_size,
                                        at_least(steps + 1), at_least(1));
  chain.vocab_size = args.target_probs.size(2);
  chain.is_block = args.block_verification;
  if (chain.is_block) check.integer("speculative_num_steps", steps, 0, kMaxSteps);
  if (args.draft_probs) {
    chain.draft_probs = probability_rows(check, "draft_probs", *args.draft_probs, batch_size,
                                         at_least(steps), chain.vocab_size);
  }
  chain.coins = check.matrix<const float>("uniform_samples", args.uniform_samples, batch_size,
                                          at_least(steps));
  chain.final_coins = check.vector<const float>(
      "uniform_samples_for_final_sampling", args.uniform_samples_for_final_sampling, batch_size);
  params.output_token_ids = check.matrix<int32_t>("output_token_ids", args.output_token_ids,
                                                  batch_size, at_least(steps + 1));
  params.output_width = args.output_token_ids.size(1);
  params.accepted_alone = check.vector<int32_t>("output_accepted_token_num",
                                                args.output_accepted_token_num, batch_size);
  params.emitted_drafts = check.vector<int32_t>("output_emitted_draft_token_num",
                                                args.output_emitted_draft_token_num, batch_size);
  params.round = round_params(check, args.common, args.accept_token_num, batch_size, steps,
                              steps + 1, chain.is_block ? steps + 1 : 1, memory);
  return params;
}

SampleChainLogitsParams to_params(const SampleChainLogitsArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  check.rank("draft_tokens", args.draft_tokens, 2);
  const int64_t batch_size = args.draft_tokens.size(0);
  const int64_t steps = num_steps(check, args.common, args.draft_tokens.size(1));
  SampleChainLogitsParams params;
  params.draft_tokens =
      check.matrix<const int64_t>("draft_tokens", args.draft_tokens, batch_size, at_least(steps));
  params.logits = sampled_logits(check, args, batch_size, at_least(steps + 1), memory);
  params.positions = check.vector<const int64_t>("positions", args.positions, batch_size);
  if (args.draft_probs) {
    params.draft_probs = probability_rows(check, "draft_probs", *args.draft_probs, batch_size,
                                          at_least(steps), params.logits.rows.vocab_size);
  }
  params.output_token_ids = check.matrix<int32_t>("output_token_ids", args.output_token_ids,
                                                  batch_size, at_least(steps + 1));
  params.output_width = args.output_token_ids.size(1);
  params.round = round_params(check, args.common, args.accept_token_num, batch_size, steps,
                              steps + 1, steps + 1, memory);
  return params;
}

SampleTreeLogitsParams to_params(const SampleTreeLogitsArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  SampleTreeLogitsParams params;
  const auto [batch_size, num_nodes] = check_trees(check, args, params.tree);
  params.logits = sampled_logits(check, args, batch_size, num_nodes, memory);
  params.positions =
      check.matrix<const int64_t>("positions", args.positions, batch_size, num_nodes);
  const int64_t steps = num_steps(check, args.common, args.accept_index.size(1) - 1);
  params.round = round_params(check, args.common, args.accept_token_num, batch_size, steps,
                              num_nodes, num_nodes, memory);
  return params;
}

UpdateParams to_params(const UpdateArgs& args, StateMemory memory) {
  const Checker check(args.kOp);
  UpdateParams params;
  params.accept_token_num =
      check.vector<const int32_t>("accept_token_num", args.accept_token_num, at_least(0));
  params.batch_size = args.accept_token_num.size(0);
  params.num_steps =
      check.integer("speculative_num_steps", args.speculative_num_steps, 0, kMaxSteps);
  params.num_reqs = num_reqs_pointer(check, args.num_reqs);
  params.adaptive = adaptive_target(check, args.state, args.ring, args.slot, memory);
  return params;
}

ChainTreeParams to_params(const ChainTreeArgs& args, StateMemory) {
  const Checker check(args.kOp);
  check.rank("retrive_index", args.retrive_index, 2);
  ChainTreeParams params;
  const int64_t batch_size = params.batch_size = args.retrive_index.size(0);
  const int64_t num_nodes = params.num_nodes = args.retrive_index.size(1);
  params.retrive_index =
      check.matrix<int64_t>("retrive_index", args.retrive_index, batch_size, at_least(1));
  params.retrive_next_token =
      check.matrix<int64_t>("retrive_next_token", args.retrive_next_token, batch_size, num_nodes);
  params.retrive_next_sibling = check.matrix<int64_t>(
      "retrive_next_sibling", args.retrive_next_sibling, batch_size, num_nodes);
  check_together(check, "positions", args.positions.has_value(), "seq_lens",
                 args.seq_lens.has_value());
  params.positions =
      check.vector<int64_t>("positions", args.positions, at_least(batch_size * num_nodes));
  params.seq_lens = check.vector<const int64_t>("seq_lens", args.seq_lens, batch_size);
  params.num_reqs = num_reqs_pointer(check, args.num_reqs);
  return params;
}

}  // namespace adaptive_spec
