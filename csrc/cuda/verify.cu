#include "launch.h"
#include "plan.h"
#include "verify.cuh"

namespace adaptive_spec::cuda {
namespace {

template <typename Params>
__global__ void __launch_bounds__(kMaxSoloRequests* kWarpSize, 1)
    verify_kernel(const __grid_constant__ Params params) {
  __shared__ FinishShared shared;
  verify_body(params, shared);
}

template <typename Params>
cudaError_t launch_verify(const Params& params, cudaStream_t stream) {
  const LaunchShape shape = verify_shape(params.round.batch_size);
  verify_kernel<<<shape.num_blocks, shape.num_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

bool needs_totals(const RoundParams& round) {
  return round.has_finish() && round.adaptive.words == nullptr &&
         verify_shape(round.batch_size).num_blocks > 1;
}

}  // namespace

bool needs_workspace(const VerifyTreeParams& params) { return needs_totals(params.round); }
bool needs_workspace(const VerifyChainParams& params) { return needs_totals(params.round); }

cudaError_t launch(const VerifyTreeParams& params, cudaStream_t stream) {
  return launch_verify(params, stream);
}

cudaError_t launch(const VerifyChainParams& params, cudaStream_t stream) {
  return launch_verify(params, stream);
}

}  // namespace adaptive_spec::cuda
