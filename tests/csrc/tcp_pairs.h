#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <tuple>
#include <utility>
#include <vector>

#include "tcp/links.h"
#include "tcp/ways.h"

namespace dadt {

// Two sockets that are connected over TCP.
inline std::pair<int, int> pair() {
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  EXPECT_EQ(bind(server, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(server, 1), 0);
  EXPECT_EQ(getsockname(server, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(one, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int other = accept(server, nullptr, nullptr);
  close(server);
  return {one, other};
}

// For each rank, its sockets by rank.
inline std::vector<std::vector<int>> mesh(int world_size) {
  std::vector<std::vector<int>> sockets(world_size, std::vector<int>(world_size, -1));
  for (int rank = 0; rank < world_size; ++rank) {
    for (int other = 0; other < rank; ++other) {
      std::tie(sockets[rank][other], sockets[other][rank]) = pair();
    }
  }
  return sockets;
}

// For each rank the sockets of its Links, with so many for data.
inline std::vector<std::vector<std::vector<int>>> meshes(int world_size, int streams) {
  std::vector<std::vector<std::vector<int>>> all(world_size, std::vector<std::vector<int>>(world_size));
  for (size_t i = 0; i < Links::kData + static_cast<size_t>(streams); ++i) {
    const auto sockets = mesh(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      for (int other = 0; other < world_size; ++other) {
        if (other != rank) all[rank][other].push_back(sockets[rank][other]);
      }
    }
  }
  return all;
}

// Has the next large operation go in groups of so many ranks, as if these had paid.
inline void go_in_groups(Ways& ways, int group, int world_size) {
  while (ways.group() != group || ways.cost() != 0) {
    const uint64_t cost = ways.group() == world_size ? 1 << 20 : ways.group() == group ? 1 << 10 : 1 << 15;
    ways.ended(ways.group(), cost, 1 << 20, 1 << 10);
    ways.told({cost});
  }
}

}  // namespace dadt
