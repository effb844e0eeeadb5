// The host classes as Python sees them: plain pybind11, except for the one call made every round.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>

#include "decision_ring.h"
#include "register.h"
#include "ring_dlpack.h"
#include "round.h"
#include "step_reader.h"
#include "workspace.h"

namespace py = pybind11;

namespace adaptive_spec {
namespace {

// The Python exceptions, for the one function that pybind11 does not wrap.
PyObject* ring_overrun_error = nullptr;
PyObject* ring_timeout_error = nullptr;

using Words = py::array_t<int64_t, py::array::c_style>;

// While waiting without the GIL: lets Ctrl-C through.
void raise_signals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// next_steps through CPython's fast call: a third of what a pybind11 method costs, and it is the
// whole of what the host does per round.
PyObject* next_steps(PyObject* capsule, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 1) {
    PyErr_Format(PyExc_TypeError, "next_steps: expected `batch_size`, got %zd arguments", num_args);
    return nullptr;
  }
  const Py_ssize_t batch_size = PyNumber_AsSsize_t(args[0], PyExc_OverflowError);
  if (batch_size == -1 && PyErr_Occurred()) return nullptr;
  if (batch_size < 0) {
    PyErr_Format(PyExc_ValueError, "next_steps: `batch_size` must not be negative, got %zd",
                 batch_size);
    return nullptr;
  }
  auto* reader = static_cast<StepReader*>(PyCapsule_GetPointer(capsule, nullptr));
  try {
    std::optional<int32_t> steps = reader->try_next_steps(batch_size);
    if (!steps) {
      py::gil_scoped_release release;
      steps = reader->next_steps(batch_size, &raise_signals);
    }
    return PyLong_FromLong(*steps);
  } catch (const RingTimeoutError& error) {
    PyErr_SetString(ring_timeout_error, error.what());
  } catch (const RingOverrunError& error) {
    PyErr_SetString(ring_overrun_error, error.what());
  } catch (py::error_already_set& error) {
    error.restore();
  }
  return nullptr;
}

PyMethodDef next_steps_def = {
    "next_steps", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(next_steps)),
    METH_FASTCALL, "Start a round with `batch_size` requests: the draft steps it must run with."};

