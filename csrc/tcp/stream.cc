#include "tcp/stream.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "tcp/tcp_info.h"

namespace dadt {
namespace {

constexpr size_t kStripe = 16 * 1024;
// If there are several sockets, most bytes that the kernel stores for each but has not sent yet.
constexpr int kUnsent = 64 * 1024;
constexpr int kMeanwhile = 1 << 20;  // room for bytes that arrive over one socket while another is late
constexpr size_t kMostEarly = 64 << 20;
constexpr size_t kLongTail = 64 * 1024;

// Appends the memory of bytes [begin, begin + count) of the parts to `to`.
void add_slice(const std::vector<iovec>& parts, size_t begin, size_t count, std::vector<iovec>& to) {
  for (const iovec& part : parts) {
    if (count == 0) return;
    if (begin >= part.iov_len) {
      begin -= part.iov_len;
      continue;
    }
    const size_t some = std::min(part.iov_len - begin, count);
    to.push_back({static_cast<uint8_t*>(part.iov_base) + begin, some});
    begin = 0;
    count -= some;
  }
}

size_t bytes_in(const std::vector<iovec>& parts) {
  size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

bool is_later() { return errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

Stream::Stream(int rank, const std::vector<int>& sockets) : rank_(rank) {
  for (int descriptor : sockets) sockets_.push_back({.descriptor = descriptor});
  for (Socket& socket : sockets_) prepare(socket);
}

void Stream::prepare(Socket& socket) const {
  clamp_window();
  if (sockets_.size() == 1) return;
  setsockopt(socket.descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsent, sizeof kUnsent);
  // Makes the kernel reserve room for this many received bytes, which it keeps when SO_RCVLOWAT is lowered
  // later.
  setsockopt(socket.descriptor, SOL_SOCKET, SO_RCVLOWAT, &kMeanwhile, sizeof kMeanwhile);
  socket.low_water = kMeanwhile;
}

void Stream::limit_window(size_t bytes) {
  if (bytes == window_) return;
  window_ = bytes;
  clamp_window();
}

// Bytes that were received but not read do not count for this limit. The kernel drops it where it enlarges
// the socket's buffer, which it may do in each read.
void Stream::clamp_window() const {
  if (window_ == 0) return;
  const int bytes = static_cast<int>(window_);
  setsockopt(sockets_[0].descriptor, IPPROTO_TCP, TCP_WINDOW_CLAMP, &bytes, sizeof bytes);
}

// Sends as many bytes as the kernel accepts at once, and returns their number.
size_t Stream::send_some(Socket& socket, std::vector<iovec>& from) {
  constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
  msghdr message{};
  message.msg_iov = from.data();
  message.msg_iovlen = from.size();
  // A system call with one part costs less, which counts for short messages.
  const ssize_t count = from.size() == 1
                            ? ::send(socket.descriptor, from[0].iov_base, from[0].iov_len, kFlags)
                            : sendmsg(socket.descriptor, &message, kFlags);
  if (count < 0 && !is_later()) has_ended_ = true;
  const size_t taken = count > 0 ? static_cast<size_t>(count) : 0;
  socket.written += taken;
  socket.is_full = taken < bytes_in(from);
  return taken;
}

size_t Stream::receive_some(Socket& socket, std::vector<iovec>& to) {
  msghdr message{};
  message.msg_iov = to.data();
  message.msg_iovlen = to.size();
  ssize_t count = 0;
  do {
    count = to.size() == 1 ? recv(socket.descriptor, to[0].iov_base, to[0].iov_len, MSG_DONTWAIT)
                           : recvmsg(socket.descriptor, &message, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (count == 0) socket.is_closed = true;
  if (count < 0 && !is_later()) has_ended_ = true;
  const size_t came = count > 0 ? static_cast<size_t>(count) : 0;
  socket.read += came;
  return came;
}

size_t Stream::send(const std::vector<iovec>& from) { return resend() ? push(from) : 0; }

// Sends bytes that precede the current operation: those that were not sent yet, and those that the other side
// had not received when the sockets were replaced. Returns whether all are sent.
bool Stream::resend() {
  while (sent_ < settled_) {
    const size_t left = static_cast<size_t>(settled_ - sent_);
    if (push({{tail_.data() + (tail_.size() - left), left}}) == 0) return false;
  }
  return true;
}

size_t Stream::push(const std::vector<iovec>& from) {
  if (has_ended_) return 0;
  if (sockets_.size() == 1) {
    parts_ = from;
    const size_t count = send_some(sockets_[0], parts_);
    sent_ += count;
    return count;
  }
  for (Socket& socket : sockets_) flush(socket);
  const size_t total = bytes_in(from);
  size_t done = 0;
  for (size_t tried = 0; tried < sockets_.size() && done < total;) {
    Socket& socket = sockets_[turn_];
    turn_ = (turn_ + 1) % sockets_.size();
    ++tried;
    if (!socket.left.empty()) continue;
    StripeHead head{sent_, std::min(kStripe, total - done)};
    parts_.assign(1, {&head, sizeof head});
    add_slice(from, done, head.bytes, parts_);
    const size_t count = send_some(socket, parts_);
    if (count == 0) continue;
    if (socket.is_full) {
      for (const iovec& part : parts_) socket.left.append(static_cast<char*>(part.iov_base), part.iov_len);
      socket.left.erase(0, count);
    }
    tried = 0;
    socket.sent += sizeof head + head.bytes;
    socket.stripes.push_back({socket.sent, sent_});
    done += head.bytes;
    sent_ += head.bytes;
  }
  return done;
}

bool Stream::flush() {
  bool is_flushed = resend();
  for (Socket& socket : sockets_) is_flushed = flush(socket) && is_flushed;
  return is_flushed;
}

bool Stream::flush(Socket& socket) {
  if (socket.left.empty()) return true;
  if (has_ended_) return false;
  parts_.assign(1, {socket.left.data(), socket.left.size()});
  socket.left.erase(0, send_some(socket, parts_));
  return socket.left.empty();
}

size_t Stream::unacknowledged() { return std::min(sent(), static_cast<size_t>(sent_ - acknowledged())); }

// Returns a position before which the other side's kernel has acknowledged all bytes.
uint64_t Stream::acknowledged() {
  uint64_t position = sent_;
  for (Socket& socket : sockets_) {
    int queued = 0;  // bytes that the other side's kernel has not acknowledged
    if (ioctl(socket.descriptor, SIOCOUTQ, &queued) != 0) return 0;
    if (sockets_.size() == 1) return sent_ - std::min(sent_, static_cast<uint64_t>(queued));
    const uint64_t acknowledged = socket.sent - std::min(socket.sent, queued + socket.left.size());
    while (!socket.stripes.empty() && socket.stripes.front().end <= acknowledged) socket.stripes.pop_front();
    if (!socket.stripes.empty()) position = std::min(position, socket.stripes.front().position);
  }
  return position;
}

void Stream::settle(std::string tail) {
  tail_ = std::move(tail);
  settled_ = sent_;
}

void Stream::append(const void* data, size_t bytes) {
  // Erasing moves the bytes that stay, so it waits until at least as many bytes can be erased.
  if (tail_.size() >= kLongTail && !has_ended_) {
    const size_t kept = static_cast<size_t>(settled_ - acknowledged());
    if (kept <= tail_.size() / 2) tail_.erase(0, tail_.size() - kept);
  }
  tail_.append(static_cast<const char*>(data), bytes);
  settled_ += bytes;
}

uint64_t Stream::detach() {
  if (is_detached_) return received_;
  is_detached_ = true;
  // After the shutdown the kernel acknowledges nothing more, so bytes that are not read here remain stored on
  // the other side.
  for (const Socket& socket : sockets_) shutdown(socket.descriptor, SHUT_RDWR);
  early_.erase(0, early_at_);
  early_at_ = 0;
  std::string some(256 * 1024, '\0');
  while (early_.size() < kMostEarly) {
    const size_t count = take({{some.data(), some.size()}});
    if (count == 0) break;
    early_.append(some, 0, count);
  }
  has_ended_ = true;
  return received_;
}

void Stream::attach(uint64_t position) {
  for (Socket& socket : sockets_) {
    socket = {.descriptor = socket.descriptor};
    prepare(socket);
  }
  sent_ = position;
  has_ended_ = is_detached_ = false;
}

std::vector<UsedSocket> Stream::release() {
  has_ended_ = true;
  std::vector<UsedSocket> used;
  for (const Socket& socket : sockets_) used.push_back({socket.descriptor, socket.written, socket.read});
  return used;
}

size_t Stream::receive(const std::vector<iovec>& to) {
  if (early_at_ < early_.size()) return take_early(to);
  return has_ended_ ? 0 : take(to);
}

size_t Stream::take_early(const std::vector<iovec>& to) {
  const size_t before = early_at_;
  for (const iovec& part : to) {
    const size_t some = std::min(part.iov_len, early_.size() - early_at_);
    std::memcpy(part.iov_base, early_.data() + early_at_, some);
    early_at_ += some;
  }
  const size_t count = early_at_ - before;
  if (early_at_ == early_.size()) {
    early_ = {};
    early_at_ = 0;
  }
  return count;
}

size_t Stream::take(const std::vector<iovec>& to) {
  if (sockets_.size() == 1) {
    parts_ = to;
    const size_t count = receive_some(sockets_[0], parts_);
    if (count > 0) clamp_window();
    has_ended_ = has_ended_ || sockets_[0].is_closed;
    received_ += count;
    return count;
  }
  const size_t total = bytes_in(to);
  size_t done = 0;
  while (done < total) {
    Socket* socket = next();
    if (socket == nullptr) break;
    const size_t left = socket->head.bytes - socket->got;
    StripeHead following{};
    parts_.clear();
    add_slice(to, done, left, parts_);
    if (total - done >= left) parts_.push_back({&following, sizeof following});
    const size_t came = receive_some(*socket, parts_);
    if (came == 0) {
      has_ended_ = has_ended_ || socket->is_closed;
      break;
    }
    const size_t some = std::min(came, left);
    done += some;
    received_ += some;
    socket->got += some;
    if (some < left) continue;
    socket->head = following;
    socket->head_bytes = came - some;
    socket->got = 0;
  }
  return done;
}

// Returns the socket with the next stripe of the stream, if the header of this stripe has been read;
// otherwise null.
Stream::Socket* Stream::found() {
  for (Socket& socket : sockets_) {
    if (!socket.has_head()) continue;
    const uint64_t at = socket.head.position + socket.got;
    if (at < received_ || socket.head.bytes == 0 || socket.head.bytes > kStripe) {
      throw Error(Code::kComm, "rank " + std::to_string(rank_) + " sent what is no stream of DADT's");
    }
    if (at == received_) return &socket;
  }
  return nullptr;
}

// Reads headers that have arrived, and returns the socket with the next stripe of the stream; null if its
// header has not arrived.
Stream::Socket* Stream::next() {
  if (Socket* socket = found()) return socket;
  bool may_come = false;
  for (Socket& socket : sockets_) {
    if (socket.has_head() || socket.is_closed) continue;
    parts_.assign(1, {reinterpret_cast<uint8_t*>(&socket.head) + socket.head_bytes,
                      sizeof socket.head - socket.head_bytes});
    socket.head_bytes += receive_some(socket, parts_);
    may_come = may_come || (!socket.has_head() && !socket.is_closed);
  }
  Socket* socket = found();
  if (socket == nullptr && !may_come) has_ended_ = true;
  return socket;
}

Traffic Stream::traffic() const {
  Traffic traffic;
  for (const Socket& socket : sockets_) {
    const TcpInfo info = tcp_info_of(socket.descriptor);
    traffic.sent += info.bytes_acked;
    traffic.received += info.bytes_received;
  }
  return traffic;
}

double Stream::shortest_round_trip() const {
  return sockets_.empty() ? 0 : 1e-6 * tcp_info_of(sockets_[0].descriptor).min_rtt;
}

size_t Stream::segment_bytes() const {
  return sockets_.empty() ? 0 : tcp_info_of(sockets_[0].descriptor).advmss;
}

bool Stream::add_to(std::vector<pollfd>& polled, short events) {
  const bool reads = (events & POLLIN) != 0;
  if (reads && early_at_ < early_.size()) return true;
  if (has_ended_) return false;
  const Socket* coming = reads && sockets_.size() > 1 ? found() : nullptr;
  for (Socket& socket : sockets_) {
    const bool awaits_head = coming == nullptr && !socket.is_closed && !socket.has_head();
    short wanted = 0;
    if (reads && (sockets_.size() == 1 || &socket == coming || awaits_head)) wanted = POLLIN;
    if ((events & POLLOUT) != 0 && socket.is_full) wanted = static_cast<short>(wanted | POLLOUT);
    if (wanted == 0) continue;
    polled.push_back({socket.descriptor, wanted, 0});
    if ((wanted & POLLIN) == 0) continue;
    size_t bytes = wake_at_;
    if (sockets_.size() > 1) bytes = awaits_head ? 1 : std::min(bytes, socket.head.bytes - socket.got);
    const int low_water = static_cast<int>(bytes);
    if (socket.low_water == low_water) continue;
    socket.low_water = low_water;
    setsockopt(socket.descriptor, SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof low_water);
  }
  return false;
}

}  // namespace dadt
