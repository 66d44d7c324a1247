#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mail/transit.h"

namespace dadt {

struct MailboxState;

// Messages between two ranks of a host, beside the operations of all. Any thread; many may be under way.
// Those from one rank to another with one tag arrive in the order in which they were sent, and receives are
// served in the order in which they were posted.
//
// A short message goes at once; it waits in the receiver's memory for its receive, so that others pass it by.
// A long one is offered, and goes in chunks when a receive has accepted it. A thread of this mailbox's own,
// started at the first use, moves what cannot go at once, and sleeps while there is nothing to do.
//
// In a forked child it is inert: send and receive throw, all else does nothing.
class Mailbox {
 public:
  static constexpr size_t kPipeBytes = 256 * 1024;

  // pipe_bytes: room for what one rank has sent to another and that one has not looked at yet; the same on
  // all ranks, and a multiple of 64.
  Mailbox(int rank, int world_size, size_t pipe_bytes = kPipeBytes);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // See Executor.
  std::string endpoint() const;
  void connect(const std::vector<std::string>& endpoints, double timeout);

  // The memory is the caller's, and must stay, the sender's unchanged, until the transit is done. A receive's
  // bytes must be as many as are sent, else Error(kMismatch) on both sides; a sender of a short message is
  // done before that. peer may be this rank, and in a receive Transit::kAny. Throws std::invalid_argument,
  // and std::runtime_error unless connected and open.
  std::shared_ptr<Transit> send(const void* data, size_t bytes, int peer, int64_t tag);
  std::shared_ptr<Transit> receive(void* data, size_t bytes, int peer, int64_t tag);

  // Fails everything pending and to come, here and on the peers. Never blocks.
  void abort(const Error& error);

  // Ends the thread, and fails what is pending here. Idempotent.
  void close();

 private:
  bool inert() const;

  // Constant after construction.
  std::unique_ptr<MailboxState> state_;
};

}  // namespace dadt
