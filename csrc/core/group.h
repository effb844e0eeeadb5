// The lanes that work on one request together. Walks are templates over a group, so that one text
// serves a CPU thread and a warp (csrc/cuda/warp.cuh). A group offers
//
//   rank(), size()        this lane, and how many there are
//   load(vector, n)       n elements, indexable from then on by every lane with the same index
//
// Control flow in a walk depends only on values that are the same in every lane, so all lanes take
// every branch together and may meet in load and in indexing. Lane 0 does the scalar writes.
#pragma once

#include <cstdint>

#include "macros.h"
#include "strided.h"

namespace adaptive_spec {

// One lane: loading is reading in place.
struct SerialGroup {
  AS_HD int64_t rank() const { return 0; }
  AS_HD int64_t size() const { return 1; }

  template <typename T>
  AS_HD Vector<T> load(Vector<T> vector, int64_t /*n*/) const {
    return vector;
  }
};

}  // namespace adaptive_spec
