// The memory of a random call. A call is built twice from one seed, once for the CPU launcher and
// once for the kernel, in equal memory; afterwards the two are compared byte for byte, gaps between
// rows and columns and guard zones included.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "strided.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace kernel_cases {

using adaptive_spec::Matrix;
using adaptive_spec::Vector;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t bits() { return engine_(); }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <typename T>
  T any_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer guards the blocks itself, and sees reads too.
constexpr int64_t kGuard = 0;
#else
constexpr int64_t kGuard = 5;
#endif

// A piece of memory of which only some spans are in use.
class Block {
 public:
  static Block on_heap(std::string name, size_t size) {
    Block block(std::move(name), size);
    block.heap_ = std::make_unique<std::byte[]>(size);
    block.begin_ = block.heap_.get();
    std::memset(block.begin_, kSentinel, size);
    block.spans_.emplace_back(0, size);
    return block;
  }
  // Address space without memory: only the pages of what is opened can be touched.
  static Block sparse(std::string name, size_t size) {
    Block block(std::move(name), std::max(round_up(size), kPage));
    void* memory =
        mmap(nullptr, block.size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    block.begin_ = static_cast<std::byte*>(memory);
    return block;
  }
  Block(Block&& other) noexcept
      : name_(std::move(other.name_)),
        size_(other.size_),
        begin_(std::exchange(other.begin_, nullptr)),
        heap_(std::move(other.heap_)),
        spans_(std::move(other.spans_)),
        padding_(other.padding_) {}
  Block& operator=(Block&&) = delete;
  ~Block() {
    if (heap_ == nullptr && begin_ != nullptr) munmap(begin_, size_);
  }

  std::byte* begin() const { return begin_; }
  const std::string& name() const { return name_; }

  void open(size_t offset, size_t size) {
    const size_t first = offset / kPage * kPage;
    const size_t length = round_up(offset + size) - first;
    if (mprotect(begin_ + first, length, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    if (spans_.empty() || spans_.back().first != first) spans_.emplace_back(first, length);
  }

  // From here on it belongs to padding rows, which nobody may touch.
  void set_padding(size_t offset) { padding_ = offset; }
  void forbid_padding([[maybe_unused]] bool forbidden) const {
#if defined(__SANITIZE_ADDRESS__)
    if (heap_ == nullptr || padding_ >= size_) return;
    if (forbidden) {
      __asan_poison_memory_region(begin_ + padding_, size_ - padding_);
    } else {
      __asan_unpoison_memory_region(begin_ + padding_, size_ - padding_);
    }
#endif
  }

  bool operator==(const Block& other) const {
    return std::all_of(spans_.begin(), spans_.end(), [&](const auto& span) {
      return std::memcmp(begin_ + span.first, other.begin_ + span.first, span.second) == 0;
    });
  }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr int kSentinel = 0xB3;
  static size_t round_up(size_t size) { return (size + kPage - 1) / kPage * kPage; }

  Block(std::string name, size_t size) : name_(std::move(name)), size_(size), padding_(size) {}

  std::string name_;
  size_t size_;
  std::byte* begin_ = nullptr;
  std::unique_ptr<std::byte[]> heap_;
  std::vector<std::pair<size_t, size_t>> spans_;
  size_t padding_;
};

// How the tensors of a call lie in memory.
struct Layout {
  uint64_t seed;
  bool is_strided;  // gaps between columns and between rows
  bool is_huge;     // rows more than 2^31 elements apart
};

class Tensors {
 public:
  explicit Tensors(const Layout& layout) : layout_(layout), random_(layout.seed) {}

  // [rows, cols], of which the first `num_live` rows belong to requests that are not padding.
  template <typename T>
  Matrix<T> matrix(const char* name, int64_t rows, int64_t cols, int64_t num_live) {
    const int64_t col_stride = layout_.is_strided ? random_.between(1, 3) : 1;
    const int64_t width = cols * col_stride + (layout_.is_strided ? random_.below(4) : 0);
    const int64_t row_stride = layout_.is_huge ? kHugeStride + random_.below(9) : width;
    return {add<T>(name, rows, row_stride, span(cols, col_stride), num_live), row_stride,
            col_stride};
  }
  template <typename T>
  Vector<T> vector(const char* name, int64_t size, int64_t num_live) {
    const int64_t stride = layout_.is_huge      ? kHugeStride + random_.below(9)
                           : layout_.is_strided ? random_.between(1, 3)
                                                : 1;
    return {add<T>(name, size, stride, 1, num_live), stride};
  }
  // Rows of contiguous entries that start at any address that is a multiple of the entry's size.
  template <typename T>
  T* rows(const char* name, int64_t num_rows, int64_t stride, int64_t width, int64_t num_live) {
    return add<T>(name, num_rows, stride, width, num_live, random_.below(16));
  }

  bool is_huge() const { return layout_.is_huge; }

  void forbid_padding(bool forbidden) const {
    for (const Block& block : blocks_) block.forbid_padding(forbidden);
  }
  // The name of a tensor that differs, or empty.
  std::string difference(const Tensors& other) const {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (!(blocks_[i] == other.blocks_[i])) return blocks_[i].name();
    }
    return {};
  }

  static constexpr int64_t kHugeStride = (int64_t{1} << 31) + 1;

 private:
  static int64_t span(int64_t size, int64_t stride) {
    return size == 0 ? 0 : (size - 1) * stride + 1;
  }

  // `width`: entries from a row's first to its last.
  template <typename T>
  T* add(const char* name, int64_t rows, int64_t stride, int64_t width, int64_t num_live,
         int64_t offset = 0) {
    constexpr size_t kEntry = sizeof(T);
    const int64_t used = rows == 0 || width == 0 ? 0 : (rows - 1) * stride + width;
    const int64_t front = kGuard + offset;
    const size_t size = static_cast<size_t>(front + used + kGuard) * kEntry;
    const auto start_of = [&](int64_t row) {
      return static_cast<size_t>(front + row * stride) * kEntry;
    };
    blocks_.push_back(layout_.is_huge ? Block::sparse(name, size) : Block::on_heap(name, size));
    Block& block = blocks_.back();
    if (layout_.is_huge) {
      // Padding rows stay closed.
      for (int64_t row = 0; row < num_live && width > 0; ++row) {
        block.open(start_of(row), static_cast<size_t>(width) * kEntry);
      }
    } else if (num_live < rows) {
      block.set_padding(start_of(num_live));
    }
    return reinterpret_cast<T*>(block.begin()) + front;
  }

  Layout layout_;
  Random random_;
  std::vector<Block> blocks_;
};

// Inputs are const in the params, and filled all the same.
template <typename T, typename Value>
void fill(const Vector<T>& vector, int64_t size, const Value& value) {
  using Entry = std::remove_const_t<T>;
  for (int64_t i = 0; i < size; ++i) const_cast<Entry&>(vector[i]) = static_cast<Entry>(value());
}
template <typename T, typename Value>
void fill(const Matrix<T>& matrix, int64_t rows, int64_t cols, const Value& value) {
  for (int64_t row = 0; row < rows; ++row) fill(matrix.row(row), cols, value);
}
template <typename T>
std::remove_const_t<T>& entry(const Matrix<T>& matrix, int64_t row, int64_t col) {
  return const_cast<std::remove_const_t<T>&>(matrix.at(row, col));
}

}  // namespace kernel_cases
