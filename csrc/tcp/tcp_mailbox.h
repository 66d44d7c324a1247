#pragma once

#include <memory>
#include <vector>

#include "mail/transit.h"
#include "tcp/link_meter.h"

namespace dadt {

struct TcpMailboxState;

// Messages between two ranks over TCP, beside the operations of all; as Mailbox is over shared memory, which
// says what is promised. A thread of its own, started at the first use, moves what cannot go at once.
//
// In a forked child it is inert: send and receive throw, all else does nothing.
class TcpMailbox {
 public:
  // sockets: the descriptors of connected ones by rank, below 0 at this rank's place. Both ends have proved
  // themselves, and nothing has been read yet. They belong to it from now on.
  TcpMailbox(int rank, std::vector<int> sockets);
  ~TcpMailbox();
  TcpMailbox(const TcpMailbox&) = delete;
  TcpMailbox& operator=(const TcpMailbox&) = delete;

  // See Mailbox.
  std::shared_ptr<Transit> send(const void* data, size_t bytes, int peer, int64_t tag);
  std::shared_ptr<Transit> receive(void* data, size_t bytes, int peer, int64_t tag);
  void abort(const Error& error);

  // See Links.
  std::vector<LinkCounts> counts() const;

  // Ends the thread, once what was sent has gone out, or 5 seconds are over, and fails what is pending here.
  // Idempotent.
  void close();

 private:
  bool inert() const;

  // Constant after construction.
  std::unique_ptr<TcpMailboxState> state_;
};

}  // namespace dadt
