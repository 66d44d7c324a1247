#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/event_count.h"

namespace dadt {

// What the kernel knows of the connections with one rank.
struct LinkCounts {
  uint64_t sent = 0;      // bytes of this rank's that have arrived
  uint64_t received = 0;  // bytes
  uint64_t resent = 0;    // bytes that were sent again; 0 before Linux 4.19
  double busy = 0;        // seconds in which bytes were under way and the other rank had room for more
  double round_trip = 0;  // seconds, now
  uint64_t queued = 0;    // bytes that wait in the kernel to be sent, now
  double at = 0;          // seconds of the monotonic clock, when all this was read
};

// Reads now and then what the kernel counts for a rank's connections with the others (TCP_INFO).
class LinkMeter {
 public:
  explicit LinkMeter(int world_size) : links_(world_size) {}

  // Whether it is time to read again: readings take a thousandth of a processor at most.
  bool is_due() const { return Clock::now() >= due_.load(std::memory_order_relaxed); }

  // sockets: of the connections with each rank. One that has taken another one's place goes on counting.
  void read(const std::vector<std::vector<int>>& sockets);

  // Any thread: the last reading, by rank.
  std::vector<LinkCounts> counts() const;

 private:
  struct Connection {
    LinkCounts before{};  // of sockets that were in this one's place
    LinkCounts now{};
  };

  // Any thread.
  std::atomic<Clock::time_point> due_{};

  // Guarded by mutex.
  mutable std::mutex mutex_;
  std::vector<std::vector<Connection>> links_;
};

}  // namespace dadt
