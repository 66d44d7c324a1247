#include "negotiation/link.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace dadt {

namespace {
constexpr uint32_t kLargest = 1u << 30;
}

Link::Link(int fd, int peer) : fd_(fd), peer_(peer) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

Link::~Link() { close(); }

void Link::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Link::send(const std::string& message) {
  if (!open() || finishing_) return;
  out_ += message;
  flush();
}

void Link::flush() {
  while (wants_to_write()) {
    const ssize_t count = ::send(fd_, out_.data() + written_, out_.size() - written_, MSG_NOSIGNAL);
    if (count >= 0) {
      written_ += count;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      break;  // the peer is gone, but what it sent before can still be read
    }
  }
  out_.clear();
  written_ = 0;
  if (open() && finishing_) shutdown(fd_, SHUT_WR);
}

void Link::finish() {
  finishing_ = true;
  flush();
}

bool Link::receive() {
  char buffer[64 * 1024];
  while (open()) {
    const ssize_t count = recv(fd_, buffer, sizeof buffer, 0);
    if (count > 0) {
      in_.append(buffer, count);
      if (count < static_cast<ssize_t>(sizeof buffer)) return true;
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return true;
    } else if (count == 0 || errno != EINTR) {
      return false;
    }
  }
  return false;
}

std::optional<Link::Message> Link::next() {
  uint32_t length;
  const size_t left = in_.size() - parsed_;
  if (left >= sizeof length) {
    std::memcpy(&length, in_.data() + parsed_, sizeof length);
    if (length == 0 || length > kLargest)
      throw Error(Code::kComm, "rank " + std::to_string(peer_) + " sent what is no message of DADT's");
    if (left >= sizeof length + length) {
      const char* start = in_.data() + parsed_ + sizeof length;
      parsed_ += sizeof length + length;
      return Message{static_cast<MessageType>(*start), std::string(start + 1, length - 1)};
    }
  }
  in_.erase(0, parsed_);
  parsed_ = 0;
  return std::nullopt;
}

}  // namespace dadt
