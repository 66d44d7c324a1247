#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace dadt {

// Decides in groups of how many ranks large allreduces of floating-point values go, from how long they take.
// Every way gives the same bits, so the choice may depend on measurements. All ranks choose the same, as they
// hear the same times of the same operations, and compute with integers.
//
// In one group of all n ranks each pair of ranks exchanges data: each rank moves 2 (n - 1) / n times the
// values, and a link between two racks n / 2 times the values each way. In several groups of consecutive
// ranks, only the ranks of a group and neighbouring groups exchange data: each rank moves at most 2 times the
// values, and what lies between two groups carries them once each way. That pays where many pairs of ranks
// share a link, which no rank alone could measure: groups are tried when one group takes much longer than the
// ranks' own links explain.
class Ways {
 public:
  explicit Ways(int world_size)
      : world_size_(world_size), group_(world_size), settled_(world_size), ended_group_(world_size) {}

  // Returns the number of ranks in a group in the next large operation, which divides the number of all
  // ranks.
  int group() const { return group_; }
  // Returns the number that was chosen last, also while others are on trial. Any thread may call this.
  int settled() const { return settled_.load(std::memory_order_relaxed); }

  // Returns how long the last large operation took this rank, for its next header: nanoseconds per MiB; 0 if
  // that was told already.
  uint64_t cost() const { return cost_; }
  // Records a large operation. group: number of ranks in a group. nanoseconds: how long its data took.
  // expected: nanoseconds per MiB that the ranks' links explain for one group; 0 if unknown.
  void ended(int group, uint64_t nanoseconds, uint64_t bytes, uint64_t expected);
  // Hears all ranks' costs of the last large operation, from the headers of another one.
  void told(const std::vector<uint64_t>& costs);

 private:
  void change(int group);
  void try_next(int below);
  void judge_one_group(uint64_t cost);
  void judge_trial(uint64_t cost);

  const int world_size_;
  int group_;
  std::atomic<int> settled_;
  bool tries_ = false;  // whether this number is on trial
  int ended_group_;     // these three fields describe the last operation
  uint64_t cost_ = 0, expected_ = 0;
  uint64_t of_one_group_ = 0;  // cost of the last operation in one group
  int best_ = 0;               // the best number in this trial
  uint64_t best_cost_ = 0;
  uint64_t since_ = 0;  // operations since the number has changed
  uint64_t slow_ = 0;   // operations in one group, one after the other, that were slow
  uint64_t pause_ = 0;  // operations in one group before others are tried again
};

}  // namespace dadt
