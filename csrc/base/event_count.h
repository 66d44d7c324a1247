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

// Converts seconds to a duration of at most a year, since larger values would overflow the clock.
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

// An event count on a futex, with which threads sleep until a condition becomes true. It works between
// processes in shared memory, holds no lock and needs no destructor, so a forked child may ignore it.
// Conditions must be sequentially consistent atomics.
class EventCount {
 public:
  // Wakes all waiting threads, so that they check their conditions again. May be called from any thread and
  // process; never blocks.
  void notify() {
    count_.fetch_add(1);
    if (sleepers_.load() != 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
  }

  // Like notify, for a caller that has just changed the condition. Costs one load if no thread sleeps.
  void notify_if_waiting() {
    if (sleepers_.load() != 0) notify();
  }

  // Sleeps until ready() returns true or the deadline passes. Returns whether ready() was true. A signal ends
  // the sleep early, with the current result of ready().
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
