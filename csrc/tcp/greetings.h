#pragma once

#include <string>
#include <vector>

#include "engine/head.h"
#include "tcp/links.h"

namespace dadt {

// The data that all ranks exchange before an operation: a header, from which they see whether all run the
// same operation, and a lane of bytes sent along with the operation. In an exchange the lane is a table of
// the bytes that a rank sends to and expects from each other rank. Only the engine's thread may use it.
class Greetings {
 public:
  // number: number of the operation on this executor. rate: speed of this rank's link, in bytes per second.
  // cost: what Ways::cost returns.
  Greetings(Links& links, const Operation& operation, uint32_t number, uint64_t rate, uint64_t cost);

  // Returns the header and lane that this rank sends to every other rank.
  const std::string& mine() const { return mine_; }

  // Returns whether a rank's header and lane have arrived and belong to the operation that this rank runs.
  bool has(int rank) const { return peers_[rank].is_here; }
  bool has_all() const { return has_all_; }
  // Returns the bytes of a rank's header or lane that have not arrived yet; 0 also if the rank runs another
  // operation.
  size_t missing(int rank) const;
  // Reads bytes of a rank's header or lane. Returns false if none have arrived. Throws Error, the same one on
  // all ranks, if the ranks run different operations.
  bool read(int rank);

  // The following methods may be called once the data of all ranks has arrived.

  std::vector<double> weights() const;
  // Returns the speed of each rank's link.
  std::vector<uint64_t> rates() const;
  // Returns what the last large operation cost each rank.
  std::vector<uint64_t> costs() const;
  // Returns the number of bytes that a rank sends to this one in an exchange.
  size_t bytes_from(int rank) const;
  // Returns the lanes, by rank.
  std::vector<std::string> take_lanes() { return std::move(lanes_); }

 private:
  struct Peer {
    Head head{};
    size_t head_bytes = 0, lane_bytes = 0;  // bytes received of the header and of the lane
    bool is_here = false;
    bool differs = false;  // whether the rank runs another operation
  };

  std::string lane() const;
  void take_head(int rank);
  void check();
  void check_tables() const;

  // The following fields are constant after construction.
  Links& links_;
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  std::string mine_;

  std::vector<Peer> peers_;  // one entry per rank, including this one
  std::vector<std::string> lanes_;
  bool has_all_ = false;
};

}  // namespace dadt
