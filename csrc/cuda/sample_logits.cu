#include "launch.h"

namespace adaptive_spec::cuda {

bool needs_workspace(const SampleChainLogitsParams&) { return true; }
bool needs_workspace(const SampleTreeLogitsParams&) { return true; }
cudaError_t launch(const SampleChainLogitsParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t launch(const SampleTreeLogitsParams&, cudaStream_t) { return cudaErrorNotSupported; }

}  // namespace adaptive_spec::cuda
