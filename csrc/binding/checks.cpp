#include "checks.h"

#include <stdexcept>
#include <utility>

namespace adaptive_spec {
namespace {

// Type and index; the index of CPU and meta tensors says nothing and is left out.
std::pair<int32_t, int32_t> device_of(const Tensor& tensor) {
  int32_t type = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  const bool is_indexed =
      type != aoti_torch_device_type_cpu() && type != aoti_torch_device_type_meta();
  return {type, is_indexed ? tensor.get_device_index() : -1};
}

std::string device_name(int32_t type, int32_t index) {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  std::string name = type == aoti_torch_device_type_cuda() ? "cuda:" : "another device type:";
  name += std::to_string(index);
  return name;
}

std::string shape_text(std::initializer_list<Dim> dims) {
  std::string text = "[";
  for (const Dim& dim : dims) {
    if (text.size() > 1) text += ", ";
    if (dim.at_least) text += ">=";
    text += std::to_string(dim.size);
  }
  text += "]";
  return text;
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.size(i));
  }
  text += "]";
  return text;
}

}  // namespace

void fail(const char* op, const std::string& what) {
  throw std::invalid_argument(std::string(op) + ": " + what);
}

void fail_argument(const char* op, const char* name, const std::string& expected,
                   const std::string& got) {
  fail(op, "argument `" + std::string(name) + "`: expected " + expected + ", got " + got);
}

int32_t dtype_of(const Tensor& tensor) {
  int32_t code = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

std::string dtype_name(int32_t code) {
  static const struct {
    int32_t code;
    const char* name;
  } kNames[] = {
      {aoti_torch_dtype_int32(), "int32"},     {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_float16(), "float16"}, {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float32(), "float32"}, {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_bool(), "bool"},       {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int8(), "int8"},       {aoti_torch_dtype_int16(), "int16"},
  };
  for (const auto& known : kNames) {
    if (known.code == code) return known.name;
  }
  return "another dtype (code " + std::to_string(code) + ")";
}

void Checker::same_device(const char* name, const Tensor& tensor, const Tensor& first) const {
  const auto [type, index] = device_of(tensor);
  const auto [first_type, first_index] = device_of(first);
  if (type != first_type || index != first_index) {
    fail_argument(op_, name, "a tensor on " + device_name(first_type, first_index),
                  "one on " + device_name(type, index));
  }
}

void Checker::rank(const char* name, const Tensor& tensor, int64_t expected) const {
  if (tensor.dim() != expected) {
    fail_argument(op_, name, std::to_string(expected) + " dimension" + (expected == 1 ? "" : "s"),
                  std::to_string(tensor.dim()) + " (shape " + shape_text(tensor) + ")");
  }
}

void Checker::shape(const char* name, const Tensor& tensor,
                    std::initializer_list<Dim> expected) const {
  rank(name, tensor, static_cast<int64_t>(expected.size()));
  int64_t i = 0;
  for (const Dim& dim : expected) {
    if (!dim.accepts(tensor.size(i++))) {
      fail_argument(op_, name, "shape " + shape_text(expected), shape_text(tensor));
    }
  }
}

int64_t Checker::integer(const char* name, int64_t value, int64_t lowest, int64_t highest) const {
  if (value < lowest || value > highest) {
    fail_argument(op_, name,
                  "an integer from " + std::to_string(lowest) + " to " + std::to_string(highest),
                  std::to_string(value));
  }
  return value;
}

void Checker::fail_dtype(const char* name, const Tensor& tensor, int32_t expected) const {
  fail_argument(op_, name, "dtype " + dtype_name(expected), dtype_name(dtype_of(tensor)));
}

}  // namespace adaptive_spec
