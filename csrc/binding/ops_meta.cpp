// Meta kernels. The ops write only what they are given, so there is no shape to compute; sizes stay
// unread, since they may be symbolic and reading one would tie a compiled graph to its value. The
// one thing checked is what would otherwise end here silently: a real tensor beside meta ones.
#include "ops.h"

namespace adaptive_spec {
namespace {

struct Meta {
  template <typename Args>
  static void run(const Args& args) {
    check_devices(args);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(adaptive_spec, Meta, m) { register_ops<Meta>(m); }

}  // namespace adaptive_spec
