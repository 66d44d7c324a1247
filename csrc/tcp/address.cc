#include "tcp/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace dadt {

std::string address_of(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  char text[INET6_ADDRSTRLEN] = "";
  if (storage.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in&>(storage).sin_addr, text, sizeof text);
  } else if (storage.ss_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<sockaddr_in6&>(storage).sin6_addr, text, sizeof text);
  }
  constexpr std::string_view kMapped = "::ffff:";
  const std::string_view address = text;
  return std::string(address.starts_with(kMapped) ? address.substr(kMapped.size()) : address);
}

std::string ranked(int rank, const std::string& address) {
  const std::string text = "rank " + std::to_string(rank);
  return address.empty() ? text : text + " (" + address + ")";
}

}  // namespace dadt
