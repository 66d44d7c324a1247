#pragma once

#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// The layout of an exchange. A rank's stream holds the bytes for each rank, its own left out and the
// next one's first, so that the readers of equal pieces take turns. Bytes that several ranks get are there
// once.
class Exchange {
 public:
  // Empty for any other kind of operation.
  Exchange(const Operation& operation, int rank, int world_size);

  // Bytes of this rank's stream.
  size_t bytes() const { return bytes_; }
  // The table for the peers: where in this rank's stream their bytes are, and what it expects.
  const std::string& table() const { return table_; }

  // Takes all ranks' tables, and makes room in `result` where the operation has none. Throws
  // Error(kMismatch), the same on all ranks.
  void route(const std::vector<std::string>& tables, Result& result);

  // Writes bytes [begin, end) of this rank's stream.
  void pack(void* slot, size_t begin, size_t end) const;

  // Takes what is this rank's in bytes [begin, end) of a rank's stream; after route.
  void deliver(int rank, const void* slot, size_t begin, size_t end) const;

  // Copies the rank's own bytes where they are not in its stream.
  void deliver_own() const;

 private:
  static constexpr uint64_t kUnknown = ~uint64_t{0};

  // A rank's entry in the table of another.
  struct Entry {
    uint64_t offset;    // kUnknown: not in the stream
    uint64_t bytes;     // to that rank
    uint64_t expected;  // from that rank; kUnknown: whatever comes
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
  std::vector<Piece> pieces_;  // of the stream, in order
  size_t bytes_ = 0;
  std::string table_;

  // Constant after route.
  std::vector<Entry> incoming_;  // what each rank's table says of this one
  std::vector<uint8_t*> to_;     // where it goes
  bool stream_ = false;          // see Kernels::Copy
};

}  // namespace dadt
