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

// The header of a segment. Only the segment's owner writes to it, except for `event` and, in the same
// process, `users`.
struct SegmentHead {
  uint64_t nonce;
  std::atomic<uint32_t> users;  // number of Segment objects in the owner's process that use its mapping
  std::atomic<State> state;
  Code code;  // error code of an abort, written before `state` becomes kAborted
  char reason[1024];
  // The event on which the owner waits; other ranks notify it after each change that the owner may wait for.
  alignas(64) EventCount event;
};

// Memory of one rank that all ranks of its host share: a header and a body, which is initially zeros. Its
// owner creates it as an anonymous file, so that no named file can be left behind, and other ranks open it
// through /proc.
class Segment {
 public:
  // Creates a segment. ready: whether to allocate all memory pages now instead of at their first use.
  Segment(size_t body_bytes, bool ready);
  // Opens a peer's segment. Throws Error(kPeerLost) if its owner has ended, and Error(kComm) if it cannot be
  // opened.
  Segment(const std::string& endpoint, size_t body_bytes, bool ready);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Returns the description that a peer needs to open the segment.
  std::string endpoint() const;
  // Closes the file, once all peers have opened it.
  void seal();

  SegmentHead& head() const { return *static_cast<SegmentHead*>(memory_); }
  uint8_t* body() const { return static_cast<uint8_t*>(memory_) + kHeadBytes; }
  pid_t owner() const { return owner_; }
  uint64_t owner_start() const { return owner_start_; }

 private:
  static constexpr size_t kHeadBytes = 4096;
  static_assert(sizeof(SegmentHead) <= kHeadBytes);

  size_t bytes() const { return kHeadBytes + body_bytes_; }

  // The following fields are constant after construction.
  const size_t body_bytes_;
  const pid_t pid_;  // process that mapped the memory; a forked child leaves the mapping alone
  pid_t owner_;
  uint64_t owner_start_;
  void* memory_ = nullptr;

  // Only one thread uses the following field.
  int fd_ = -1;
};

}  // namespace dadt