py::object next_steps_function(std::shared_ptr<StepReader> reader) {
  auto* raw = reader.get();
  auto* owner = new std::shared_ptr<StepReader>(std::move(reader));
  py::object capsule =
      py::reinterpret_steal<py::object>(PyCapsule_New(raw, nullptr, [](PyObject* self) {
        delete static_cast<std::shared_ptr<StepReader>*>(PyCapsule_GetContext(self));
      }));
  if (!capsule) {
    delete owner;
    throw py::error_already_set();
  }
  PyCapsule_SetContext(capsule.ptr(), owner);
  PyObject* function = PyCFunction_New(&next_steps_def, capsule.ptr());
  if (!function) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

// The state's words in host memory, which they are written back from where the state lies on a
// device.
int64_t* checked_words(Words& state, const DecisionRing& ring) {
  if (const char* error = state_error(state.data(), state.size(), ring.num_words(), 0)) {
    throw std::invalid_argument(error);
  }
  return state.mutable_data();
}

#define AS_FIELD(type, name) \
  std::make_tuple(#name, offsetof(type, name), py::dtype::of<decltype(type::name)>())

// Offsets as the compiler laid them out, for numpy's structured dtypes.
py::dict record_dtypes() {
  auto make = [](const auto& fields, size_t size) {
    py::list names, formats, offsets;
    for (const auto& [name, offset, format] : fields) {
      names.append(name);
      offsets.append(offset);
      formats.append(format);
    }
    return py::dtype(std::move(names), std::move(formats), std::move(offsets), size);
  };
  using Field = std::tuple<const char*, size_t, py::object>;
  const std::vector<Field> header = {AS_FIELD(StateHeader, magic),
                                     AS_FIELD(StateHeader, num_words),
                                     AS_FIELD(StateHeader, num_slots),
                                     AS_FIELD(StateHeader, ring_depth),
                                     AS_FIELD(StateHeader, next_round),
                                     AS_FIELD(StateHeader, num_anomalies),
                                     {"pending", offsetof(StateHeader, pending), py::dtype("3i8")}};
  const std::vector<Field> config = {
      AS_FIELD(SlotConfig, ema_alpha),
      AS_FIELD(SlotConfig, up_hysteresis),
      AS_FIELD(SlotConfig, down_hysteresis),
      AS_FIELD(SlotConfig, ceiling_coeff),
      AS_FIELD(SlotConfig, update_interval),
      AS_FIELD(SlotConfig, warmup_batches),
      AS_FIELD(SlotConfig, min_dwell),
      AS_FIELD(SlotConfig, probe_backoff),
      AS_FIELD(SlotConfig, batch_size),
      AS_FIELD(SlotConfig, num_candidates),
      AS_FIELD(SlotConfig, initial_index),
      AS_FIELD(SlotConfig, reset_ema_on_switch),
      {"candidate_steps", offsetof(SlotConfig, candidate_steps), py::dtype("16i4")}};
  const std::vector<Field> slot = {
      AS_FIELD(SlotState, ema),         AS_FIELD(SlotState, batch_count),
      AS_FIELD(SlotState, last_switch), AS_FIELD(SlotState, num_switches),
      AS_FIELD(SlotState, num_stale),   AS_FIELD(SlotState, index),
      AS_FIELD(SlotState, reason),      AS_FIELD(SlotState, probe_wait),
      AS_FIELD(SlotState, probe_left),  AS_FIELD(SlotState, probing)};
  py::dict dtypes;
  dtypes["StateHeader"] = make(header, sizeof(StateHeader));
  dtypes["SlotConfig"] = make(config, sizeof(SlotConfig));
  dtypes["SlotState"] = make(slot, sizeof(SlotState));
  return dtypes;
}

#undef AS_FIELD

}  // namespace

void register_host(py::module_& m) {
  ring_overrun_error =
      py::register_exception<RingOverrunError>(m, "RingOverrunError", PyExc_RuntimeError).ptr();
  ring_timeout_error =
      py::register_exception<RingTimeoutError>(m, "RingTimeoutError", PyExc_TimeoutError).ptr();

  m.attr("MAX_SLOTS") = kMaxSlots;
  m.attr("MAX_CANDIDATES") = kMaxCandidates;
  m.attr("STATE_MAGIC") = kStateMagic;
  m.attr("MIN_RING_DEPTH") = kMinRingDepth;
  m.attr("ROUND_RECORD_WORDS") = RoundRecord::kNumWords;
  m.attr("MAX_PROBE_WAIT") = kMaxProbeWait;
  m.def("record_dtypes", &record_dtypes, "The state's records as numpy dtypes, by name.");
  m.def("num_workspace_words", &Workspace::num_words, py::arg("batch_size"),
        py::arg("num_draft_tokens"));
  m.def("num_state_words", [](int64_t num_slots) { return num_state_words(num_slots); });
  m.def(
      "reset_state",
      [](Words state, DecisionRing& ring) {
        int64_t* words = checked_words(state, ring);
        reset_state(words);
        seed_ring(words, ring.host_words());
      },
      py::arg("state").noconvert(), py::arg("ring"),
      "Every slot back to its start, the round counter to 0, the ring to the starting steps.");
  m.def(
      "seed_ring",
      [](Words state, DecisionRing& ring) {
        seed_ring(checked_words(state, ring), ring.host_words());
      },
      py::arg("state").noconvert(), py::arg("ring"), "Fill the ring from a state that was loaded.");

  py::class_<DecisionWord>(m, "Decision")
      .def_property_readonly("steps", [](const DecisionWord& w) { return int{w.steps}; })
      .def_property_readonly("reason", [](const DecisionWord& w) { return int{w.reason}; })
      .def_property_readonly("round", [](const DecisionWord& w) { return w.round; })
      .def("__repr__", [](const DecisionWord& w) {
        return "Decision(round=" + std::to_string(w.round) + ", steps=" + std::to_string(w.steps) +
               ", reason=" + std::to_string(w.reason) + ")";
      });
  py::class_<RoundRecord>(m, "RoundRecord")
      .def_readonly("sum", &RoundRecord::sum)
      .def_readonly("num_reqs", &RoundRecord::num_reqs)
      .def_readonly("steps", &RoundRecord::steps)
      .def_readonly("slot", &RoundRecord::slot);

  py::class_<DecisionRing, std::shared_ptr<DecisionRing>>(m, "DecisionRing")
      .def(py::init<int64_t, int64_t, int>(), py::arg("depth"), py::arg("num_slots"),
           py::arg("device_index") = -1)
      .def("__dlpack__", &ring_dlpack, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
           py::arg("copy") = py::none())
      .def("__dlpack_device__", &ring_dlpack_device)
      .def_property_readonly("device_index", &DecisionRing::device_index)
      .def_property_readonly("depth", &DecisionRing::depth)
      .def_property_readonly("num_slots", &DecisionRing::num_slots)
      .def_property_readonly("stalls", &DecisionRing::stalls)
      .def(
          "read",
          [](const DecisionRing& ring, int64_t round, int64_t slot) {
            ring.check_slot(slot);
            return ring.read(round, static_cast<int32_t>(slot));
          },
          py::arg("round"), py::arg("slot"))
      .def("record", &DecisionRing::record, py::arg("round"))
      .def(
          "latest",
          [](const DecisionRing& ring, int64_t slot) {
            ring.check_slot(slot);
            return ring.latest(static_cast<int32_t>(slot));
          },
          py::arg("slot"))
      .def(
          "wait",
          [](DecisionRing& ring, int64_t round, int64_t slot, double timeout_s) {
            ring.check_slot(slot);
            py::gil_scoped_release release;
            return ring.wait(round, static_cast<int32_t>(slot), timeout_s, &raise_signals);
          },
          py::arg("round"), py::arg("slot"), py::arg("timeout_s"));

  py::class_<StepReader, std::shared_ptr<StepReader>>(m, "StepReader")
      .def(py::init<std::shared_ptr<DecisionRing>, const std::vector<int64_t>&,
                    const std::vector<int64_t>&, int64_t, int32_t, int64_t, double>(),
           py::kw_only(), py::arg("ring"), py::arg("slot_batch_sizes"), py::arg("cuda_graph_bs"),
           py::arg("lag"), py::arg("debounce_rounds"), py::arg("first_round"), py::arg("timeout_s"))
      .def("slot_for_batch", &StepReader::slot_for_batch, py::arg("batch_size"))
      .def_property_readonly("next_steps", &next_steps_function)
      .def("cancel_round", &StepReader::cancel_round)
      .def("restart", &StepReader::restart, py::arg("first_round"))
      .def_property_readonly("next_round", &StepReader::next_round)
      .def_property_readonly("lag", &StepReader::lag);
}

}  // namespace adaptive_spec
