#include "negotiation/link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

namespace dadt {

namespace {

constexpr uint32_t kLargest = 1u << 30;

// What precedes the type and the body of a message.
struct FrameHead {
  uint32_t length;  // bytes of type and body
  uint32_t number;  // how many messages were sent before this one
};

}  // namespace

Link::Link(int fd, int peer, double silence) : fd_(fd), peer_(peer), silence_(silence), stream_(peer, {fd}) {
  prepare();
}

Link::~Link() { close(); }

void Link::prepare() const {
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK);
  if (!lasts()) return;
  // The other side always reads at once, so bytes that are not acknowledged are a fault of the network.
  const auto milliseconds = static_cast<unsigned>(1e3 * silence_);
  setsockopt(fd_, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

void Link::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool Link::add_to(std::vector<pollfd>& polled) { return open() && stream_.add_to(polled, POLLIN | POLLOUT); }

void Link::send(const std::string& message) {
  if (!open() || finishing_) return;
  FrameHead head{0, sent_++};
  std::memcpy(&head.length, message.data(), sizeof head.length);
  stream_.append(&head, sizeof head);
  stream_.append(message.data() + sizeof head.length, head.length);
  is_flushed_ = false;
  flush();
}

void Link::flush() {
  if (!open() || is_flushed_) return;
  is_flushed_ = stream_.flush();
  if (is_flushed_ && finishing_) shutdown(fd_, SHUT_WR);
}

void Link::finish() {
  finishing_ = true;
  is_flushed_ = false;
  flush();
}

bool Link::receive() {
  char buffer[64 * 1024];
  const bool was_detached = is_detached();
  while (open()) {
    const size_t count = stream_.receive({{buffer, sizeof buffer}});
    in_.append(buffer, count);
    if (count == sizeof buffer) continue;
    if (!stream_.has_ended()) return true;
    if (is_detached()) return was_detached;
    has_ended_ = true;
    stream_.detach();  // after an error in sending, what has come before can still be read
  }
  return false;
}

std::optional<Link::Message> Link::next() {
  FrameHead head;
  const size_t left = in_.size() - parsed_;
  if (left >= sizeof head) {
    std::memcpy(&head, in_.data() + parsed_, sizeof head);
    if (head.length == 0 || head.length > kLargest || head.number != received_)
      throw Error(Code::kComm, "rank " + std::to_string(peer_) + " sent what is no message of DADT's");
    if (left >= sizeof head + head.length) {
      const char* start = in_.data() + parsed_ + sizeof head;
      parsed_ += sizeof head + head.length;
      ++received_;
      return Message{static_cast<MessageType>(*start), std::string(start + 1, head.length - 1)};
    }
  }
  in_.erase(0, parsed_);
  parsed_ = 0;
  return std::nullopt;
}

bool Link::attach(int fd, uint64_t received) {
  if (!is_detached() || !stream_.can_resume(received)) return false;
  dup3(fd, fd_, O_CLOEXEC);
  prepare();
  stream_.attach(received);
  has_ended_ = is_flushed_ = false;
  flush();
  return true;
}

}  // namespace dadt
