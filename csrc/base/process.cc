#include "base/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace dadt {

uint64_t start_time(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return 0;
  // /proc/PID/stat contains "pid (name) state ...". The name may contain any characters, so parsing starts
  // after the last parenthesis.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  for (int i = 4; i <= 22; ++i) fields >> field;
  return fields ? std::stoull(field) : 0;
}

Watch::Watch(pid_t pid, uint64_t start)
    : pid_(pid), start_(start), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  // The start time is compared after pidfd_open, so that the descriptor certainly refers to this process and
  // not to a later one with the same pid.
  if (start_time(pid) != start) {
    if (fd_ >= 0) ::close(fd_);
    throw Error(Code::kPeerLost, "process " + std::to_string(pid) + " is gone");
  }
}

Watch::~Watch() {
  if (fd_ >= 0) ::close(fd_);
}

Watch::Watch(Watch&& other) noexcept
    : pid_(other.pid_), start_(other.start_), fd_(std::exchange(other.fd_, -1)) {}

bool Watch::alive() const {
  if (fd_ < 0) return start_time(pid_) == start_;
  pollfd ended{fd_, POLLIN, 0};
  return poll(&ended, 1, 0) <= 0;
}

}  // namespace dadt
