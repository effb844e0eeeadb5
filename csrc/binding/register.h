// The parts of the Python module, one function each; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace adaptive_spec {

void register_host(pybind11::module_& m);

}  // namespace adaptive_spec
