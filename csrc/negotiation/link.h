#pragma once

#include <poll.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "negotiation/message.h"
#include "tcp/stream.h"

namespace dadt {

// Sends and receives messages over a connected stream socket, which can be replaced when it breaks. Each
// message is numbered. Methods never block. Only one thread may call them at a time.
class Link {
 public:
  // Takes ownership of the socket's descriptor. silence: seconds without an acknowledgement after which the
  // connection counts as broken; 0 for a socket that is not replaced.
  Link(int fd, int peer, double silence = 0);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  bool open() const { return fd_ >= 0; }
  // Whether the connection is replaced if it breaks.
  bool lasts() const { return silence_ > 0; }
  // Adds the sockets on which poll(2) must wait. Returns whether bytes can be read without waiting.
  bool add_to(std::vector<pollfd>& polled);

  // Sends as much as is possible now; `flush` sends the rest. Only `receive` reports that the connection has
  // ended.
  void send(const std::string& message);
  void flush();
  // Shuts down the sending side of the socket once everything is written.
  void finish();

  // Reads all bytes that have arrived. Returns false once the connection has ended, and was not detached.
  bool receive();
  struct Message {
    MessageType type;
    std::string body;
  };
  // Returns the next complete message among the bytes read. Throws Error if they are no valid messages.
  std::optional<Message> next();

  void close();

  // For these methods see Stream.
  uint64_t detach() { return stream_.detach(); }
  bool is_detached() const { return open() && stream_.is_detached(); }
  // Returns whether the other side, or the network, has ended the connection.
  bool has_ended() const { return has_ended_; }
  // Continues over a new socket, whose descriptor the caller keeps. received: number of bytes that the other
  // side has received. Returns false if there is nothing to replace, or if some later bytes are not stored.
  bool attach(int fd, uint64_t received);

 private:
  void prepare() const;

  int fd_;
  const int peer_;
  const double silence_;
  Stream stream_;
  uint32_t sent_ = 0, received_ = 0;  // number of messages
  bool is_flushed_ = true;
  bool has_ended_ = false;
  bool finishing_ = false;
  std::string in_;
  size_t parsed_ = 0;
};

}  // namespace dadt
