#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/error.h"
#include "base/event_count.h"

namespace dadt {

// A message under way, as its sender or its receiver sees it. Any thread. It holds no lock, so that a forked
// child can destroy it.
class Transit {
 public:
  enum Side { kSend, kReceive };
  static constexpr int kAny = -1;

  Transit(Side which, uint8_t* memory, size_t length, int other, int64_t label)
      : side(which), data(memory), bytes(length), peer(other), tag(label), pid_(getpid()) {}

  // As in `a receive with tag 3`.
  std::string title() const;
  // The error for a message that took more than so many seconds.
  std::string late(double seconds) const;

  bool done() const { return done_.load(); }
  // Blocks until done or the deadline; true if done. May return early, false, on a signal.
  bool wait(Clock::time_point deadline);
  // After done.
  const std::optional<Error>& error() const { return error_; }
  int source() const { return source_; }  // of a receive: the rank that has sent it

  // Once.
  void finish(int from) {
    source_ = from;
    settle();
  }
  void fail(Error error) {
    error_ = std::move(error);
    settle();
  }

  // Constant after construction.
  const Side side;
  uint8_t* const data;  // a sender's is only read
  const size_t bytes;
  const int peer;  // a receiver's may be kAny
  const int64_t tag;

 private:
  static constexpr int kSpins = 500;

  void settle() {
    done_.store(true);
    event_.notify();
  }

  const pid_t pid_;

  // Constant after done.
  std::optional<Error> error_;
  int source_ = kAny;

  // Any thread.
  std::atomic<bool> done_{false};
  EventCount event_;
};

}  // namespace dadt
