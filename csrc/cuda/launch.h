// The CUDA ops: one kernel launch each, on the given stream of the current device. Nothing here
// waits for the device or allocates, so every call can be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace adaptive_spec::cuda {

// Whether such a launch needs a workspace: its blocks add up what they did, in the adaptive state
// if there is one; those of the last op share rows of logits besides. Of Workspace::num_words()
// words.
bool needs_workspace(const VerifyTreeParams& params);
bool needs_workspace(const VerifyChainParams& params);
bool needs_workspace(const VerifyChainLogitsParams& params);
bool needs_workspace(const SampleTreeParams& params);
bool needs_workspace(const SampleChainParams& params);
bool needs_workspace(const SampleChainLogitsParams& params);
bool needs_workspace(const SampleTreeLogitsParams& params);

cudaError_t launch(const VerifyTreeParams& params, cudaStream_t stream);
cudaError_t launch(const VerifyChainParams& params, cudaStream_t stream);
// Not for float64 logits.
cudaError_t launch(const VerifyChainLogitsParams& params, cudaStream_t stream);
cudaError_t launch(const SampleTreeParams& params, cudaStream_t stream);
cudaError_t launch(const SampleChainParams& params, cudaStream_t stream);
// Neither are these two.
cudaError_t launch(const SampleChainLogitsParams& params, cudaStream_t stream);
cudaError_t launch(const SampleTreeLogitsParams& params, cudaStream_t stream);
cudaError_t launch(const UpdateParams& params, cudaStream_t stream);
cudaError_t launch(const ChainTreeParams& params, cudaStream_t stream);

// Of the current device.
inline cudaError_t count_multiprocessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace adaptive_spec::cuda
