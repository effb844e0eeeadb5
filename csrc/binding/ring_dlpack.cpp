#include "ring_dlpack.h"

#include "dlpack.h"

namespace py = pybind11;

namespace adaptive_spec {
namespace {

// What lives as long as the tensor does.
struct RingTensor {
  std::shared_ptr<DecisionRing> ring;
  int64_t shape[1];
  dlpack::ManagedTensor managed;
};

dlpack::Device device_of(const DecisionRing& ring) {
  if (ring.device_index() < 0) return {dlpack::kCpu, 0};
  return {dlpack::kCuda, ring.device_index()};
}

// torch may call it without the GIL, on whatever thread drops the last reference.
void release(dlpack::ManagedTensor* managed) { delete static_cast<RingTensor*>(managed->owner); }

void drop_unused(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, dlpack::kCapsuleName)) return;  // taken, and renamed
  auto* managed =
      static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
  managed->deleter(managed);
}

}  // namespace

py::tuple ring_dlpack_device(const DecisionRing& ring) {
  const dlpack::Device device = device_of(ring);
  return py::make_tuple(device.type, device.index);
}

// max_version is the newest DLPack that the consumer knows; all know the unversioned form.
py::capsule ring_dlpack(std::shared_ptr<DecisionRing> ring, const py::object& /*stream*/,
                        const py::object& /*max_version*/, const py::object& dl_device,
                        const py::object& copy) {
  if (!copy.is_none() && copy.cast<bool>()) {
    throw py::buffer_error("DecisionRing: a copy of the ring would not be the ring (`copy`)");
  }
  if (!dl_device.is_none() && !dl_device.equal(ring_dlpack_device(*ring))) {
    throw py::buffer_error("DecisionRing: the ring cannot move to another device (`dl_device`)");
  }
  auto tensor = std::make_unique<RingTensor>();
  tensor->shape[0] = ring->num_words();
  tensor->managed = {
      {ring->device_words(), device_of(*ring), 1, {dlpack::kInt, 64, 1}, tensor->shape, nullptr, 0},
      tensor.get(),
      &release};
  tensor->ring = std::move(ring);
  PyObject* capsule = PyCapsule_New(&tensor->managed, dlpack::kCapsuleName, &drop_unused);
  if (!capsule) throw py::error_already_set();
  tensor.release();  // the capsule's, until a consumer takes it
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace adaptive_spec
