#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "negotiation/message.h"

namespace dadt {

// Messages over a connected stream socket. Never blocks; one thread.
class Link {
 public:
  // Takes the descriptor over.
  Link(int fd, int peer);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int fd() const { return fd_; }  // -1 once closed
  int peer() const { return peer_; }
  bool open() const { return fd_ >= 0; }
  bool wants_to_write() const { return open() && written_ < out_.size(); }

  // Sends as much as goes now; the rest with flush. A peer that is gone is noticed by receive.
  void send(const std::string& message);
  void flush();
  // No more will be sent, once all is written.
  void finish();

  // Reads what has come. False at the end of the stream, or when it is broken.
  bool receive();
  // The next complete message of what was read.
  struct Message {
    MessageType type;
    std::string body;
  };
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
