#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "bell.h"
#include "error.h"

namespace dadt {

// What a rank is in, written at the head of the slot that holds the first chunk of an operation.
struct SlotHead {
  uint32_t kind;
  uint32_t dtype;
  uint64_t total;   // elements
  uint64_t layout;  // hash of the tensors' sizes
  uint64_t lane;    // bytes
  double weight;
  int32_t root;
  char name[148];
};
static_assert(sizeof(SlotHead) == 192);

enum class State : uint32_t { kOpening = 0, kAttached, kClosed, kAborting, kAborted };

// Where a rank's stream of chunks has got to; a count of chunks since the beginning, modulo 2^32.
enum Counter { kPacked = 0, kReduced, kCounters };

// The head of a segment. Only its owner writes, but for `bell`.
struct SegmentHead {
  uint64_t nonce;
  std::atomic<uint32_t> users;  // mappings shared between the ranks of the owner's process
  std::atomic<State> state;
  Code code;  // why it was aborted, before state is kAborted
  char reason[1024];
  struct alignas(64) {
    std::atomic<uint32_t> value;
  } counters[kCounters];
  alignas(64) Bell bell;  // of the owner: whoever changes what the owner may be waiting for rings it
};

// The memory of one rank that the ranks of a host share: a head and a ring of slots. Made by its owner on an
// anonymous file, so that nothing has a name that could be left behind, and opened by the others through
// /proc.
class Segment {
 public:
  static constexpr uint32_t kSlots = 4;

  // Makes one. slot_bytes: a multiple of 64.
  explicit Segment(size_t slot_bytes);
  // Opens a peer's. Throws Error(kPeerLost) if the owner is gone, Error(kComm) if it cannot be opened.
  Segment(const std::string& endpoint, size_t slot_bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // What a peer needs to open it.
  std::string endpoint() const;
  // Closes the file: everybody who was to open it has done so.
  void seal();

  SegmentHead& head() const { return *static_cast<SegmentHead*>(memory_); }
  SlotHead& slot_head(uint32_t chunk) const {
    return *reinterpret_cast<SlotHead*>(slot(chunk) - sizeof(SlotHead));
  }
  uint8_t* slot(uint32_t chunk) const {
    return static_cast<uint8_t*>(memory_) + kHeadBytes + chunk % kSlots * (slot_bytes_ + kGap) + kGap;
  }
  pid_t owner() const { return owner_; }
  uint64_t owner_start() const { return owner_start_; }

 private:
  static constexpr size_t kHeadBytes = 4096;
  static constexpr size_t kGap = 4096;  // before each slot; the SlotHead is at its end
  static_assert(sizeof(SegmentHead) <= kHeadBytes);

  size_t bytes() const { return kHeadBytes + kSlots * (slot_bytes_ + kGap); }

  // Constant after construction.
  const size_t slot_bytes_;
  const pid_t pid_;  // the process that mapped it: a forked child leaves it alone
  pid_t owner_;
  uint64_t owner_start_;
  void* memory_ = nullptr;

  // One thread.
  int fd_ = -1;
};

}  // namespace dadt
