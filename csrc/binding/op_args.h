// An op's arguments as they come from torch, and how they become launch parameters. The same for
// all devices; a device file supplies the launches (ops_cpu.cpp) and registers the ops under its
// key.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "checks.h"
#include "params.h"

namespace adaptive_spec {

// The keyword arguments of every verify op, in schema order.
struct CommonArgs {
  const OptionalTensor& state;
  const OptionalTensor& ring;
  int64_t slot;
  std::optional<int64_t> speculative_num_steps;
  const OptionalTensor& num_reqs;
  const OptionalTensor& max_accept;
  const OptionalTensor& accept_lens;
  const OptionalTensor& bonus_tokens;
  const OptionalTensor& seq_lens;
  const OptionalTensor& new_seq_lens;
  const OptionalTensor& select_index;
  const OptionalTensor& accepted_tokens;
  const OptionalTensor& workspace;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("state", state);
    visit("ring", ring);
    visit("num_reqs", num_reqs);
    visit("max_accept", max_accept);
    visit("accept_lens", accept_lens);
    visit("bonus_tokens", bonus_tokens);
    visit("seq_lens", seq_lens);
    visit("new_seq_lens", new_seq_lens);
    visit("select_index", select_index);
    visit("accepted_tokens", accepted_tokens);
    visit("workspace", workspace);
  }
};

// How the ops that sample from logits do it, in schema order.
struct SamplingArgs {
  const OptionalTensor& temperature;
  const OptionalTensor& top_k;
  const OptionalTensor& top_p;
  const OptionalTensor& min_p;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("temperature", temperature);
    visit("top_k", top_k);
    visit("top_p", top_p);
    visit("min_p", min_p);
  }
};

struct VerifyTreeArgs {
  static constexpr const char* kOp = "verify_tree_greedy";
  const Tensor& predicts;
  const Tensor& accept_index;
  const Tensor& accept_token_num;
  const Tensor& candidates;
  const Tensor& retrive_index;
  const Tensor& retrive_next_token;
  const Tensor& retrive_next_sibling;
  const Tensor& target_predict;
  CommonArgs common;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("predicts", predicts);
    visit("accept_index", accept_index);
    visit("accept_token_num", accept_token_num);
    visit("candidates", candidates);
    visit("retrive_index", retrive_index);
    visit("retrive_next_token", retrive_next_token);
    visit("retrive_next_sibling", retrive_next_sibling);
    visit("target_predict", target_predict);
    common.for_each_tensor(visit);
  }
};

struct VerifyChainArgs {
  static constexpr const char* kOp = "verify_chain_greedy";
  const Tensor& draft_tokens;
  const Tensor& target_predict;
  const Tensor& output_token_ids;
  const Tensor& accept_token_num;
  CommonArgs common;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("draft_tokens", draft_tokens);
    visit("target_predict", target_predict);
    visit("output_token_ids", output_token_ids);
    visit("accept_token_num", accept_token_num);
    common.for_each_tensor(visit);
  }
};

struct VerifyChainLogitsArgs {
  static constexpr const char* kOp = "verify_chain_greedy_from_logits";
  const Tensor& draft_tokens;
  const Tensor& target_logits;
  const Tensor& output_token_ids;
  const Tensor& accept_token_num;
  CommonArgs common;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("draft_tokens", draft_tokens);
    visit("target_logits", target_logits);
    visit("output_token_ids", output_token_ids);
    visit("accept_token_num", accept_token_num);
    common.for_each_tensor(visit);
  }
};

struct SampleTreeArgs {
  static constexpr const char* kOp = "tree_speculative_sampling_target_only";
  const Tensor& predicts;
  const Tensor& accept_index;
  const Tensor& accept_token_num;
  const Tensor& candidates;
  const Tensor& retrive_index;
  const Tensor& retrive_next_token;
  const Tensor& retrive_next_sibling;
  const Tensor& uniform_samples;
  const Tensor& uniform_samples_for_final_sampling;
  const Tensor& target_probs;
  const Tensor& draft_probs;
  double threshold_single;
  double threshold_acc;
  CommonArgs common;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("predicts", predicts);
    visit("accept_index", accept_index);
    visit("accept_token_num", accept_token_num);
    visit("candidates", candidates);
    visit("retrive_index", retrive_index);
    visit("retrive_next_token", retrive_next_token);
    visit("retrive_next_sibling", retrive_next_sibling);
    visit("uniform_samples", uniform_samples);
    visit("uniform_samples_for_final_sampling", uniform_samples_for_final_sampling);
    visit("target_probs", target_probs);
    visit("draft_probs", draft_probs);
    common.for_each_tensor(visit);
  }
};

struct SampleChainArgs {
  static constexpr const char* kOp = "verify_chain_sampling";
  const OptionalTensor& draft_probs;
  const Tensor& draft_token_ids;
  const Tensor& target_probs;
  const Tensor& uniform_samples;
  const Tensor& uniform_samples_for_final_sampling;
  const Tensor& output_token_ids;
  const Tensor& accept_token_num;
  const OptionalTensor& output_accepted_token_num;
  const OptionalTensor& output_emitted_draft_token_num;
  bool block_verification;
  CommonArgs common;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("draft_probs", draft_probs);
    visit("draft_token_ids", draft_token_ids);
    visit("target_probs", target_probs);
    visit("uniform_samples", uniform_samples);
    visit("uniform_samples_for_final_sampling", uniform_samples_for_final_sampling);
    visit("output_token_ids", output_token_ids);
    visit("accept_token_num", accept_token_num);
    visit("output_accepted_token_num", output_accepted_token_num);
    visit("output_emitted_draft_token_num", output_emitted_draft_token_num);
    common.for_each_tensor(visit);
  }
};

