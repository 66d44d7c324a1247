#include "tcp/link_notice.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace dadt {
namespace {

constexpr size_t kLongestNotice = 2048;  // bytes of the longest text

}  // namespace

bool send_notice(int socket, uint32_t code, std::string text) {
  text.resize(std::min(text.size(), kLongestNotice));
  const LinkNotice::Head head{code, static_cast<uint32_t>(text.size())};
  text.insert(0, reinterpret_cast<const char*>(&head), sizeof head);
  const ssize_t sent = send(socket, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent == static_cast<ssize_t>(text.size());
}

LinkNotice::Head LinkNotice::head() const {
  Head head{};
  if (bytes_.size() >= sizeof head) std::memcpy(&head, bytes_.data(), sizeof head);
  return head;
}

LinkNotice::Came LinkNotice::read(int socket) {
  char bytes[sizeof(Head) + kLongestNotice];
  while (true) {
    const size_t length = head().bytes;
    if (length > kLongestNotice) return Came::kInvalid;
    if (bytes_.size() == sizeof(Head) + length) return Came::kAll;
    const ssize_t count = recv(socket, bytes, sizeof(Head) + length - bytes_.size(), MSG_DONTWAIT);
    if (count > 0) {
      bytes_.append(bytes, static_cast<size_t>(count));
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return Came::kPart;
    } else if (count == 0 || errno != EINTR) {
      return Came::kEnd;
    }
  }
}

}  // namespace dadt
