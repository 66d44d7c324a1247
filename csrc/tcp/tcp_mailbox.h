#pragma once

#include <memory>
#include <vector>

#include "mail/transit.h"
#include "tcp/links.h"

namespace dadt {

struct TcpMailboxState;

// Point-to-point messages between ranks over TCP, beside operations of all ranks. It has the same semantics
// as Mailbox, which uses shared memory. A thread, started at the first use, moves data that cannot be sent at
// once. Connections that break are replaced as those of operations are, and messages continue where they
// were.
//
// In a forked child the mailbox is inert: send and receive throw, and all other methods do nothing.
class TcpMailbox {
 public:
  explicit TcpMailbox(std::shared_ptr<Links> links);
  ~TcpMailbox();
  TcpMailbox(const TcpMailbox&) = delete;
  TcpMailbox& operator=(const TcpMailbox&) = delete;

  // For these methods see Mailbox.
  std::shared_ptr<Transit> send(const void* data, size_t bytes, int peer, int64_t tag);
  std::shared_ptr<Transit> receive(void* data, size_t bytes, int peer, int64_t tag);
  void abort(const Error& error);

  // Returns the kernel's counts of the connections, as Links::counts does.
  std::vector<LinkCounts> counts() const;

  // Ends the thread once all messages are sent, at the latest after 5 seconds, and makes pending messages of
  // this rank fail. Idempotent.
  void close();

 private:
  bool inert() const;

  // The following field is constant after construction.
  std::unique_ptr<TcpMailboxState> state_;
};

}  // namespace dadt
