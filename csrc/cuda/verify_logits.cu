#include "logits_launch.h"
#include "verify_logits.cuh"

namespace adaptive_spec::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kLogitsThreads, kLogitsBlocksPerMultiprocessor)
    verify_logits_kernel(const __grid_constant__ VerifyChainLogitsParams params,
                         const LogitsPlan plan) {
  __shared__ LogitsShared shared;
  verify_logits_body<T>(params, plan, shared);
}

}  // namespace

bool needs_workspace(const VerifyChainLogitsParams&) { return true; }

cudaError_t launch(const VerifyChainLogitsParams& params, cudaStream_t stream) {
  return launch_rows(params, [&]<typename T>(const LogitsPlan& plan, unsigned num_blocks) {
    verify_logits_kernel<T><<<num_blocks, kLogitsThreads, 0, stream>>>(params, plan);
  });
}

}  // namespace adaptive_spec::cuda
