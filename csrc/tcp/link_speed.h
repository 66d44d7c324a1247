#pragma once

#include <algorithm>
#include <cstdint>

#include "base/event_count.h"

namespace dadt {

// Bytes that a rank has sent to and received from all other ranks, as the kernel counts them: sent bytes once
// they are acknowledged, received ones once they are there, whether or not they were read.
struct Traffic {
  uint64_t sent = 0, received = 0;
};

// Measures how fast a rank's link is while an operation runs: the highest rate over a span, which is a part
// of the operation's bytes. The average would tell less, since the link of a rank that waits for another
// rank's slower link rests meanwhile. A rank does not wait throughout an operation: what ranks with faster
// links send each other at the end depends on no slower rank any more.
class LinkSpeed {
 public:
  // Bytes of the shortest span: so many that a burst which passes a switch at once does not count.
  static constexpr uint64_t kLeastSpan = 512 * 1024;

  // bytes: number of bytes that the operation transfers in each direction.
  explicit LinkSpeed(uint64_t bytes) : span_(std::max(kLeastSpan, bytes / 16)) {}

  // Returns the number of bytes of a span.
  uint64_t span() const { return span_; }

  // Records the bytes that have been transferred at a point in time. The first call begins the measurement.
  void record(const Traffic& traffic, Clock::time_point now);

  // Returns the rate of the slower direction in bytes per second; 0 if it is unknown.
  double rate() const;

 private:
  struct Direction {
    uint64_t bytes = 0;      // bytes at the beginning of the current span
    Clock::time_point at{};  // time of its beginning
    double rate = 0;         // the highest rate so far
  };

  void record(Direction& direction, uint64_t bytes, Clock::time_point now) const;

  uint64_t span_;
  Direction sent_, received_;
};

}  // namespace dadt
