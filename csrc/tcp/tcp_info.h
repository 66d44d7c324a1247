#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>

namespace dadt {

// The kernel's struct tcp_info. It is defined here, since the struct in the C library's headers lacks fields
// of newer kernels; new fields are only added at its end.
struct TcpInfo {
  uint8_t state[8];
  uint32_t timeouts[4];
  uint32_t packets[5];
  uint32_t since[4];
  uint32_t pmtu, rcv_ssthresh;
  uint32_t rtt;  // round trip in microseconds
  uint32_t rttvar, snd_ssthresh, snd_cwnd, advmss, reordering, rcv_rtt, rcv_space, total_retrans;
  uint64_t pacing_rate, max_pacing_rate;
  uint64_t bytes_acked, bytes_received;
  uint32_t segs_out, segs_in;
  uint32_t notsent_bytes;
  uint32_t min_rtt, data_segs_in, data_segs_out;
  uint64_t delivery_rate;
  uint64_t busy_time, rwnd_limited;  // microseconds; busy_time includes rwnd_limited
  uint64_t sndbuf_limited;
  uint32_t delivered, delivered_ce;
  uint64_t bytes_sent;
  uint64_t bytes_retrans;
};
static_assert(offsetof(TcpInfo, rtt) == 68);
static_assert(offsetof(TcpInfo, bytes_acked) == 120);
static_assert(offsetof(TcpInfo, busy_time) == 168);
static_assert(sizeof(TcpInfo) == 216);

// Returns the kernel's tcp_info of a socket; fields that the kernel does not know are 0.
inline TcpInfo tcp_info_of(int socket) {
  TcpInfo info{};
  socklen_t length = sizeof info;
  getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length);
  return info;
}

}  // namespace dadt
