#include "launch.h"
#include "ops.h"

namespace adaptive_spec {
namespace {

struct Cpu {
  static void launch(const VerifyTreeParams& params) { cpu::launch_verify_tree_greedy(params); }
  static void launch(const VerifyChainParams& params) { cpu::launch_verify_chain_greedy(params); }
  static void launch(const VerifyChainLogitsParams& params) {
    cpu::launch_verify_chain_greedy_from_logits(params);
  }
  static void launch(const SampleTreeParams& params) {
    cpu::launch_tree_speculative_sampling(params);
  }
  static void launch(const SampleChainParams& params) {
    cpu::launch_chain_speculative_sampling(params);
  }
  static void launch(const SampleChainLogitsParams& params) {
    cpu::launch_chain_sampling_from_logits(params);
  }
  static void launch(const SampleTreeLogitsParams& params) {
    cpu::launch_tree_sampling_from_logits(params);
  }
  static void launch(const UpdateParams& params) { cpu::launch_update_and_select(params); }
  static void launch(const ChainTreeParams& params) { cpu::launch_build_chain_tree(params); }

  template <typename Args>
  static void run(const Args& args) {
    check_devices(args);
    launch(to_params(args, StateMemory::kHostReadable));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(adaptive_spec, CPU, m) { register_ops<Cpu>(m); }

}  // namespace adaptive_spec
