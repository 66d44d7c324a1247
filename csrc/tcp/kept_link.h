#pragma once

#include <cstdint>
#include <vector>

#include "base/event_count.h"
#include "tcp/link_notice.h"

namespace dadt {

// A connected socket, and the bytes that were written to it and read from it.
struct UsedSocket {
  int descriptor;
  uint64_t written = 0, read = 0;
};

// The sockets that connect this rank with another one, after a group of both has failed and before they form
// the next one.
//
// The operations that have failed stopped after any number of bytes, of which the kernels of both sides may
// still store some. So each side tells the other one, in a notice behind its last one of the old group, how
// many bytes it has written to each socket in the old group. The other side reads as many, and the sockets
// are as new.
class KeptLink {
 public:
  // rank: number of the other rank in the old group, for error messages. sockets: in the order that Links
  // requires; this object takes ownership of them.
  KeptLink(int rank, std::vector<UsedSocket> sockets);
  ~KeptLink();
  KeptLink(const KeptLink&) = delete;
  KeptLink& operator=(const KeptLink&) = delete;

  // Tells the other rank that this one enters a generation of ranks, and has written its last bytes before.
  // May be called again for a later generation.
  void enter(uint64_t generation);
  // Drops what the other rank has written before it entered this generation. Returns whether nothing of that
  // is left, after `seconds` seconds at most. If the connection has ended, or the other rank has sent what is
  // no notice of these, ends it, drops all and returns true: who uses the sockets then notices the end.
  // Throws Error if the other rank has entered a later generation.
  bool clear(uint64_t generation, double seconds);
  // Ends the connection and drops all bytes that have come, so that who uses the sockets notices the end.
  void end();
  // Returns the descriptors, which the caller then owns.
  std::vector<int> take();

 private:
  enum class Came { kAll, kLater, kEnd };

  bool read_notice(Clock::time_point deadline);
  Came drop(UsedSocket& socket, uint64_t until, Clock::time_point deadline);

  const int rank_;
  std::vector<UsedSocket> sockets_;
  std::vector<uint64_t> due_;  // for each socket, the bytes that the other rank has written, as it has told
  LinkNotice notice_;          // the next notice, as far as it has arrived
  uint64_t entered_ = 0;       // newest generation that the other rank has entered
  bool has_ended_ = false;
};

}  // namespace dadt
