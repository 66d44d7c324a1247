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

// A message in transfer, as its sender or its receiver sees it. Usable from any thread. It holds no lock, so
// that a forked child can destroy it.
class Transit {
 public:
  enum Side { kSend, kReceive };
  static constexpr int kAny = -1;

  Transit(Side which, uint8_t* memory, size_t length, int other, int64_t label)
      : side(which), data(memory), bytes(length), peer(other), tag(label), pid_(getpid()) {}

  // Returns a name for messages to users, such as `a receive with tag 3`.
  std::string title() const;
  // Returns the error text for a message that was not done within `seconds` seconds.
  std::string late(double seconds) const;

  bool done() const { return done_.load(); }
  // Blocks until the message is done or the deadline passes. Returns whether it is done. A signal may make it
  // return false early.
  bool wait(Clock::time_point deadline);
  // Returns the error, if any; call it only once the message is done.
  const std::optional<Error>& error() const { return error_; }
  int source() const { return source_; }  // the rank that sent a received message

  // Ends the transfer; finish or fail must be called exactly once.
  void finish(int from) {
    source_ = from;
    settle();
  }
  void fail(Error error) {
    error_ = std::move(error);
    settle();
  }

  // The following fields are constant after construction.
  const Side side;
  uint8_t* const data;  // memory of the message; only read for a send
  const size_t bytes;
  const int peer;  // rank of the other side; kAny for a receive from any rank
  const int64_t tag;

 private:
  static constexpr int kSpins = 500;

  void settle() {
    done_.store(true);
    event_.notify();
  }

  const pid_t pid_;

  // The following fields are constant once the message is done.
  std::optional<Error> error_;
  int source_ = kAny;

  // Any thread may use the following fields.
  std::atomic<bool> done_{false};
  EventCount event_;
};

}  // namespace dadt
