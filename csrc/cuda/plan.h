// Launch shapes: how work is spread over a device. Plain functions of sizes, so that tests can run
// the kernel bodies with the very shapes they are launched with, and with any others: a shape never
// changes a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "workspace.h"

namespace adaptive_spec::cuda {

struct LaunchShape {
  unsigned num_blocks;
  unsigned num_threads;
};

// Requests that one block verifies alone, a warp each.
constexpr int64_t kMaxSoloRequests = 16;

constexpr LaunchShape shape(int64_t num_blocks, int64_t num_threads) {
  return {static_cast<unsigned>(num_blocks), static_cast<unsigned>(num_threads)};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline LaunchShape verify_shape(int64_t batch_size) {
  constexpr int64_t kWarpsPerBlock = 4;
  constexpr int64_t kMaxBlocks = 2048;
  const int64_t warps = std::clamp<int64_t>(batch_size, 1, kMaxSoloRequests);
  if (batch_size <= warps) return shape(1, warps * 32);
  return shape(std::min(ceil_div(batch_size, kWarpsPerBlock), kMaxBlocks), kWarpsPerBlock * 32);
}

inline LaunchShape update_shape(int64_t batch_size) {
  return shape(1, 32 * std::clamp<int64_t>(ceil_div(batch_size, 32), 1, 32));
}

inline LaunchShape chain_tree_shape(int64_t batch_size, int64_t num_nodes) {
  constexpr int64_t kThreads = 256;
  constexpr int64_t kMaxBlocks = 1024;
  return shape(std::clamp<int64_t>(ceil_div(batch_size * num_nodes, kThreads), 1, kMaxBlocks),
               kThreads);
}

// How each row of logits is cut.
struct LogitsPlan {
  int64_t num_pieces;
  int64_t piece_size;  // entries, the last piece's excepted
};

constexpr int kLogitsThreads = 256;
// That many blocks at a time keep enough loads in flight; with more, registers would be spilled.
constexpr int64_t kLogitsBlocksPerMultiprocessor = 4;
constexpr int64_t kMaxGridSize = (int64_t{1} << 31) - 1;

// Enough pieces that one position of all requests gives every multiprocessor a few blocks, but none
// so small that a block's own costs outweigh its loads.
inline LogitsPlan logits_plan(int64_t batch_size, int64_t vocab_size, int64_t entry_size,
                              int64_t num_multiprocessors) {
  constexpr int64_t kMinPieceBytes = 2 * kLogitsThreads * 16;
  const int64_t requests = std::max<int64_t>(batch_size, 1);
  const int64_t wanted = ceil_div(num_multiprocessors * kLogitsBlocksPerMultiprocessor, requests);
  const int64_t by_size = std::max<int64_t>(vocab_size * entry_size / kMinPieceBytes, 1);
  const int64_t by_workspace = std::max<int64_t>(kMaxWavePieces / requests, 1);
  const int64_t pieces = std::min({wanted, by_size, by_workspace});
  // Multiples of 16 bytes, so that only rows, not pieces, start unaligned.
  const int64_t unit = 16 / entry_size;
  const int64_t piece_size = ceil_div(ceil_div(vocab_size, pieces), unit) * unit;
  return {ceil_div(vocab_size, piece_size), piece_size};
}

constexpr int64_t kSampleBlocksPerMultiprocessor = 2;

// How the one row that each request draws from is cut.
inline LogitsPlan sampling_plan(int64_t batch_size, int64_t vocab_size,
                                int64_t num_multiprocessors) {
  constexpr int64_t kMinPiece = 2048;
  const int64_t requests = std::max<int64_t>(batch_size, 1);
  const int64_t wanted = ceil_div(num_multiprocessors * kSampleBlocksPerMultiprocessor, requests);
  const int64_t by_size = std::max<int64_t>(vocab_size / kMinPiece, 1);
  const int64_t by_workspace = std::max<int64_t>(kMaxWavePieces / requests, 1);
  const int64_t piece_size = ceil_div(vocab_size, std::min({wanted, by_size, by_workspace}));
  return {ceil_div(vocab_size, piece_size), piece_size};
}

}  // namespace adaptive_spec::cuda
