#pragma once

#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// The layout of an exchange through shared memory. A rank's stream contains the bytes for each other rank,
// beginning with the next rank, so that the ranks do not all read the same rank's stream at once. Bytes that
// the rank sends to several ranks are in its stream once.
class Exchange {
 public:
  // For an operation that is not an exchange, the layout is empty.
  Exchange(const Operation& operation, int rank, int world_size);

  // Returns the number of bytes of this rank's stream.
  size_t bytes() const { return bytes_; }
  // Returns the table that this rank sends to its peers: where in its stream the bytes for each peer are, and
  // how many bytes it expects from each.
  const std::string& table() const { return table_; }

  // Reads the tables of all ranks, and allocates memory in `result` if the operation has no outputs. Throws
  // the same Error(kMismatch) on all ranks if a rank expects another number of bytes than it is sent.
  void route(const std::vector<std::string>& tables, Result& result);

  // Copies bytes [begin, end) of this rank's stream to `slot`.
  void pack(void* slot, size_t begin, size_t end) const;

  // Copies those of bytes [begin, end) of a rank's stream that are for this rank to the output. Call it after
  // `route`.
  void deliver(int rank, const void* slot, size_t begin, size_t end) const;

  // Copies the bytes that this rank sends to itself, unless they are in its stream.
  void deliver_own() const;

 private:
  static constexpr uint64_t kUnknown = ~uint64_t{0};

  // The entry for one rank in another rank's table.
  struct Entry {
    uint64_t offset;    // position of the bytes in the stream; kUnknown if they are not in it
    uint64_t bytes;     // number of bytes sent to that rank
    uint64_t expected;  // number of bytes expected from that rank; kUnknown for any number
  };
  struct Piece {
    const uint8_t* data;
    size_t offset, bytes;
  };

  static Entry entry(const std::string& table, int rank);
  void place();

  // The following fields are constant after construction.
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  std::vector<Piece> pieces_;  // pieces of the stream, in order
  size_t bytes_ = 0;
  std::string table_;

  // The following fields are constant after `route`.
  std::vector<Entry> incoming_;  // for each rank, this rank's entry in its table
  std::vector<uint8_t*> to_;     // for each rank, the address to which its bytes are copied
  bool stream_ = false;          // whether to write past the cache (see Kernels::Copy)
};

}  // namespace dadt
