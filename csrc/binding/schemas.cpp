// The ops' schemas, once for all devices. They only write tensors that the caller passes, and say
// which; that is all torch.compile and CUDA graphs need to know.
#include "ops.h"

namespace adaptive_spec {

// Keyword arguments that every verify op takes.
#define AS_COMMON_ARGUMENTS                                                                      \
  "Tensor(s!)? state=None, Tensor(t!)? ring=None, int slot=0, int? speculative_num_steps=None, " \
  "Tensor? num_reqs=None, Tensor? max_accept=None, Tensor(u!)? accept_lens=None, "               \
  "Tensor(v!)? bonus_tokens=None, Tensor? seq_lens=None, Tensor(w!)? new_seq_lens=None, "        \
  "Tensor(x!)? select_index=None, Tensor(y!)? accepted_tokens=None, Tensor(z!)? workspace=None"

// How the ops that sample from logits do it.
#define AS_SAMPLING_ARGUMENTS \
  "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "

void define_ops(torch::stable::detail::StableLibrary& m) {
  m.def(
      "verify_tree_greedy(Tensor(a!) predicts, Tensor(b!) accept_index, "
      "Tensor(c!) accept_token_num, Tensor candidates, Tensor retrive_index, "
      "Tensor retrive_next_token, Tensor retrive_next_sibling, Tensor target_predict, "
      "*, " AS_COMMON_ARGUMENTS ") -> ()");
  m.def(
      "verify_chain_greedy(Tensor draft_tokens, Tensor target_predict, "
      "Tensor(a!) output_token_ids, Tensor(b!) accept_token_num, "
      "*, " AS_COMMON_ARGUMENTS ") -> ()");
  m.def(
      "verify_chain_greedy_from_logits(Tensor draft_tokens, Tensor target_logits, "
      "Tensor(a!) output_token_ids, Tensor(b!) accept_token_num, "
      "*, " AS_COMMON_ARGUMENTS ") -> ()");
  m.def(
      "tree_speculative_sampling_target_only(Tensor(a!) predicts, Tensor(b!) accept_index, "
      "Tensor(c!) accept_token_num, Tensor candidates, Tensor retrive_index, "
      "Tensor retrive_next_token, Tensor retrive_next_sibling, Tensor uniform_samples, "
      "Tensor uniform_samples_for_final_sampling, Tensor target_probs, Tensor(d!) draft_probs, "
      "float threshold_single=1.0, float threshold_acc=1.0, bool deterministic=True, "
      "*, " AS_COMMON_ARGUMENTS ") -> ()");
  m.def(
      "verify_chain_sampling(Tensor? draft_probs, Tensor draft_token_ids, Tensor target_probs, "
      "Tensor uniform_samples, Tensor uniform_samples_for_final_sampling, "
      "Tensor(a!) output_token_ids, Tensor(b!) accept_token_num, "
      "Tensor(c!)? output_accepted_token_num=None, "
      "Tensor(d!)? output_emitted_draft_token_num=None, bool block_verification=False, "
      "*, " AS_COMMON_ARGUMENTS ") -> ()");
  m.def(
      "verify_chain_sampling_from_logits(Tensor draft_tokens, Tensor target_logits, Tensor seeds, "
      "Tensor positions, Tensor(a!) output_token_ids, Tensor(b!) "
      "accept_token_num, " AS_SAMPLING_ARGUMENTS
      "Tensor? draft_probs=None, int noise_stream=0, Tensor(c!)? error_mask=None, "
      "*, " AS_COMMON_ARGUMENTS ") -> ()");
  m.def(
      "verify_tree_sampling_from_logits(Tensor(a!) predicts, Tensor(b!) accept_index, "
      "Tensor(c!) accept_token_num, Tensor candidates, Tensor retrive_index, "
      "Tensor retrive_next_token, Tensor retrive_next_sibling, Tensor target_logits, "
      "Tensor seeds, Tensor positions, " AS_SAMPLING_ARGUMENTS
      "int noise_stream=0, Tensor(d!)? error_mask=None, "
      "*, " AS_COMMON_ARGUMENTS ") -> ()");
  m.def(
      "update_and_select(Tensor accept_token_num, Tensor(a!) state, Tensor(b!) ring, "
      "*, int slot, int speculative_num_steps, Tensor? num_reqs=None) -> ()");
  m.def(
      "build_chain_tree(Tensor(a!) retrive_index, Tensor(b!) retrive_next_token, "
      "Tensor(c!) retrive_next_sibling, *, Tensor(d!)? positions=None, Tensor? seq_lens=None, "
      "Tensor? num_reqs=None) -> ()");
}

STABLE_TORCH_LIBRARY(adaptive_spec, m) { define_ops(m); }

}  // namespace adaptive_spec
