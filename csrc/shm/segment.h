#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/event_count.h"

namespace dadt {

enum class State : uint32_t { kOpening = 0, kAttached, kClosed, kAborting, kAborted };

// The head of a segment. Only its owner writes, but for `event`.
struct SegmentHead {
  uint64_t nonce;
  std::atomic<uint32_t> users;  // mappings shared between the ranks of the owner's process
  std::atomic<State> state;
  Code code;  // why it was aborted, before state is kAborted
  char reason[1024];
  alignas(64) EventCount event;  // of the owner: whoever changes what the owner may be waiting for rings it
};

// The memory of one rank that the ranks of a host share: a head and a body, which is zeros at first. Made by
// its owner on an anonymous file, so that nothing has a name that could be left behind, and opened by the
// others through /proc.
class Segment {
 public:
  // Makes one. ready: all pages at once; else each at its first use.
  Segment(size_t body_bytes, bool ready);
  // Opens a peer's. Throws Error(kPeerLost) if the owner is gone, Error(kComm) if it cannot be opened.
  Segment(const std::string& endpoint, size_t body_bytes, bool ready);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // What a peer needs to open it.
  std::string endpoint() const;
  // Closes the file: everybody who was to open it has done so.
  void seal();

  SegmentHead& head() const { return *static_cast<SegmentHead*>(memory_); }
  uint8_t* body() const { return static_cast<uint8_t*>(memory_) + kHeadBytes; }
  pid_t owner() const { return owner_; }
  uint64_t owner_start() const { return owner_start_; }

 private:
  static constexpr size_t kHeadBytes = 4096;
  static_assert(sizeof(SegmentHead) <= kHeadBytes);

  size_t bytes() const { return kHeadBytes + body_bytes_; }

  // Constant after construction.
  const size_t body_bytes_;
  const pid_t pid_;  // the process that mapped it: a forked child leaves it alone
  pid_t owner_;
  uint64_t owner_start_;
  void* memory_ = nullptr;

  // One thread.
  int fd_ = -1;
};

}  // namespace dadt
