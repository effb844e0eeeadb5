// The ops with the signatures of their schemas, for any device. A device is a type with a static
// run(args) that checks and launches; its file registers these functions under its dispatch key
// (ops_cpu.cpp, ops_meta.cpp).
#pragma once

#include <torch/csrc/stable/library.h>

#include "op_args.h"

namespace adaptive_spec {

#define AS_COMMON_PARAMETERS                                                        \
  const OptionalTensor &state, const OptionalTensor &ring, int64_t slot,            \
      std::optional<int64_t> speculative_num_steps, const OptionalTensor &num_reqs, \
      const OptionalTensor &max_accept, const OptionalTensor &accept_lens,          \
      const OptionalTensor &bonus_tokens, const OptionalTensor &seq_lens,           \
      const OptionalTensor &new_seq_lens, const OptionalTensor &select_index,       \
      const OptionalTensor &accepted_tokens, const OptionalTensor &workspace

#define AS_COMMON_ARGS                                                                         \
  CommonArgs {                                                                                 \
    state, ring, slot, speculative_num_steps, num_reqs, max_accept, accept_lens, bonus_tokens, \
        seq_lens, new_seq_lens, select_index, accepted_tokens, workspace                       \
  }

#define AS_SAMPLING_PARAMETERS                                                                 \
  const OptionalTensor &temperature, const OptionalTensor &top_k, const OptionalTensor &top_p, \
      const OptionalTensor &min_p

#define AS_SAMPLING_ARGS \
  SamplingArgs { temperature, top_k, top_p, min_p }

template <typename Device>
void verify_tree_greedy(const Tensor& predicts, const Tensor& accept_index,
                        const Tensor& accept_token_num, const Tensor& candidates,
                        const Tensor& retrive_index, const Tensor& retrive_next_token,
                        const Tensor& retrive_next_sibling, const Tensor& target_predict,
                        AS_COMMON_PARAMETERS) {
  Device::run(VerifyTreeArgs{predicts, accept_index, accept_token_num, candidates, retrive_index,
                             retrive_next_token, retrive_next_sibling, target_predict,
                             AS_COMMON_ARGS});
}

template <typename Device>
void verify_chain_greedy(const Tensor& draft_tokens, const Tensor& target_predict,
                         const Tensor& output_token_ids, const Tensor& accept_token_num,
                         AS_COMMON_PARAMETERS) {
  Device::run(VerifyChainArgs{draft_tokens, target_predict, output_token_ids, accept_token_num,
                              AS_COMMON_ARGS});
}

template <typename Device>
void verify_chain_greedy_from_logits(const Tensor& draft_tokens, const Tensor& target_logits,
                                     const Tensor& output_token_ids, const Tensor& accept_token_num,
                                     AS_COMMON_PARAMETERS) {
  Device::run(VerifyChainLogitsArgs{draft_tokens, target_logits, output_token_ids, accept_token_num,
                                    AS_COMMON_ARGS});
}

template <typename Device>
void tree_speculative_sampling_target_only(
    const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
    const Tensor& candidates, const Tensor& retrive_index, const Tensor& retrive_next_token,
    const Tensor& retrive_next_sibling, const Tensor& uniform_samples,
    const Tensor& uniform_samples_for_final_sampling, const Tensor& target_probs,
    const Tensor& draft_probs, double threshold_single, double threshold_acc,
    bool /*deterministic: always*/, AS_COMMON_PARAMETERS) {
  Device::run(SampleTreeArgs{predicts, accept_index, accept_token_num, candidates, retrive_index,
                             retrive_next_token, retrive_next_sibling, uniform_samples,
                             uniform_samples_for_final_sampling, target_probs, draft_probs,
                             threshold_single, threshold_acc, AS_COMMON_ARGS});
}

template <typename Device>
void verify_chain_sampling(const OptionalTensor& draft_probs, const Tensor& draft_token_ids,
                           const Tensor& target_probs, const Tensor& uniform_samples,
                           const Tensor& uniform_samples_for_final_sampling,
                           const Tensor& output_token_ids, const Tensor& accept_token_num,
                           const OptionalTensor& output_accepted_token_num,
                           const OptionalTensor& output_emitted_draft_token_num,
                           bool block_verification, AS_COMMON_PARAMETERS) {
  Device::run(SampleChainArgs{draft_probs, draft_token_ids, target_probs, uniform_samples,
                              uniform_samples_for_final_sampling, output_token_ids,
                              accept_token_num, output_accepted_token_num,
                              output_emitted_draft_token_num, block_verification, AS_COMMON_ARGS});
}

template <typename Device>
void verify_chain_sampling_from_logits(const Tensor& draft_tokens, const Tensor& target_logits,
                                       const Tensor& seeds, const Tensor& positions,
                                       const Tensor& output_token_ids,
                                       const Tensor& accept_token_num, AS_SAMPLING_PARAMETERS,
                                       const OptionalTensor& draft_probs, int64_t noise_stream,
                                       const OptionalTensor& error_mask, AS_COMMON_PARAMETERS) {
  Device::run(SampleChainLogitsArgs{draft_tokens, target_logits, seeds, positions, output_token_ids,
                                    accept_token_num, AS_SAMPLING_ARGS, draft_probs, noise_stream,
                                    error_mask, AS_COMMON_ARGS});
}

template <typename Device>
void verify_tree_sampling_from_logits(const Tensor& predicts, const Tensor& accept_index,
                                      const Tensor& accept_token_num, const Tensor& candidates,
                                      const Tensor& retrive_index, const Tensor& retrive_next_token,
                                      const Tensor& retrive_next_sibling,
                                      const Tensor& target_logits, const Tensor& seeds,
                                      const Tensor& positions, AS_SAMPLING_PARAMETERS,
                                      int64_t noise_stream, const OptionalTensor& error_mask,
                                      AS_COMMON_PARAMETERS) {
  Device::run(SampleTreeLogitsArgs{predicts, accept_index, accept_token_num, candidates,
                                   retrive_index, retrive_next_token, retrive_next_sibling,
                                   target_logits, seeds, positions, AS_SAMPLING_ARGS, noise_stream,
                                   error_mask, AS_COMMON_ARGS});
}

template <typename Device>
void update_and_select(const Tensor& accept_token_num, const Tensor& state, const Tensor& ring,
                       int64_t slot, int64_t speculative_num_steps,
                       const OptionalTensor& num_reqs) {
  Device::run(UpdateArgs{accept_token_num, state, ring, slot, speculative_num_steps, num_reqs});
}

template <typename Device>
void build_chain_tree(const Tensor& retrive_index, const Tensor& retrive_next_token,
                      const Tensor& retrive_next_sibling, const OptionalTensor& positions,
                      const OptionalTensor& seq_lens, const OptionalTensor& num_reqs) {
  Device::run(ChainTreeArgs{retrive_index, retrive_next_token, retrive_next_sibling, positions,
                            seq_lens, num_reqs});
}

// The schemas, for a library of that name (schemas.cpp).
void define_ops(torch::stable::detail::StableLibrary& m);

template <typename Device>
void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("verify_tree_greedy", TORCH_BOX(&verify_tree_greedy<Device>));
  m.impl("verify_chain_greedy", TORCH_BOX(&verify_chain_greedy<Device>));
  m.impl("verify_chain_greedy_from_logits", TORCH_BOX(&verify_chain_greedy_from_logits<Device>));
  m.impl("tree_speculative_sampling_target_only",
         TORCH_BOX(&tree_speculative_sampling_target_only<Device>));
  m.impl("verify_chain_sampling", TORCH_BOX(&verify_chain_sampling<Device>));
  m.impl("verify_chain_sampling_from_logits",
         TORCH_BOX(&verify_chain_sampling_from_logits<Device>));
  m.impl("verify_tree_sampling_from_logits", TORCH_BOX(&verify_tree_sampling_from_logits<Device>));
  m.impl("update_and_select", TORCH_BOX(&update_and_select<Device>));
  m.impl("build_chain_tree", TORCH_BOX(&build_chain_tree<Device>));
}

#undef AS_SAMPLING_ARGS
#undef AS_SAMPLING_PARAMETERS
#undef AS_COMMON_ARGS
#undef AS_COMMON_PARAMETERS

}  // namespace adaptive_spec
