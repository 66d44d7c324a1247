#include "tcp/ways.h"

#include <algorithm>

namespace dadt {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kHighestCost = uint64_t{1} << 50;
// Groups are tried after kSlowInTurn operations that each took more than 3 / 2 of what the links explain, and
// kept if the best ones take less than 7 / 8 of the time.
constexpr uint64_t kSlowInTurn = 2;
// Operations until groups that were of no use are tried again, the first time; then twice as many each time.
constexpr uint64_t kPause = 64, kLongestPause = 4096;
// Operations in groups until one group is tried again.
constexpr uint64_t kSettled = 1024;

}  // namespace

void Ways::ended(int group, uint64_t nanoseconds, uint64_t bytes, uint64_t expected) {
  ended_group_ = group;
  cost_ = std::clamp<uint64_t>(nanoseconds * (kMiB / 1024) / std::max<uint64_t>(1, bytes / 1024), 1,
                               kHighestCost);
  expected_ = expected;
}

void Ways::told(const std::vector<uint64_t>& costs) {
  if (cost_ == 0) return;
  const uint64_t cost = std::min(*std::ranges::max_element(costs), kHighestCost);
  cost_ = 0;
  if (ended_group_ != group_) return;  // it has changed since then
  ++since_;
  if (tries_) {
    judge_trial(cost);
  } else if (group_ == world_size_) {
    judge_one_group(cost);
  } else if (since_ >= kSettled) {
    change(world_size_);
  }
}

void Ways::change(int group) {
  group_ = group;
  since_ = slow_ = 0;
}

// Tries the largest number below this one that divides the number of ranks; without one, keeps the best.
void Ways::try_next(int below) {
  tries_ = --below > 0;
  while (tries_ && world_size_ % below != 0) --below;
  if (tries_) return change(below);
  const bool pays = best_cost_ * 8 < of_one_group_ * 7;
  pause_ = pays ? 0 : std::clamp(pause_ * 2, kPause, kLongestPause);
  change(pays ? best_ : world_size_);
  settled_ = group_;
}

void Ways::judge_one_group(uint64_t cost) {
  of_one_group_ = cost;
  slow_ = expected_ > 0 && cost * 2 > expected_ * 3 ? slow_ + 1 : 0;
  if (since_ > kSlowInTurn && slow_ == 0) settled_ = world_size_;
  if (slow_ < kSlowInTurn || since_ < pause_) return;
  best_cost_ = kHighestCost;
  try_next(world_size_);
}

void Ways::judge_trial(uint64_t cost) {
  if (cost < best_cost_) {
    best_ = group_;
    best_cost_ = cost;
  }
  try_next(group_);
}

}  // namespace dadt
