#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace dadt {

// Returns when a process started, in clock ticks since boot; 0 if it has ended or is a zombie. The pid and
// this time together identify a process permanently, since pids are reused.
uint64_t start_time(pid_t pid);

// Reports whether another process is alive. Uses a pidfd if the kernel supports pidfds.
class Watch {
 public:
  // Throws Error(kPeerLost) if the process has already ended.
  Watch(pid_t pid, uint64_t start);
  ~Watch();
  Watch(Watch&& other) noexcept;
  Watch& operator=(Watch&&) = delete;

  pid_t pid() const { return pid_; }
  bool alive() const;

 private:
  // The following fields are constant after construction.
  pid_t pid_;
  uint64_t start_;
  int fd_;  // pidfd of the process; -1 if the kernel has no pidfds, so that /proc is read instead
};

}  // namespace dadt
