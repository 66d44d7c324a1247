#pragma once

#include <sys/uio.h>

#include <cstring>
#include <string>
#include <vector>

#include "engine/compress.h"
#include "tcp/greetings.h"
#include "tcp/link_speed.h"
#include "tcp/parts.h"
#include "tcp/ways.h"

namespace dadt {

constexpr size_t kAhead = 2;         // number of a rank's pieces that may arrive before they are summed
constexpr size_t kAtOnce = 1 << 20;  // most bytes in one system call

// Memory that the operations of an executor reuse one after the other. It grows to the size that the largest
// operation has needed.
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
  Scratch zeros, sink;  // stand for tensors whose address is null: inputs read zeros, outputs go to sink
};

// Runs one operation of all ranks over TCP. Each rank sends a header, its lane (bytes sent along with the
// operation), and then data in two phases to every other rank.
//
// Allreduce: each rank owns a part of the values, which is smaller for ranks with slower links. In phase 1
// each rank sends its values of each part to the part's owner. The owner sums them piece by piece, in the
// order of ranks and while they are in its cache, and sends the sums to all ranks in phase 2. Small
// operations have no phase 2: each rank sends all its values to every rank, which sums them. In several
// groups (see Ways), each rank owns a part among the ranks of its group, and passes the sums so far on to the
// rank with the same place in the next group; the last group's results come back the same way. Broadcast: the
// root sends each rank a part in phase 1, which the rank sends on to all others in phase 2. Exchange: the
// bytes for each rank are sent in phase 1; the lane contains how many bytes a rank sends to and expects from
// each other rank. Allgather: only the lane is sent.
//
// What a rank sends in phase 1 depends on no other rank, and what it sends in phase 2 only on phase 1, so
// ranks cannot deadlock. Only the engine's thread may use it.
class Collective {
 public:
  // number: number of the operation on this executor, which must be equal on all ranks.
  Collective(Links& links, CollectiveMemory& memory, Parts& parts, Ways& ways, const Operation& operation,
             uint32_t number, double timeout);

  // Blocks until this rank has received all data, and the kernel has accepted all data that it sends. Throws
  // Error.
  Result run();

 private:
  // A range of items, which are elements or compressed blocks.
  struct Range {
    size_t begin, end;
    size_t count() const { return end - begin; }
  };

  struct Peer {
    size_t send_first = 0, send_second = 0;
    bool is_full = false;  // whether the kernel accepts no more bytes at the moment

    size_t first = 0, second = 0;                  // bytes received in each phase
    size_t receive_first = 0, receive_second = 0;  // bytes to receive in each phase
    size_t consumed = 0;                           // number of received pieces that are no longer needed
  };

  // The ranks with the same place in the groups before and after this rank's.
  int earlier() const { return rank_ - group_; }
  int later() const { return rank_ + group_; }
  bool has_earlier() const { return earlier() >= 0; }
  bool has_later() const { return later() < world_size_; }
  int place_of(int rank) const { return rank % group_; }
  bool is_in_group(int rank) const { return rank / group_ == rank_ / group_; }

  Range part(int owner) const;
  size_t bytes_of(int owner) const { return part(owner).count() * item_; }
  uint8_t* output_bytes(int rank) const;

  void divide();
  void prepare();
  void prepare_sums();
  void copy_values();
  void measure();
  void note(size_t bytes);

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
  bool has_room() const;
  void add_sums(size_t begin, size_t end);
  void hand_out();
  void reduce_coded(Range piece);
  bool decode_piece(int rank);
  const uint8_t* slot_of(int rank, size_t piece) const;

  bool is_done() const;
  void wait();
  std::vector<int> awaited() const;

  // The following fields are constant after construction.
  Links& links_;
  CollectiveMemory& memory_;
  Parts& parts_;
  Ways& ways_;
  const Operation& operation_;
  const int rank_;
  const int world_size_;
  const double timeout_;
  const std::string title_;
  const Codec codec_;
  const size_t item_;
  const size_t total_;         // number of items
  const bool direct_;          // whether each rank receives all values and sums them itself
  const bool is_large_;        // whether it may go in several groups
  const int group_;            // number of ranks in a group
  const size_t piece_;         // number of items that are summed at once
  std::vector<size_t> edges_;  // first item of the part of each rank in a group, and the end
  bool has_holes_ = false;     // whether some outputs are discarded

  uint8_t* slots_ = nullptr;     // received pieces of each rank that are still needed
  uint8_t* wires_ = nullptr;     // this rank's compressed values
  uint8_t* copy_ = nullptr;      // copy of this rank's values, if sums overwrite them before all are sent
  uint8_t* combined_ = nullptr;  // the compressed sums of this rank's part
  uint8_t* reduced_ = nullptr;   // the uncompressed sums of this rank's part, if some outputs are discarded

  Greetings greetings_;
  std::vector<Peer> peers_;
  std::vector<size_t> encoded_;  // number of encoded items, by the owner of the part
  std::optional<Shares> shares_;
  size_t pieces_ = 0;  // number of pieces in this rank's part
  size_t done_ = 0;    // number of pieces summed so far
  size_t passed_ = 0;  // bytes of the sums so far that may be sent to the next group
  size_t ready_ = 0;   // bytes of this rank's part that may be sent in phase 2
  std::vector<iovec> vectors_;
  size_t gathered_ = 0;  // number of bytes in `vectors_`
  std::vector<Links::Interest> interests_;
  Clock::time_point moved_at_{};  // time at which bytes were last sent or received
  Clock::time_point begun_{};
  std::optional<LinkSpeed> speed_;  // speed of this rank's link, if the operation measures it
  uint64_t unrecorded_ = 0;         // bytes sent and received since `speed_` was last recorded
  Result result_;
};

}  // namespace dadt
