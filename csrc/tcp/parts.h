#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dadt {

// Decides which part of the values each rank sums for all ranks. A rank transfers all values once, and its
// own part to and from every other rank, so a rank with a slower link should own a smaller part.
//
// Only integers are used, so that all ranks get the same division on any processor.
class Parts {
 public:
  explicit Parts(int world_size) : rates_(world_size) {}

  // Returns the measured speed of this rank's link in bytes per second, in each direction; 0 if unknown.
  uint64_t rate() const { return static_cast<uint64_t>(rate_); }
  // Records the speed that an operation has measured; 0 if it has measured none. A higher one than before
  // counts more than a lower one, for which the rank may just have waited for others.
  void measured(double rate);
  // Sets the rates that all ranks have reported, which are the same on every rank.
  void told(const std::vector<uint64_t>& rates) { rates_ = rates; }
  const std::vector<uint64_t>& rates() const { return rates_; }

  // Divides `lines` cache lines of values among the ranks. Returns the first line of each rank's part, and
  // the end of the last part.
  std::vector<size_t> edges(size_t lines) const;
  // Returns how many nanoseconds the slowest rank's link needs for a MiB of values, divided so; 0 if a rank's
  // rate is unknown.
  uint64_t nanoseconds() const;

 private:
  std::vector<uint64_t> rates_;
  double rate_ = 0;
};

}  // namespace dadt
