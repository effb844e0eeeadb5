#include "launch.h"
#include "rows.h"

namespace adaptive_spec::cpu {

void launch_build_chain_tree(const ChainTreeParams& params) {
  const int64_t num_live = num_live_rows(params.num_reqs, params.batch_size);
  for (int64_t b = 0; b < num_live; ++b) {
    for (int64_t i = 0; i < params.num_nodes; ++i) write_chain_node(params, b, i);
  }
}

}  // namespace adaptive_spec::cpu
