// The CPU ops: plain loops over the core, one call per op. They cannot fail; the binding has
// checked everything that the types do not say.
#pragma once

#include "params.h"

namespace adaptive_spec::cpu {

void launch_verify_tree_greedy(const VerifyTreeParams& params);
void launch_verify_chain_greedy(const VerifyChainParams& params);
void launch_verify_chain_greedy_from_logits(const VerifyChainLogitsParams& params);
void launch_tree_speculative_sampling(const SampleTreeParams& params);
void launch_chain_speculative_sampling(const SampleChainParams& params);
void launch_chain_sampling_from_logits(const SampleChainLogitsParams& params);
void launch_tree_sampling_from_logits(const SampleTreeLogitsParams& params);
void launch_update_and_select(const UpdateParams& params);
void launch_build_chain_tree(const ChainTreeParams& params);

}  // namespace adaptive_spec::cpu
