#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mail/transit.h"

namespace dadt {

struct MailboxState;

// Messages between two ranks of a host, in addition to operations of all ranks. Usable from any thread; many
// messages may be in transfer. Messages from one rank to another with the same tag arrive in the order in
// which they were sent, and receives are served in the order in which they were posted.
//
// A short message is sent at once. It waits in the receiver's memory for its receive, so that other messages
// can pass it. A long message is offered first, and sent in chunks once a receive has accepted it. A thread
// of this mailbox, started at the first use, moves data that cannot be sent at once, and sleeps while there
// is nothing to do.
//
// In a forked child the mailbox is inert: send and receive throw, and all other methods do nothing.
class Mailbox {
 public:
  static constexpr size_t kPipeBytes = 256 * 1024;

  // pipe_bytes: room for bytes that one rank has sent to another and the other has not read yet. It must be
  // the same on all ranks, and a multiple of 64.
  Mailbox(int rank, int world_size, size_t pipe_bytes = kPipeBytes);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // For these methods see Executor.
  std::string endpoint() const;
  void connect(const std::vector<std::string>& endpoints, double timeout);

  // Send or receive a message. The caller owns the memory, which must exist, and for a send be unchanged,
  // until the transit is done. A receive must expect as many bytes as are sent, otherwise both sides fail
  // with Error(kMismatch), unless the message is so short that the sender is already done. peer: may be this
  // rank, and for a receive Transit::kAny. Throws std::invalid_argument, and std::runtime_error unless the
  // mailbox is connected and open.
  std::shared_ptr<Transit> send(const void* data, size_t bytes, int peer, int64_t tag);
  std::shared_ptr<Transit> receive(void* data, size_t bytes, int peer, int64_t tag);

  // Makes all pending and later messages fail, here and on the peers. Never blocks.
  void abort(const Error& error);

  // Ends the thread, and makes pending messages of this rank fail. Idempotent.
  void close();

 private:
  bool inert() const;

  // Constant after construction.
  std::unique_ptr<MailboxState> state_;
};

}  // namespace dadt
