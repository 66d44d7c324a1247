#pragma once

#include "engine/head.h"
#include "shm/neighbours.h"

namespace dadt {

// A rank's counters of the chunks that it has packed and reduced so far, modulo 2^32.
enum Counter { kPacked = 0, kReduced, kCounters };

// The chunks of all ranks in shared memory. Every rank writes chunks 0, 1, 2, ... to the slots of its own
// segment, chunk c to slot c % kSlots, and publishes its progress in counters. Only the engine's thread may
// use it, except for methods that Neighbours allows to other threads.
class ChunkSlots : public Neighbours {
 public:
  static constexpr uint32_t kSlots = 4;

  // slot_bytes: size of the largest chunk; must be a multiple of 64.
  ChunkSlots(int rank, int world_size, size_t slot_bytes)
      : Neighbours(rank, world_size, kSlots * (kGap + slot_bytes), true), stride_(kGap + slot_bytes) {}

  uint8_t* slot(int rank, uint32_t chunk) const { return body(rank) + chunk % kSlots * stride_ + kGap; }
  Head& slot_head(int rank, uint32_t chunk) const {
    return *reinterpret_cast<Head*>(slot(rank, chunk) - sizeof(Head));
  }

  // Returns whether a rank's counter has passed `chunk`.
  bool passed(int rank, Counter which, uint32_t chunk) const {
    return static_cast<int32_t>(counter(rank, which).load() - chunk) > 0;
  }
  bool all_passed(Counter which, uint32_t chunk) const {
    for (int rank = 0; rank < world_size(); ++rank) {
      if (!passed(rank, which, chunk)) return false;
    }
    return true;
  }
  // Sets this rank's counter, and wakes the peers that are asleep.
  void publish(Counter which, uint32_t value) {
    counter(rank(), which).store(value);
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank()) head(peer).event.notify_if_waiting();
    }
  }

 private:
  // Bytes before each slot, at whose end the slot's Head lies. The counters lie at the beginning of the first
  // gap.
  static constexpr size_t kGap = 4096;
  struct alignas(64) Count {
    std::atomic<uint32_t> value;
  };
  static_assert(sizeof(Count) * kCounters + sizeof(Head) <= kGap);

  std::atomic<uint32_t>& counter(int rank, Counter which) const {
    return reinterpret_cast<Count*>(body(rank))[which].value;
  }

  // The following field is constant after construction.
  const size_t stride_;
};

}  // namespace dadt
