#include "tcp/links.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <system_error>

#include "engine/executor.h"
#include "tcp/address.h"

namespace dadt {
namespace {

constexpr uint32_t kBye = ~uint32_t{0};
constexpr uint32_t kLongestNotice = 2048;

// The head of a notice, before its text.
struct NoticeHead {
  uint32_t code;  // kBye, or a Code
  uint32_t bytes;
};

}  // namespace

Links::Links(int rank, std::vector<int> data, std::vector<int> notices)
    : rank_(rank),
      data_(std::move(data)),
      notices_(std::move(notices)),
      addresses_(data_.size()),
      pid_(getpid()),
      heard_(data_.size()),
      low_water_(data_.size(), 1) {
  bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (bell_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank_) continue;
    addresses_[peer] = address_of(data_[peer]);
    for (int socket : {data_[peer], notices_[peer]}) {
      fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    }
  }
}

Links::~Links() {
  if (inert()) return;
  close();
  for (const auto& sockets : {data_, notices_}) {
    for (int socket : sockets) {
      if (socket >= 0) ::close(socket);
    }
  }
  ::close(bell_);
}

bool Links::inert() const { return getpid() != pid_; }

// A notice is so short, and so alone on its connection, that it always fits into the socket's memory.
void Links::send_notices(uint32_t code, const std::string& text) {
  NoticeHead head{code, static_cast<uint32_t>(std::min<size_t>(text.size(), kLongestNotice))};
  std::string notice(reinterpret_cast<const char*>(&head), sizeof head);
  notice.append(text, 0, head.bytes);
  for (int socket : notices_) {
    if (socket >= 0) (void)!::send(socket, notice.data(), notice.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

void Links::abort(const Error& error) {
  if (inert()) return;
  {
    const std::lock_guard lock(mutex_);
    if (told_) return;
    told_ = true;
    error_ = error;
    is_aborted_ = true;
    send_notices(static_cast<uint32_t>(error.code()), error.what());
  }
  const uint64_t one = 1;
  (void)!write(bell_, &one, sizeof one);
}

void Links::close() {
  if (inert()) return;
  const std::lock_guard lock(mutex_);
  if (!told_) send_notices(kBye, {});
  told_ = true;
  for (const auto& sockets : {data_, notices_}) {
    for (int socket : sockets) {
      if (socket >= 0) shutdown(socket, SHUT_WR);
    }
  }
}

void Links::wake_at(int rank, int bytes) {
  if (low_water_[rank] == bytes) return;
  low_water_[rank] = bytes;
  setsockopt(data_[rank], SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

void Links::check_aborted() {
  if (is_aborted_) {
    const std::lock_guard lock(mutex_);
    throw *error_;
  }
  std::vector<Interest> none;
  wait(none, Clock::time_point::min());
}

// Reads what a peer says of its end. Throws its reason to give up.
void Links::read_notice(int rank) {
  Notice& notice = heard_[rank];
  char bytes[sizeof(NoticeHead) + kLongestNotice];
  while (!notice.ended) {
    const ssize_t count = recv(notices_[rank], bytes, sizeof bytes, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) {
      notice.ended = true;
      return;
    }
    notice.text.append(bytes, static_cast<size_t>(count));
    NoticeHead head;
    if (notice.text.size() < sizeof head) continue;
    std::memcpy(&head, notice.text.data(), sizeof head);
    const bool sound =
        head.bytes <= kLongestNotice && (head.code == kBye ? head.bytes == 0 : head.code < kCodes);
    const std::string who = "rank " + std::to_string(rank);
    if (!sound || notice.text.size() > sizeof head + head.bytes) {
      notice.ended = true;
      throw Error(Code::kComm, who + " sent what is no notice of DADT's");
    }
    if (notice.text.size() < sizeof head + head.bytes) continue;
    notice.ended = true;
    notice.closed = head.code == kBye;
    if (notice.closed) return;
    const Code code = static_cast<Code>(head.code);
    const std::string reason = notice.text.substr(sizeof head);
    // All ranks find the same difference, and say so in the same words.
    throw Error(code, code == Code::kMismatch ? reason : who + " gave up: " + reason);
  }
}

void Links::wait(std::vector<Interest>& interests, Clock::time_point deadline) {
  std::vector<pollfd> polled;
  polled.reserve(interests.size() + data_.size() + 1);
  for (const Interest& each : interests) polled.push_back({data_[each.rank], each.events, 0});
  polled.push_back({bell_, POLLIN, 0});
  std::vector<int> peers;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_ || heard_[rank].ended) continue;
    peers.push_back(rank);
    polled.push_back({notices_[rank], POLLIN, 0});
  }
  int left = 0;
  if (deadline != Clock::time_point::min()) {
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    left = static_cast<int>(std::clamp<int64_t>(rest, 0, 3'600'000));
  }
  const int found = poll(polled.data(), polled.size(), left);
  for (size_t i = 0; i < interests.size(); ++i) interests[i].found = found > 0 ? polled[i].revents : short{0};
  if (found <= 0) return;
  if (is_aborted_) {
    const std::lock_guard lock(mutex_);
    throw *error_;
  }
  for (size_t i = 0; i < peers.size(); ++i) {
    if (polled[interests.size() + 1 + i].revents != 0) read_notice(peers[i]);
  }
}

size_t Links::send(int rank, const std::vector<iovec>& from, const std::string& title) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(from.data());
  message.msg_iovlen = from.size();
  return moved(sendmsg(data_[rank], &message, MSG_NOSIGNAL | MSG_DONTWAIT), rank, title);
}

size_t Links::receive(int rank, const std::vector<iovec>& to, const std::string& title) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(to.data());
  message.msg_iovlen = to.size();
  return moved(recvmsg(data_[rank], &message, MSG_DONTWAIT), rank, title);
}

// What a call of the kernel has moved; of one that should have moved something none means the end.
size_t Links::moved(ssize_t count, int rank, const std::string& title) {
  if (count > 0) return static_cast<size_t>(count);
  if (count < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  throw lost(rank, title);
}

// What to say of a rank whose socket for data has ended.
Error Links::lost(int rank, const std::string& title) {
  // The two connections may be late by different times: its reason, or its goodbye, counts.
  const auto deadline = Clock::now() + std::chrono::milliseconds(200);
  while (!heard_[rank].ended) {
    pollfd polled{notices_[rank], POLLIN, 0};
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (rest <= 0 || (poll(&polled, 1, static_cast<int>(rest)) == 0)) break;
    try {
      read_notice(rank);
    } catch (const Error& reason) {
      return reason;
    }
  }
  return lost_error(ranked(rank, addresses_[rank]), heard_[rank].closed, title);
}

}  // namespace dadt
