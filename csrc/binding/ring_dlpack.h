// The ring's words as a tensor: DLPack carries them to torch, on the device that writes them,
// without this module having to know torch's tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "decision_ring.h"

namespace adaptive_spec {

// (device type, device index), the protocol's __dlpack_device__.
pybind11::tuple ring_dlpack_device(const DecisionRing& ring);

// A capsule with the words as int64 [num_words], the protocol's __dlpack__. The tensor made from it
// keeps the ring alive; a capsule that nobody uses lets go of it. `stream` needs no waiting for:
// the words were written by the host before this call. Throws BufferError for what cannot be had: a
// copy, which would not be the ring, or another device.
pybind11::capsule ring_dlpack(std::shared_ptr<DecisionRing> ring, const pybind11::object& stream,
                              const pybind11::object& max_version,
                              const pybind11::object& dl_device, const pybind11::object& copy);

}  // namespace adaptive_spec
