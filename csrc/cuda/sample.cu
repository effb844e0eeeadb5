#include "launch.h"
#include "plan.h"
#include "sample.cuh"

namespace adaptive_spec::cuda {
namespace {

template <typename Params>
__global__ void __launch_bounds__(kLogitsThreads, kSampleBlocksPerMultiprocessor)
    sample_kernel(const __grid_constant__ Params params, const LogitsPlan plan) {
  __shared__ SampleShared shared;
  sample_body(params, plan, shared);
}

template <typename Params>
cudaError_t launch_sample(const Params& params, cudaStream_t stream) {
  int num_multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(&num_multiprocessors);
  if (error != cudaSuccess) return error;
  const int64_t batch_size = params.round.batch_size;
  const LogitsPlan plan = sampling_plan(batch_size, vocab_size(params), num_multiprocessors);
  if (batch_size * plan.num_pieces > kMaxGridSize) return cudaErrorInvalidConfiguration;
  const unsigned num_blocks =
      static_cast<unsigned>(std::max<int64_t>(batch_size * plan.num_pieces, 1));
  sample_kernel<<<num_blocks, kLogitsThreads, 0, stream>>>(params, plan);
  return cudaGetLastError();
}

}  // namespace

bool needs_workspace(const SampleTreeParams&) { return true; }
bool needs_workspace(const SampleChainParams&) { return true; }

cudaError_t launch(const SampleTreeParams& params, cudaStream_t stream) {
  return launch_sample(params, stream);
}

cudaError_t launch(const SampleChainParams& params, cudaStream_t stream) {
  return launch_sample(params, stream);
}

}  // namespace adaptive_spec::cuda
