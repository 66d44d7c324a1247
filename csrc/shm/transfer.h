#pragma once

#include <string_view>

#include "engine/head.h"
#include "shm/chunk_slots.h"
#include "shm/exchange.h"

namespace dadt {

// One operation on its way through a ChunkSlots. Every rank's stream is its lane, padded, and then its
// tensors one after the other; it is cut into chunks of equal size. An exchange's lane is its table, so that
// all know what is where before the first byte of it comes. Engine thread only.
class Transfer {
 public:
  // first: the first chunk's number. slot_bytes: room for a chunk.
  Transfer(ChunkSlots& ring, const Operation& operation, int rank, int world_size, uint32_t first,
           size_t slot_bytes, double timeout);

  // Blocks until this rank has all it needs. Throws Error.
  Result run();

  // Chunks of this operation; after run.
  uint32_t chunks() const { return chunks_; }

 private:
  enum class Move { kPack, kReduce, kDeliver, kNone };

  // A chunk's part of the lane in bytes and of the tensors in items, and where the latter lie in the slot.
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

  // Constant after construction.
  ChunkSlots& ring_;
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  const uint32_t first_;
  const size_t slot_bytes_;
  const double timeout_;
  const Codec codec_;
  const size_t item_;  // bytes of what is never divided: an element, or a block of compressed ones
  Exchange exchange_;
  const std::string_view lane_;
  const bool two_phase_;  // each rank reduces its share of a chunk for all, instead of all of it for itself
  const bool stream_;

  // Known when all heads are read.
  std::optional<Shares> shares_;

  size_t lane_room_ = 0;   // bytes before the tensors in the stream
  size_t data_bytes_ = 0;  // of the tensors; of an exchange, in the longest stream
  size_t chunk_bytes_ = 0;
  uint32_t chunks_ = 0;
  uint32_t packed_ = 0;
  uint32_t reduced_ = 0;
  uint32_t delivered_ = 0;
  Result result_;
};

}  // namespace dadt
