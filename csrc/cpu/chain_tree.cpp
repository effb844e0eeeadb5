#include "launch.h"

namespace adaptive_spec::cpu {

void launch_build_chain_tree(const ChainTreeParams& params) {
  const int64_t num_nodes = params.num_nodes;
  const int64_t num_live = num_live_rows(params.num_reqs, params.batch_size);
  for (int64_t b = 0; b < num_live; ++b) {
    for (int64_t i = 0; i < num_nodes; ++i) {
      params.retrive_index.at(b, i) = b * num_nodes + i;
      params.retrive_next_token.at(b, i) = i + 1 < num_nodes ? i + 1 : -1;
      params.retrive_next_sibling.at(b, i) = -1;
      if (params.positions) params.positions[b * num_nodes + i] = params.seq_lens[b] + i;
    }
  }
}

}  // namespace adaptive_spec::cpu