struct SampleChainLogitsArgs {
  static constexpr const char* kOp = "verify_chain_sampling_from_logits";
  const Tensor& draft_tokens;
  const Tensor& target_logits;
  const Tensor& seeds;
  const Tensor& positions;
  const Tensor& output_token_ids;
  const Tensor& accept_token_num;
  SamplingArgs sampling;
  const OptionalTensor& draft_probs;
  int64_t noise_stream;
  const OptionalTensor& error_mask;
  CommonArgs common;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("draft_tokens", draft_tokens);
    visit("target_logits", target_logits);
    visit("seeds", seeds);
    visit("positions", positions);
    visit("output_token_ids", output_token_ids);
    visit("accept_token_num", accept_token_num);
    sampling.for_each_tensor(visit);
    visit("draft_probs", draft_probs);
    visit("error_mask", error_mask);
    common.for_each_tensor(visit);
  }
};

struct SampleTreeLogitsArgs {
  static constexpr const char* kOp = "verify_tree_sampling_from_logits";
  const Tensor& predicts;
  const Tensor& accept_index;
  const Tensor& accept_token_num;
  const Tensor& candidates;
  const Tensor& retrive_index;
  const Tensor& retrive_next_token;
  const Tensor& retrive_next_sibling;
  const Tensor& target_logits;
  const Tensor& seeds;
  const Tensor& positions;
  SamplingArgs sampling;
  int64_t noise_stream;
  const OptionalTensor& error_mask;
  CommonArgs common;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("predicts", predicts);
    visit("accept_index", accept_index);
    visit("accept_token_num", accept_token_num);
    visit("candidates", candidates);
    visit("retrive_index", retrive_index);
    visit("retrive_next_token", retrive_next_token);
    visit("retrive_next_sibling", retrive_next_sibling);
    visit("target_logits", target_logits);
    visit("seeds", seeds);
    visit("positions", positions);
    sampling.for_each_tensor(visit);
    visit("error_mask", error_mask);
    common.for_each_tensor(visit);
  }
};

struct UpdateArgs {
  static constexpr const char* kOp = "update_and_select";
  const Tensor& accept_token_num;
  const Tensor& state;
  const Tensor& ring;
  int64_t slot;
  int64_t speculative_num_steps;
  const OptionalTensor& num_reqs;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("accept_token_num", accept_token_num);
    visit("state", state);
    visit("ring", ring);
    visit("num_reqs", num_reqs);
  }
};

struct ChainTreeArgs {
  static constexpr const char* kOp = "build_chain_tree";
  const Tensor& retrive_index;
  const Tensor& retrive_next_token;
  const Tensor& retrive_next_sibling;
  const OptionalTensor& positions;
  const OptionalTensor& seq_lens;
  const OptionalTensor& num_reqs;

  template <typename Visit>
  void for_each_tensor(Visit&& visit) const {
    visit("retrive_index", retrive_index);
    visit("retrive_next_token", retrive_next_token);
    visit("retrive_next_sibling", retrive_next_sibling);
    visit("positions", positions);
    visit("seq_lens", seq_lens);
    visit("num_reqs", num_reqs);
  }
};

// Where the state's header lies. The host can only look into it on the CPU; elsewhere the state is
// checked when it is made.
enum class StateMemory { kHostReadable, kDevice };

VerifyTreeParams to_params(const VerifyTreeArgs& args, StateMemory memory);
VerifyChainParams to_params(const VerifyChainArgs& args, StateMemory memory);
VerifyChainLogitsParams to_params(const VerifyChainLogitsArgs& args, StateMemory memory);
SampleTreeParams to_params(const SampleTreeArgs& args, StateMemory memory);
SampleChainParams to_params(const SampleChainArgs& args, StateMemory memory);
SampleChainLogitsParams to_params(const SampleChainLogitsArgs& args, StateMemory memory);
SampleTreeLogitsParams to_params(const SampleTreeLogitsArgs& args, StateMemory memory);
UpdateParams to_params(const UpdateArgs& args, StateMemory memory);
ChainTreeParams to_params(const ChainTreeArgs& args, StateMemory memory);

// One that is always given; it says what device the op runs on.
template <typename Args>
const Tensor& first_tensor(const Args& args) {
  const Tensor* first = nullptr;
  args.for_each_tensor([&]<typename T>(const char*, const T& tensor) {
    if constexpr (std::is_same_v<T, Tensor>) {
      if (first == nullptr) first = &tensor;
    }
  });
  return *first;
}

// All tensors of an op lie on one device.
template <typename Args>
void check_devices(const Args& args) {
  struct Visit {
    Checker check;
    const Tensor* first = nullptr;

    void operator()(const char* name, const Tensor& tensor) {
      if (first == nullptr) first = &tensor;
      check.same_device(name, tensor, *first);
    }
    void operator()(const char* name, const OptionalTensor& tensor) {
      if (tensor) (*this)(name, *tensor);
    }
  };
  args.for_each_tensor(Visit{Checker(Args::kOp)});
}

}  // namespace adaptive_spec
