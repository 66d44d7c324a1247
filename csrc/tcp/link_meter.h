#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/event_count.h"

namespace dadt {

// The kernel's counts for the connections with one rank.
struct LinkCounts {
  uint64_t sent = 0;      // bytes sent by this rank that have arrived
  uint64_t received = 0;  // bytes received from the other rank
  uint64_t resent = 0;    // bytes that were sent again; always 0 before Linux 4.19
  double busy = 0;        // seconds in which bytes were in transfer and the other rank had room for more
  double round_trip = 0;  // current round trip in seconds
  uint64_t queued = 0;    // bytes that currently wait in the kernel to be sent
  double at = 0;          // time of this reading, in seconds of the monotonic clock
};

// Reads from time to time the kernel's counts for a rank's connections with the others (TCP_INFO).
class LinkMeter {
 public:
  explicit LinkMeter(int world_size) : links_(world_size) {}

  // Returns whether the next reading is due. Readings use at most a thousandth of a processor.
  bool is_due() const { return Clock::now() >= due_.load(std::memory_order_relaxed); }

  // Reads the counts. sockets: the connections with each rank. The counts of a connection that replaces
  // another continue.
  void read(const std::vector<std::vector<int>>& sockets);

  // Returns the last reading, by rank. May be called from any thread.
  std::vector<LinkCounts> counts() const;

 private:
  struct Connection {
    LinkCounts before{};  // counts of former sockets in this place
    LinkCounts now{};
  };

  // Usable from any thread.
  std::atomic<Clock::time_point> due_{};

  // Guarded by mutex.
  mutable std::mutex mutex_;
  std::vector<std::vector<Connection>> links_;
};

}  // namespace dadt
