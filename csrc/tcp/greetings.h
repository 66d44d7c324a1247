#pragma once

#include <string>
#include <vector>

#include "engine/head.h"
#include "tcp/links.h"

namespace dadt {

// What all ranks tell each other before the data of an operation: a head, by which they see whether all are
// in the same one, and a lane. Of an exchange the lane is a table of the bytes that a rank sends to and
// expects from each. Engine thread only.
class Greetings {
 public:
  // number: of the operation. rate: of this rank's link.
  Greetings(Links& links, const Operation& operation, uint32_t number, uint64_t rate);

  // What this rank tells each of the others.
  const std::string& mine() const { return mine_; }

  // Whether a rank's has come, and is of the same operation.
  bool has(int rank) const { return peers_[rank].is_here; }
  bool has_all() const { return has_all_; }
  // Bytes that are still to come of a rank's; 0 also where it is in another operation.
  size_t missing(int rank) const;
  // Reads from a rank what is missing; false if nothing is there. Throws Error, if the ranks do not agree the
  // same one on all of them.
  bool read(int rank);

  // Once all are here:

  std::vector<double> weights() const;
  // Of the ranks' links.
  std::vector<uint64_t> rates() const;
  // Bytes that a rank sends to this one, in an exchange.
  size_t bytes_from(int rank) const;
  // The lanes, by rank.
  std::vector<std::string> take_lanes() { return std::move(lanes_); }

 private:
  struct Peer {
    Head head{};
    size_t head_bytes = 0, lane_bytes = 0;  // what has come of them
    bool is_here = false;
    bool differs = false;  // it is in another operation
  };

  std::string lane() const;
  void take_head(int rank);
  void check();
  void check_tables() const;

  // Constant after construction.
  Links& links_;
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  std::string mine_;

  std::vector<Peer> peers_;  // this rank included
  std::vector<std::string> lanes_;
  bool has_all_ = false;
};

}  // namespace dadt
