#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mail/transit.h"

namespace dadt {

struct MailboxState;

// Point-to-point messages between the ranks of a host, which take place beside operations of all ranks. Any
// thread may use it, and many messages may be in transfer at once. Messages from one rank to another with the
// same tag arrive in the order in which they were sent, and receives are served in the order in which they
// were posted.
//
// A short message is sent at once. If no receive is posted for it, it waits in the receiver's memory, so that
// later messages can pass it. A long message is offered first, and sent in chunks once a receive has accepted
// it. A thread of this mailbox, started at the first use, moves data that cannot be sent at once, and sleeps
// while there is nothing to do.
//
// In a forked child the mailbox is inert: send and receive throw, and all other methods do nothing.
class Mailbox {
 public:
  static constexpr size_t kPipeBytes = 256 * 1024;

  // pipe_bytes: size of the ring of bytes from one rank to another, which contains what the receiver has not
  // read yet. It must be the same on all ranks, and a multiple of 64.
  Mailbox(int rank, int world_size, size_t pipe_bytes = kPipeBytes);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // For these methods see Executor.
  std::string endpoint() const;
  void connect(const std::vector<std::string>& endpoints, double timeout);

  // Send or receive a message. The caller owns the memory, which must exist, and for a send be unchanged,
  // until the transit is done. A receive must expect as many bytes as are sent, otherwise it fails with
  // Error(kMismatch), and so does the send of a long message. peer: may be this rank, and for a receive
  // Transit::kAny. Throws std::invalid_argument for an invalid peer, and std::runtime_error unless the
  // mailbox is connected and open.
  std::shared_ptr<Transit> send(const void* data, size_t bytes, int peer, int64_t tag);
  std::shared_ptr<Transit> receive(void* data, size_t bytes, int peer, int64_t tag);

  // Makes all pending and later messages fail, here and on the peers. Never blocks.
  void abort(const Error& error);

  // Ends the thread, and makes pending messages of this rank fail. Idempotent.
  void close();

 private:
  bool inert() const;

  // The following field is constant after construction.
  std::unique_ptr<MailboxState> state_;
};

}  // namespace dadt
