#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "negotiation/message.h"

namespace dadt {

// Sends and receives messages over a connected stream socket. Its methods never block, and only one thread
// may call them.
class Link {
 public:
  // Takes ownership of the socket's descriptor.
  Link(int fd, int peer);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int fd() const { return fd_; }  // descriptor of the socket; -1 once closed
  int peer() const { return peer_; }
  bool open() const { return fd_ >= 0; }
  bool wants_to_write() const { return open() && written_ < out_.size(); }

  // Sends as much as is possible now; `flush` sends the rest. Only `receive` reports that the connection has
  // ended.
  void send(const std::string& message);
  void flush();
  // Shuts down the sending side of the socket once everything is written.
  void finish();

  // Reads all bytes that have arrived. Returns false at the end of the stream, or if it is broken.
  bool receive();
  struct Message {
    MessageType type;
    std::string body;
  };
  // Returns the next complete message among the bytes read.
  std::optional<Message> next();

  void close();

 private:
  int fd_;
  const int peer_;
  std::string out_;
  size_t written_ = 0;
  bool finishing_ = false;
  std::string in_;
  size_t parsed_ = 0;
};

}  // namespace dadt
