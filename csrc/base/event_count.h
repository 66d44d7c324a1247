#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace dadt {

using Clock = std::chrono::steady_clock;

// At most a year, which stands for "for ever": larger values would overflow the clock.
inline Clock::duration duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 3.2e7)));
}

inline Clock::time_point deadline_after(double seconds) {
  return Clock::now() + duration(std::max(seconds, 0.0));
}

inline double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeping until something changes: an event count on a futex. Works between processes in shared memory,
// holds no lock, needs no destructor (so a forked child may forget it). Conditions must be sequentially
// consistent atomics.
class EventCount {
 public:
  // Wakes everybody who waits, to look again. Any thread, any process, never blocks.
  void notify() {
    count_.fetch_add(1);
    if (sleepers_.load() != 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
  }

  // As notify, for a caller that has just changed the condition: one load where nobody sleeps.
  void notify_if_waiting() {
    if (sleepers_.load() != 0) notify();
  }

  // Sleeps until ready() or the deadline; true if ready. Returns early, with what ready() says, on a signal.
  template <typename Ready>
  bool wait(Ready&& ready, Clock::time_point deadline) {
    sleepers_.fetch_add(1);
    bool is_ready = false;
    while (true) {
      const uint32_t count = count_.load();
      is_ready = ready();
      const auto left = deadline - Clock::now();
      if (is_ready || left <= Clock::duration::zero()) break;
      if (!sleep(count, left)) {
        is_ready = ready();
        break;
      }
    }
    sleepers_.fetch_sub(1);
    return is_ready;
  }

 private:
  bool sleep(uint32_t count, Clock::duration left) {
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    const timespec relative{ns / 1'000'000'000, ns % 1'000'000'000};
    return futex(FUTEX_WAIT, count, &relative) == 0 || errno != EINTR;
  }

  long futex(int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), operation, value, timeout, nullptr, 0);
  }

  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

}  // namespace dadt
