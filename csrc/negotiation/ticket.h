#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>

#include "base/event_count.h"
#include "engine/work.h"

namespace dadt {

// Wakes the negotiation's thread, which sleeps in poll.
class Alarm {
 public:
  Alarm();
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  int fd() const { return fd_; }
  // Wakes the thread. May be called from any thread; does not block.
  void notify();
  // Clears the alarm. Called by the negotiation's thread before it checks what has changed.
  void reset();

  // Number of undecided tickets for which a thread waits.
  std::atomic<int> waiters{0};

 private:
  const int fd_;
  std::atomic<bool> rung_{false};
};

// Handle to a named tensor, usable from any thread. It holds no lock, so that a forked child can destroy it.
class Ticket {
 public:
  Ticket(std::string name, std::shared_ptr<Alarm> alarm);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  const std::string& name() const { return name_; }
  Clock::time_point submitted() const { return submitted_; }
  bool done() const;
  // Returns whether the ranks have agreed that the tensor's operation runs, or that it fails.
  bool decided() const { return end_.load() != nullptr; }

  // Blocks until the tensor is done or the deadline passes. Returns whether it is done. A signal may make it
  // return false early.
  bool wait(Clock::time_point deadline);

  // Records that a thread waits for this tensor. Once threads wait on all ranks, complete tensors run at once
  // instead of waiting for others to be fused with.
  void tell_that_it_is_waited_for();

  // Returns the result; call it only once the tensor is done. Does not throw the error that the result may
  // contain. The result of a fused operation is common to all its tensors.
  const Result& result() const;
  // Returns the operation that runs for the tensor, once decided; null before that, and for a ticket that
  // failed or is a join.
  std::shared_ptr<Work> work() const;
  // Returns the rank that joined last, once a join is done.
  int last_joined() const;

  // Decide the ticket: by the operation that runs, an error, or the rank that joined last. The first call
  // wakes the waiting threads and returns true; later calls change nothing and return false.
  bool run(std::shared_ptr<Work> work);
  bool fail(const Error& error);
  bool join(int last);

 private:
  struct End {
    std::shared_ptr<Work> work{};
    Result result{};  // result of a ticket without an operation
    int last_joined = -1;
  };

  bool finish(std::unique_ptr<const End> end);
  const End& end() const;

  // The following fields are constant after construction.
  const std::string name_;
  const std::shared_ptr<Alarm> alarm_;
  const pid_t pid_;
  const Clock::time_point submitted_ = Clock::now();

  // Any thread may use the following fields.
  std::atomic<const End*> end_{nullptr};
  std::atomic<int> counted_{0};  // bit kWaitedFor: a thread waits; bit kDecided: the tensor is decided
  EventCount event_;
};

}  // namespace dadt
