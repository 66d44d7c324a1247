#include "tcp/kept_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace dadt {
namespace {

constexpr size_t kMostDropped = 64 * 1024;  // most bytes dropped by one system call
constexpr int kNoLimit = 1 << 30;           // bytes of a window without a limit

// Waits until a socket can be read or has ended. Returns whether one of both is so before the deadline.
bool await(int socket, Clock::time_point deadline) {
  const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd polled{socket, POLLIN, 0};
  return poll(&polled, 1, static_cast<int>(std::clamp<int64_t>(rest, 0, 3'600'000))) > 0;
}

// Reads at most so many bytes of a socket without copying them. Returns what recv(2) returns.
ssize_t discard(int descriptor, size_t most) {
  uint8_t untouched[kMostDropped];  // the sanitizers take it for written
  return recv(descriptor, untouched, std::min(most, sizeof untouched), MSG_DONTWAIT | MSG_TRUNC);
}

}  // namespace

KeptLink::KeptLink(int rank, std::vector<UsedSocket> sockets)
    : rank_(rank), sockets_(std::move(sockets)), due_(sockets_.size()) {
  const int one = 1;
  for (const UsedSocket& socket : sockets_) {
    setsockopt(socket.descriptor, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one);
    setsockopt(socket.descriptor, IPPROTO_TCP, TCP_WINDOW_CLAMP, &kNoLimit, sizeof kNoLimit);
  }
}

KeptLink::~KeptLink() {
  for (const UsedSocket& socket : sockets_) close(socket.descriptor);
}

void KeptLink::enter(uint64_t generation) {
  std::vector<uint64_t> words{generation};
  for (size_t i = 1; i < sockets_.size(); ++i) words.push_back(std::exchange(sockets_[i].written, 0));
  const std::string text(reinterpret_cast<const char*>(words.data()), words.size() * sizeof words[0]);
  if (!send_notice(sockets_[0].descriptor, kEntry, text)) end();
}

bool KeptLink::clear(uint64_t generation, double seconds) {
  const auto deadline = deadline_after(seconds);
  while (!has_ended_ && entered_ < generation) {
    if (!read_notice(deadline)) return false;
  }
  for (size_t i = 1; !has_ended_ && i < sockets_.size(); ++i) {
    switch (drop(sockets_[i], due_[i], deadline)) {
      case Came::kAll:
        break;
      case Came::kLater:
        return false;
      case Came::kEnd:
        end();
    }
  }
  if (entered_ > generation) {
    throw Error(Code::kPeerLost, "rank " + std::to_string(rank_) + " connects with other ranks meanwhile");
  }
  return true;
}

// Reads the next notice of the other rank. Returns false if it does not come before the deadline.
bool KeptLink::read_notice(Clock::time_point deadline) {
  LinkNotice::Came came = notice_.read(sockets_[0].descriptor);
  while (came == LinkNotice::Came::kPart) {
    if (!await(sockets_[0].descriptor, deadline)) return false;
    came = notice_.read(sockets_[0].descriptor);
  }
  const LinkNotice notice = std::exchange(notice_, {});
  const bool is_entry = came == LinkNotice::Came::kAll && notice.code() == kEntry;
  std::vector<uint64_t> words(sockets_.size());  // the generation, and the bytes of each further socket
  if (is_entry && notice.text().size() == words.size() * sizeof words[0]) {
    std::memcpy(words.data(), notice.text().data(), notice.text().size());
    entered_ = std::max(entered_, words[0]);
    for (size_t i = 1; i < sockets_.size(); ++i) due_[i] += words[i];
  } else if (is_entry || came != LinkNotice::Came::kAll || notice.code() >= kCodes) {
    end();
  }
  return true;
}

// Reads bytes of a socket and drops them, until so many were read.
KeptLink::Came KeptLink::drop(UsedSocket& socket, uint64_t until, Clock::time_point deadline) {
  while (socket.read != until) {
    if (socket.read > until) return Came::kEnd;  // it has told less than it has written
    const ssize_t count = discard(socket.descriptor, until - socket.read);
    if (count > 0) {
      socket.read += static_cast<uint64_t>(count);
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!await(socket.descriptor, deadline)) return Came::kLater;
    } else if (count == 0 || errno != EINTR) {
      return Came::kEnd;
    }
  }
  return Came::kAll;
}

void KeptLink::end() {
  has_ended_ = true;
  for (const UsedSocket& socket : sockets_) {
    shutdown(socket.descriptor, SHUT_RDWR);
    while (discard(socket.descriptor, kMostDropped) > 0) {
    }
  }
}

std::vector<int> KeptLink::take() {
  std::vector<int> descriptors;
  for (const UsedSocket& socket : sockets_) descriptors.push_back(socket.descriptor);
  sockets_.clear();
  return descriptors;
}

}  // namespace dadt
