#include "logits_launch.h"
#include "sample_logits.cuh"

namespace adaptive_spec::cuda {
namespace {

template <typename T, typename Params>
__global__ void __launch_bounds__(kLogitsThreads, kSampleBlocksPerMultiprocessor)
    sample_logits_kernel(const __grid_constant__ Params params, const LogitsPlan plan) {
  __shared__ SampleLogitsShared shared;
  sample_logits_body<T>(params, plan, shared);
}

template <typename Params>
cudaError_t launch_sampled(const Params& params, cudaStream_t stream) {
  return launch_rows(params, [&]<typename T>(const LogitsPlan& plan, unsigned num_blocks) {
    sample_logits_kernel<T><<<num_blocks, kLogitsThreads, 0, stream>>>(params, plan);
  });
}

}  // namespace

bool needs_workspace(const SampleChainLogitsParams&) { return true; }
bool needs_workspace(const SampleTreeLogitsParams&) { return true; }

cudaError_t launch(const SampleChainLogitsParams& params, cudaStream_t stream) {
  return launch_sampled(params, stream);
}
cudaError_t launch(const SampleTreeLogitsParams& params, cudaStream_t stream) {
  return launch_sampled(params, stream);
}

}  // namespace adaptive_spec::cuda
