#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>

#include "base/event_count.h"
#include "engine/work.h"

namespace dadt {

// Wakes the negotiation's thread out of poll.
class Alarm {
 public:
  Alarm();
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  int fd() const { return fd_; }
  // Any thread; does not block.
  void notify();
  // The thread, before it looks at what has changed.
  void reset();

  // Undecided tickets that somebody waits for.
  std::atomic<int> waiters{0};

 private:
  const int fd_;
  std::atomic<bool> rung_{false};
};

// Handle to a named tensor. Any thread. It holds no lock, so that a forked child can destroy it.
class Ticket {
 public:
  Ticket(std::string name, std::shared_ptr<Alarm> alarm);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  const std::string& name() const { return name_; }
  Clock::time_point submitted() const { return submitted_; }
  bool done() const;
  // Whether the ranks have agreed that it runs, or that it fails.
  bool decided() const { return end_.load() != nullptr; }

  // Blocks until done or the deadline; true if done. May return early, false, on a signal.
  bool wait(Clock::time_point deadline);

  // As whoever waits: once all ranks wait, what is ready runs without waiting for company.
  void tell_that_it_is_waited_for();

  // After done. Does not throw the error that it may hold. Of a fused operation: what all its tensors have in
  // common.
  const Result& result() const;
  // After decided; null if it was not to run.
  std::shared_ptr<Work> work() const;
  // After a join is done: the rank that joined last.
  int last_joined() const;

  // The first call decides and wakes the waiters; later ones change nothing and return false.
  bool run(std::shared_ptr<Work> work);
  bool fail(const Error& error);
  bool join(int last);

 private:
  struct End {
    std::shared_ptr<Work> work{};
    Result result{};  // without a work
    int last_joined = -1;
  };

  bool finish(std::unique_ptr<const End> end);
  const End& end() const;

  // Constant after construction.
  const std::string name_;
  const std::shared_ptr<Alarm> alarm_;
  const pid_t pid_;
  const Clock::time_point submitted_ = Clock::now();

  // Any thread.
  std::atomic<const End*> end_{nullptr};
  std::atomic<int> counted_{0};  // bits: somebody waits; decided
  EventCount event_;
};

}  // namespace dadt
