#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace dadt {

// When a process started, in clock ticks since boot; 0 if it is gone or a zombie. With the pid it names a
// process for good: pids are used again.
uint64_t start_time(pid_t pid);

// Tells whether another process lives. Holds a pidfd where the kernel has them.
class Watch {
 public:
  // Throws Error(kPeerLost) if that process is gone already.
  Watch(pid_t pid, uint64_t start);
  ~Watch();
  Watch(Watch&& other) noexcept;
  Watch& operator=(Watch&&) = delete;

  pid_t pid() const { return pid_; }
  bool alive() const;

 private:
  // Constant after construction.
  pid_t pid_;
  uint64_t start_;
  int fd_;  // -1: ask /proc instead
};

}  // namespace dadt
