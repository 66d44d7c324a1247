#pragma once

#include <string_view>

#include "engine/head.h"
#include "shm/chunk_slots.h"
#include "shm/exchange.h"

namespace dadt {

// Runs one operation through a ChunkSlots. Every rank's stream consists of its lane (bytes sent along with
// the operation), padded, and its tensors one after the other, divided into chunks of equal size. In an
// exchange the lane is the table of the layout (Exchange::table), so that all ranks know the layout before
// the data arrives. Only the engine's thread may use it.
class Transfer {
 public:
  // first: number of the operation's first chunk in the ranks' streams. slot_bytes: most bytes of a chunk.
  Transfer(ChunkSlots& ring, const Operation& operation, int rank, int world_size, uint32_t first,
           size_t slot_bytes, double timeout);

  // Blocks until this rank has received everything it needs. Throws Error.
  Result run();

  // Returns the number of chunks of this operation, after `run`.
  uint32_t chunks() const { return chunks_; }

 private:
  enum class Move { kPack, kReduce, kDeliver, kNone };

  // The content of a chunk: a range of the lane in bytes, a range of the tensors in items, and the offset in
  // the slot at which the tensors' range begins.
  struct Extent {
    size_t lane_begin, lane_end, begin, end, slot_offset;
    size_t count() const { return end - begin; }
  };

  Extent extent(uint32_t chunk) const;
  void plan(size_t lane_bytes, size_t data_bytes);
  void write_head();
  void read_heads();

  Move next_move() const;
  bool lags(int rank) const;
  void wait_for_heads();

  void pack();
  void reduce();
  void deliver();
  void deliver_lanes(const Extent& extent);
  void deliver_exchange(const Extent& extent);
  void decompress_all(const Extent& extent);
  void reduce_to(void* destination, const Extent& extent, size_t offset, size_t count, bool stream) const;
  std::pair<size_t, size_t> share(const Extent& extent, int rank) const;

  // The following fields are constant after construction.
  ChunkSlots& ring_;
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  const uint32_t first_;
  const size_t slot_bytes_;
  const double timeout_;
  const Codec codec_;
  const size_t item_;  // bytes of an item: an element or a compressed block, which lies in one chunk
  Exchange exchange_;
  const std::string_view lane_;
  // Whether each rank reduces its share of a chunk for all ranks, instead of the whole chunk for itself.
  const bool two_phase_;
  const bool stream_;

  // Known once the headers of all ranks have been read.
  std::optional<Shares> shares_;

  size_t lane_room_ = 0;   // bytes that precede the tensors in the stream
  size_t data_bytes_ = 0;  // bytes of the tensors; in an exchange, bytes of the longest stream
  size_t chunk_bytes_ = 0;
  uint32_t chunks_ = 0;
  uint32_t packed_ = 0;
  uint32_t reduced_ = 0;
  uint32_t delivered_ = 0;
  Result result_;
};

}  // namespace dadt
