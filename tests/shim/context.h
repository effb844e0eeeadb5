// A stack of its own for every lane, and the jump from one to another. swapcontext would do, but it
// asks the kernel for the signal mask each time, which is thirty times as slow, and longjmp between
// stacks is refused by fortified builds of the C library.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_shim {

class Stack {
 public:
  static constexpr size_t kSize = size_t{128} << 10;

  // The lowest page stays out of bounds, so that an overflow is a fault and not a riddle.
  Stack() {
    void* memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) throw std::bad_alloc();
    begin_ = static_cast<std::byte*>(memory);
    // Stacks that all began on a page's edge would share a few sets of the cache.
    static size_t count = 0;
    shift_ = count++ % 50 * 15 * kCacheLine;
  }
  Stack(Stack&& other) noexcept
      : begin_(std::exchange(other.begin_, nullptr)), shift_(other.shift_) {}
  Stack& operator=(Stack&&) = delete;
  ~Stack() {
    if (begin_ != nullptr) munmap(begin_, kSize);
  }
  std::byte* bottom() const { return begin_ + kPage; }
  std::byte* top() const { return begin_ + kSize - shift_; }
  size_t size() const { return static_cast<size_t>(top() - bottom()); }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kCacheLine = 64;
  std::byte* begin_;
  size_t shift_;
};

// A point of execution to come back to: the caller of `launch`, or a lane.
class Context {
 public:
  // The caller's own stack.
  Context() = default;

  // The next switch to this context calls `entry`, which must not return.
  void start(const Stack& stack, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
    // Frames that an earlier user of the stack never left.
    __asan_unpoison_memory_region(stack.bottom(), stack.size());
    bottom_ = stack.bottom();
    size_ = stack.size();
#endif
#if defined(__x86_64__)
    // As if `entry` had been about to be called when the context was left.
    void** top = reinterpret_cast<void**>(stack.top());
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(entry);
    stack_pointer_ = top - 2 - kSavedRegisters;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack.bottom();
    context_.uc_stack.ss_size = stack.size();
    makecontext(&context_, entry, 0);
#endif
  }

  // Leaves this context, which is the running one, for `next`. Returns when something switches
  // back.
  void switch_to(Context& next) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    announce(&fake_stack, next);
    jump(next);
    arrived(fake_stack);
#else
    jump(next);
#endif
  }

  // Leaves this context for good.
  [[noreturn]] void leave_for(Context& next) {
#if defined(__SANITIZE_ADDRESS__)
    announce(nullptr, next);
#endif
    jump(next);
    __builtin_unreachable();
  }

  // To be called first thing by `entry`.
  static void entered() {
#if defined(__SANITIZE_ADDRESS__)
    arrived(nullptr);
#endif
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static Context*& previous() {
    static Context* context = nullptr;
    return context;
  }
  void announce(void** fake_stack, const Context& next) {
    previous() = this;
    __sanitizer_start_switch_fiber(fake_stack, next.bottom_, next.size_);
  }
  static void arrived(void* fake_stack) {
    // This is how the bounds of the caller's own stack become known.
    __sanitizer_finish_switch_fiber(fake_stack, &previous()->bottom_, &previous()->size_);
  }
  const void* bottom_ = nullptr;
  size_t size_ = 0;
#endif

#if defined(__x86_64__)
  static constexpr int kSavedRegisters = 6;

  void jump(Context& next) { swap_stacks(&stack_pointer_, next.stack_pointer_); }

  // Saves the registers that a call preserves, and continues where `to` was left.
  __attribute__((naked, noinline)) static void swap_stacks(void** /*from*/, void* /*to*/) {
    asm("pushq %rbp\n\t"
        "pushq %rbx\n\t"
        "pushq %r12\n\t"
        "pushq %r13\n\t"
        "pushq %r14\n\t"
        "pushq %r15\n\t"
        "movq %rsp, (%rdi)\n\t"
        "movq %rsi, %rsp\n\t"
        "popq %r15\n\t"
        "popq %r14\n\t"
        "popq %r13\n\t"
        "popq %r12\n\t"
        "popq %rbx\n\t"
        "popq %rbp\n\t"
        "ret");
  }
  void* stack_pointer_ = nullptr;
#else
  void jump(Context& next) { swapcontext(&context_, &next.context_); }
  ucontext_t context_{};
#endif
};

}  // namespace cuda_shim
