#include "tcp/parts.h"

#include <algorithm>
#include <numeric>

namespace dadt {
namespace {

// The amount of data of all values of an operation, in the unit in which parts are computed.
constexpr uint64_t kUnit = uint64_t{1} << 20;
constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kRates = 1024;  // relative rate of the fastest link
// Parts become unequal only if equal parts would take more than 4 / 3 times as long.
constexpr uint64_t kGain = 4, kOf = 3;

// Returns for each rank its part of the values, times (ranks - 2), such that no rank takes longer than
// `time`: a rank transfers all values (kUnit) once, and its part ranks - 2 times more.
std::vector<uint64_t> within(uint64_t time, const std::vector<uint64_t>& rates) {
  std::vector<uint64_t> shares;
  for (uint64_t rate : rates) shares.push_back(time * rate > kUnit ? time * rate - kUnit : 0);
  return shares;
}

}  // namespace

void Parts::measured(double rate) {
  if (rate > 0) rate_ += rate_ > 0 ? (rate - rate_) / (rate > rate_ ? 2 : 8) : rate;
}

uint64_t Parts::nanoseconds() const {
  const std::vector<size_t> owned = edges(kUnit);
  uint64_t longest = 0;
  for (size_t rank = 0; rank < rates_.size(); ++rank) {
    if (rates_[rank] == 0) return 0;
    const uint64_t carried = kUnit + (owned[rank + 1] - owned[rank]) * (rates_.size() - 2);
    longest = std::max(longest, carried * kSecond / rates_[rank]);
  }
  return longest;
}

std::vector<size_t> Parts::edges(size_t lines) const {
  const size_t ranks = rates_.size();
  std::vector<uint64_t> shares(ranks, 1);
  const uint64_t most = *std::ranges::max_element(rates_);
  if (ranks > 2 && most >= kRates && std::ranges::count(rates_, uint64_t{0}) == 0) {
    std::vector<uint64_t> rates;  // rates relative to the highest one
    for (uint64_t rate : rates_) rates.push_back(std::max<uint64_t>(1, rate / (most / kRates)));
    const uint64_t whole = (ranks - 2) * kUnit;
    const uint64_t least = *std::ranges::min_element(rates);
    // The time with equal parts: the slowest rank transfers all values once, and its part ranks - 2 times
    // more.
    const uint64_t equal = (kUnit + whole / ranks + least - 1) / least;
    uint64_t time = kUnit / least, enough = equal + 1;
    while (time + 1 < enough) {
      const uint64_t middle = (time + enough) / 2;
      const auto owned = within(middle, rates);
      (std::accumulate(owned.begin(), owned.end(), uint64_t{0}) < whole ? time : enough) = middle;
    }
    if (equal * kOf > enough * kGain) shares = within(enough, rates);
  }
  const uint64_t sum = std::accumulate(shares.begin(), shares.end(), uint64_t{0});
  std::vector<size_t> edges(1, 0);
  uint64_t so_far = 0;
  for (uint64_t share : shares) {
    so_far += share;
    edges.push_back(lines / sum * so_far + lines % sum * so_far / sum);
  }
  return edges;
}

}  // namespace dadt
