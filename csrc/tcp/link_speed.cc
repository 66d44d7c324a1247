#include "tcp/link_speed.h"

namespace dadt {

void LinkSpeed::record(const Traffic& traffic, Clock::time_point now) {
  record(sent_, traffic.sent, now);
  record(received_, traffic.received, now);
}

void LinkSpeed::record(Direction& direction, uint64_t bytes, Clock::time_point now) const {
  const bool begins = direction.at == Clock::time_point{};
  // Connections that replace others count anew.
  if (begins || bytes < direction.bytes) {
    direction.bytes = bytes;
    direction.at = now;
    return;
  }
  const uint64_t moved = bytes - direction.bytes;
  if (moved < span_ || now <= direction.at) return;
  direction.rate = std::max(direction.rate, static_cast<double>(moved) / seconds_between(direction.at, now));
  direction.bytes = bytes;
  direction.at = now;
}

double LinkSpeed::rate() const { return std::min(sent_.rate, received_.rate); }

}  // namespace dadt
