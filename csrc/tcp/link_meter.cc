#include "tcp/link_meter.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "tcp/tcp_info.h"

namespace dadt {
namespace {

constexpr auto kLeastPause = std::chrono::milliseconds(200);
// The time between two readings is at least this many times the processor time that a reading takes.
constexpr int kShare = 1000;

// Returns the processor time that this thread has used.
std::chrono::nanoseconds processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

LinkCounts counts_of(const TcpInfo& info) {
  const uint64_t busy = info.busy_time - std::min(info.busy_time, info.rwnd_limited);
  return {info.bytes_acked,
          info.bytes_received,
          info.bytes_retrans,
          static_cast<double>(busy) / 1e6,
          info.rtt / 1e6,
          info.notsent_bytes,
          std::chrono::duration<double>(Clock::now().time_since_epoch()).count()};
}

void add(LinkCounts& to, const LinkCounts& counts) {
  to.sent += counts.sent;
  to.received += counts.received;
  to.resent += counts.resent;
  to.busy += counts.busy;
}

}  // namespace

void LinkMeter::read(const std::vector<std::vector<int>>& sockets) {
  const auto begin = processor_time();
  const std::lock_guard lock(mutex_);
  for (size_t rank = 0; rank < sockets.size(); ++rank) {
    links_[rank].resize(std::max(links_[rank].size(), sockets[rank].size()));
    for (size_t i = 0; i < sockets[rank].size(); ++i) {
      Connection& connection = links_[rank][i];
      const TcpInfo info = tcp_info_of(sockets[rank][i]);
      const LinkCounts now = counts_of(info);
      if (now.sent < connection.now.sent || now.received < connection.now.received) {
        add(connection.before, connection.now);
        connection.now = {};
        connection.limited = 0;
      }
      // A window is full because the other rank does not read, or because it is small and its bytes are under
      // way, which takes a round trip for each window.
      const double limited = static_cast<double>(info.rwnd_limited) / 1e6;
      if (windows_[rank] > 0) {
        const double trips =
            static_cast<double>(now.sent - connection.now.sent) / static_cast<double>(windows_[rank]);
        connection.carried += std::min(limited - connection.limited, trips * now.round_trip);
      }
      connection.limited = limited;
      connection.now = now;
    }
  }
  due_ = Clock::now() + std::max<Clock::duration>(kLeastPause, kShare * (processor_time() - begin));
}

void LinkMeter::begin(const std::vector<std::vector<int>>& sockets) {
  read(sockets);
  const std::lock_guard lock(mutex_);
  for (auto& connections : links_) {
    for (Connection& each : connections) {
      const LinkCounts& now = each.now;
      each.before = {.sent = -now.sent, .received = -now.received, .resent = -now.resent, .busy = -now.busy};
    }
  }
}

void LinkMeter::limit(std::vector<size_t> windows) {
  const std::lock_guard lock(mutex_);
  windows_ = std::move(windows);
}

std::vector<LinkCounts> LinkMeter::counts() const {
  const std::lock_guard lock(mutex_);
  std::vector<LinkCounts> counts;
  for (const auto& connections : links_) {
    LinkCounts link;
    uint64_t most = 0;
    double busy = 0;
    for (const Connection& each : connections) {
      add(link, each.before);
      add(link, each.now);
      // The connections with a rank are busy at the same time, so the longest time counts instead of the sum.
      // The round trip is that of the connection with the most bytes.
      busy = std::max(busy, each.before.busy + each.now.busy + each.carried);
      link.at = std::max(link.at, each.now.at);
      if (each.now.sent >= most) link.round_trip = each.now.round_trip;
      most = std::max(most, each.now.sent);
      link.queued += each.now.queued;
    }
    link.busy = busy;
    counts.push_back(link);
  }
  return counts;
}

}  // namespace dadt
