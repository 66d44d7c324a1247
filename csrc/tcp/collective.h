#pragma once

#include <sys/uio.h>

#include <cstring>
#include <string>
#include <vector>

#include "engine/compress.h"
#include "tcp/greetings.h"
#include "tcp/parts.h"

namespace dadt {

constexpr size_t kAhead = 2;         // pieces of a rank that may come before they are summed
constexpr size_t kAtOnce = 1 << 20;  // bytes of a call of the kernel

// Memory that the operations of an executor use one after the other, as large as any of them has needed.
class Scratch {
 public:
  uint8_t* take(size_t bytes, bool zeros = false) {
    if (memory_ == nullptr || memory_->bytes < bytes) {
      memory_ = std::make_unique<Buffer>(bytes);
      if (zeros) std::memset(memory_->data.get(), 0, bytes);
    }
    return memory_->data.get();
  }

 private:
  std::unique_ptr<Buffer> memory_;
};

struct CollectiveMemory {
  Scratch slots, wires, copy, combined, reduced;
  Scratch zeros, sink;  // in place of tensors that are not there
};

// One operation of all ranks over TCP. To each other rank goes a head, its lane, and then data in two phases.
//
// Allreduce: each rank owns a part of the values, which is smaller where its link is slower. In phase 1 a
// rank sends to each owner what it has of that one's part; the owner sums pieces in the order of the ranks
// while they are in its cache, and sends the sums to all in phase 2. Of few values each rank is sent all, and
// sums all; there is no phase 2 then. Broadcast: the root sends each rank its part in phase 1, and that one
// passes it on in phase 2. Exchange: the bytes for a rank are phase 1; its lane says how many it sends to and
// expects from each. Allgather: a lane is all there is.
//
// Phase 1 waits for nobody, and phase 2 for no more than phase 1. Engine thread only.
class Collective {
 public:
  // number: of the operation.
  Collective(Links& links, CollectiveMemory& memory, Parts& parts, const Operation& operation,
             uint32_t number, double timeout);

  // Blocks until this rank has all it needs, and has handed all it sends to the kernel. Throws Error.
  Result run();

 private:
  // In items: elements, or blocks of compressed ones.
  struct Range {
    size_t begin, end;
    size_t count() const { return end - begin; }
  };

  struct Peer {
    size_t send_first = 0, send_second = 0;
    bool is_full = false;  // the kernel takes no more at the moment

    size_t first = 0, second = 0;                  // what has come of the data
    size_t receive_first = 0, receive_second = 0;  // what will come
    size_t consumed = 0;                           // pieces of what has come that are not needed any more
  };

  Range part(int owner) const;
  size_t bytes_of(int owner) const { return part(owner).count() * item_; }
  uint8_t* output_bytes(int rank) const;

  void divide();
  void prepare();
  void copy_values();
  void measure();

  size_t sendable(int rank) const;
  bool write(int rank);
  void collect(int rank, size_t at);
  void settle();
  void add(const void* data, size_t bytes);
  template <typename Pointer>
  void add_tensors(const std::vector<Pointer>& tensors, size_t begin, size_t end, void* missing);
  void encode(int owner, size_t items);

  bool read(int rank);
  void greeted();
  void place_first(int rank);
  void place_second(int rank);
  void add_slots(int rank, size_t piece, size_t at, size_t bytes);
  size_t readable(int rank) const;

  bool advance();
  bool reduce_piece();
  void reduce_plain(Range piece);
  void reduce_coded(Range piece);
  bool decode_piece(int rank);
  const uint8_t* slot_of(int rank, size_t piece) const;

  bool is_done() const;
  void wait();
  std::vector<int> awaited() const;

  // Constant after construction.
  Links& links_;
  CollectiveMemory& memory_;
  Parts& parts_;
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  const double timeout_;
  const std::string title_;
  const Codec codec_;
  const size_t item_;
  const size_t total_;         // items
  const bool direct_;          // each rank is sent all, and sums all
  const size_t piece_;         // items that are summed at once
  std::vector<size_t> edges_;  // of the ranks' parts
  bool has_holes_ = false;     // some of the outputs are not wanted

  uint8_t* slots_ = nullptr;     // by rank: pieces that have come and are not consumed
  uint8_t* wires_ = nullptr;     // this rank's values, compressed
  uint8_t* copy_ = nullptr;      // or as they are, where sums take their place before all have them
  uint8_t* combined_ = nullptr;  // the sums of its part, compressed
  uint8_t* reduced_ = nullptr;   // or not, where outputs have holes

  Greetings greetings_;
  std::vector<Peer> peers_;
  std::vector<size_t> encoded_;  // by owner: items of its part
  std::optional<Shares> shares_;
  size_t pieces_ = 0;  // of this rank's part, all of them
  size_t done_ = 0;    // of those summed
  size_t ready_ = 0;   // bytes of this rank's part that may go out in phase 2
  std::vector<iovec> vectors_;
  size_t gathered_ = 0;  // bytes in them
  std::vector<Links::Interest> interests_;
  Clock::time_point moved_at_{};  // when something has last gone in or out
  Clock::time_point begun_{};
  std::vector<double> held_up_;  // by rank, as it began; empty: its parts are equal whatever the links
  Result result_;
};

}  // namespace dadt
