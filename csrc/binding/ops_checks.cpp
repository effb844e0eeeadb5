// The ops' checks without the ops: `adaptive_spec_checks::*` take the same arguments, on any
// device, and raise the same errors. A backend that launches from Python
// (kernels/adaptive_spec_triton) runs them first, so that what a wrong argument does is written
// once.
#include "ops.h"

namespace adaptive_spec {
namespace {

struct Checks {
  template <typename Args>
  static void run(const Args& args) {
    check_devices(args);
    to_params(args,
              first_tensor(args).is_cpu() ? StateMemory::kHostReadable : StateMemory::kDevice);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY(adaptive_spec_checks, m) { define_ops(m); }
STABLE_TORCH_LIBRARY_IMPL(adaptive_spec_checks, CompositeExplicitAutograd, m) {
  register_ops<Checks>(m);
}

}  // namespace adaptive_spec
