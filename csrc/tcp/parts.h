#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dadt {

// How much of the values each rank sums for all. A rank that owns a part moves all of the values once, and
// its part to and from each of the others; so one whose link is slower should own less.
//
// Whole numbers only, so that all ranks, on whatever processors, divide alike.
class Parts {
 public:
  explicit Parts(int world_size) : rates_(world_size) {}

  // What this rank's link can carry, in bytes per second each way; 0: not known yet.
  uint64_t rate() const { return static_cast<uint64_t>(rate_); }
  // An operation has moved so many bytes in so many seconds. busy: the share of the time in which the link
  // was what held up all that this rank sent.
  void measured(double bytes, double seconds, double busy);
  // What all ranks have told, which is the same on each of them.
  void told(const std::vector<uint64_t>& rates) { rates_ = rates; }

  // Divides so many lines: the first one of each rank, and the end.
  std::vector<size_t> edges(size_t lines) const;

 private:
  std::vector<uint64_t> rates_;
  double rate_ = 0;
};

}  // namespace dadt
