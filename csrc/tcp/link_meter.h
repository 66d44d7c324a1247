#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/event_count.h"

namespace dadt {

// What the kernel has counted on this rank's connections with one other rank.
struct LinkCounts {
  uint64_t sent = 0;      // bytes sent by this rank that were acknowledged
  uint64_t received = 0;  // bytes received from the other rank
  uint64_t resent = 0;    // bytes that were sent again; always 0 before Linux 4.19
  double busy = 0;        // seconds in which bytes were in transfer, and not held up by a slow reader
  double round_trip = 0;  // current round trip in seconds
  uint64_t queued = 0;    // bytes that currently wait in the kernel to be sent
  double at = 0;          // time of this reading, in seconds of the monotonic clock
};

// Reads the kernel's counts for this rank's connections with the other ranks (TCP_INFO), at intervals.
class LinkMeter {
 public:
  explicit LinkMeter(int world_size) : links_(world_size), windows_(world_size) {}

  // Begins to count: what was counted on these connections before belongs to no rank.
  void begin(const std::vector<std::vector<int>>& sockets);

  // Returns whether the next reading is due. Readings use at most a thousandth of a processor.
  bool is_due() const { return Clock::now() >= due_.load(std::memory_order_relaxed); }

  // Reads the counts. sockets: the connections with each rank. A connection that replaces another one
  // continues its counts.
  void read(const std::vector<std::vector<int>>& sockets);

  // Sets for each rank to how many bytes in flight both ranks limit each other; 0 for no limit.
  void limit(std::vector<size_t> windows);

  // Returns the counts of the last reading, by rank. May be called from any thread.
  std::vector<LinkCounts> counts() const;

 private:
  struct Connection {
    LinkCounts before{};  // counts of connections that this one has replaced
    LinkCounts now{};
    double limited = 0;  // seconds in which the other rank's window was full
    double carried = 0;  // those of them in which the network carried a window's bytes
  };

  // Any thread may use the following field.
  std::atomic<Clock::time_point> due_{};

  // This mutex guards the following fields.
  mutable std::mutex mutex_;
  std::vector<std::vector<Connection>> links_;
  std::vector<size_t> windows_;
};

}  // namespace dadt
