#pragma once

#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// The layout of an exchange. A rank's stream contains the bytes for each other rank, beginning with the next
// rank, so that the readers of equal pieces take turns. Bytes that several ranks get are in the stream once.
class Exchange {
 public:
  // For any other kind of operation the layout is empty.
  Exchange(const Operation& operation, int rank, int world_size);

  // Returns the number of bytes of this rank's stream.
  size_t bytes() const { return bytes_; }
  // Returns the table for the peers, which says where in this rank's stream their bytes are, and how many
  // bytes this rank expects.
  const std::string& table() const { return table_; }

  // Uses the tables of all ranks, and allocates memory in `result` if the operation has no outputs. Throws
  // Error(kMismatch), the same on all ranks.
  void route(const std::vector<std::string>& tables, Result& result);

  // Copies bytes [begin, end) of this rank's stream to `slot`.
  void pack(void* slot, size_t begin, size_t end) const;

  // Copies this rank's part of bytes [begin, end) of a rank's stream to the output. Call it after `route`.
  void deliver(int rank, const void* slot, size_t begin, size_t end) const;

  // Copies the rank's own bytes, if they are not in its stream.
  void deliver_own() const;

 private:
  static constexpr uint64_t kUnknown = ~uint64_t{0};

  // The entry for one rank in another rank's table.
  struct Entry {
    uint64_t offset;    // position in the stream; kUnknown if not in the stream
    uint64_t bytes;     // number of bytes sent to that rank
    uint64_t expected;  // number of bytes expected from that rank; kUnknown for any number
  };
  struct Piece {
    const uint8_t* data;
    size_t offset, bytes;
  };

  static Entry entry(const std::string& table, int rank);
  void place();

  // Constant after construction.
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  std::vector<Piece> pieces_;  // pieces of the stream, in order
  size_t bytes_ = 0;
  std::string table_;

  // Constant after route.
  std::vector<Entry> incoming_;  // for each rank, this rank's entry in its table
  std::vector<uint8_t*> to_;     // for each rank, the address to which its bytes are copied
  bool stream_ = false;          // whether to write past the cache (see Kernels::Copy)
};

}  // namespace dadt
