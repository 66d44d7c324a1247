// Methods of Collective that send data to and receive it from the other ranks.
#include <cstring>

#include "tcp/collective.h"

namespace dadt {
namespace {

constexpr size_t kVectors = 64;

}  // namespace

// Sending -------------------------------------------------------------------------------------------------

void Collective::add(const void* data, size_t bytes) {
  bytes = std::min(bytes, kAtOnce - gathered_);
  if (bytes == 0) return;
  vectors_.push_back({const_cast<void*>(data), bytes});
  gathered_ += bytes;
}

// Adds the memory of bytes [begin, end) of the tensors, one after the other, to vectors_. missing: memory
// that stands for a tensor whose address is null.
template <typename Pointer>
void Collective::add_tensors(const std::vector<Pointer>& tensors, size_t begin, size_t end, void* missing) {
  end = std::min(end, begin + kAtOnce - gathered_);
  if (begin >= end) return;
  operation_.layout.pieces(
      begin / item_, (end + item_ - 1) / item_, [&](size_t tensor, size_t offset, size_t at, size_t count) {
        if (vectors_.size() >= kVectors || gathered_ >= kAtOnce) return;
        const size_t first = begin / item_ * item_ + at * item_;  // offset of this piece in the bucket
        const size_t from = std::max(first, begin);
        const size_t to = std::min(first + count * item_, end);
        const uint8_t* memory = static_cast<const uint8_t*>(tensors[tensor]);
        add(memory == nullptr ? missing : memory + offset * item_ + (from - first), to - from);
      });
}

// Encodes this rank's values of an owner's part, up to `items` items.
void Collective::encode(int owner, size_t items) {
  size_t& encoded = encoded_[direct_ ? 0 : owner];
  if (encoded >= items) return;
  const size_t first = part(owner).begin;
  compress(operation_, first + encoded, first + items, wires_ + (first + encoded) * item_);
  encoded = items;
}

// Collects in vectors_ the memory of the bytes for a rank, from offset `at` on and as far as they are ready
// to be sent.
void Collective::collect(int rank, size_t at) {
  const Peer& peer = peers_[rank];
  vectors_.clear();
  gathered_ = 0;
  const std::string& greeting = greetings_.mine();
  if (at < greeting.size()) add(greeting.data() + at, greeting.size() - at);
  at = std::max(at, greeting.size()) - greeting.size();
  if (rank == later() && at < peer.send_first) return add_sums(at, passed_);
  if (at < peer.send_first) {
    if (operation_.kind == Kind::kExchange) {
      add(static_cast<const uint8_t*>(operation_.inputs[rank]) + at, peer.send_first - at);
    } else if (copy_ != nullptr) {
      add(copy_ + at, peer.send_first - at);
    } else if (codec_ == Codec::kNone) {
      const size_t begin = part(rank).begin * item_;
      add_tensors(operation_.inputs, begin + at, begin + peer.send_first, memory_.zeros.take(kAtOnce, true));
    } else {
      const size_t items = part(rank).count();
      encode(rank, std::min(items, (at / item_ / piece_ + 1) * piece_));
      const size_t bytes = encoded_[direct_ ? 0 : rank] * item_;
      add(wires_ + part(rank).begin * item_ + at, bytes - at);
      return;  // data of phase 2 is collected only once these bytes are sent
    }
    if (vectors_.size() >= kVectors || gathered_ >= kAtOnce) return;
  }
  at = std::max(at, peer.send_first) - peer.send_first;
  const size_t ready = std::min(ready_, peer.send_second);
  if (at >= ready) return;
  if (combined_ != nullptr) {
    add(combined_ + at, ready - at);
  } else {
    add_sums(at, ready);
  }
}

// Adds bytes [begin, end) of the sums of this rank's part to vectors_. The memory of the results also holds
// the sums so far: a piece of the results comes back only after these were received.
void Collective::add_sums(size_t begin, size_t end) {
  if (begin >= end) return;
  if (reduced_ != nullptr) return add(reduced_ + begin, end - begin);
  const size_t first = part(rank_).begin * item_;
  add_tensors(operation_.outputs, first + begin, first + end, nullptr);
}

// Returns the number of bytes for a rank that are ready to be sent.
size_t Collective::sendable(int rank) const {
  const Peer& peer = peers_[rank];
  const size_t first = rank == later() ? std::min(passed_, peer.send_first) : peer.send_first;
  return greetings_.mine().size() + first + std::min(ready_, peer.send_second);
}

bool Collective::write(int rank) {
  Peer& peer = peers_[rank];
  if (links_.sent(rank) == sendable(rank)) {
    peer.is_full = !links_.flush(rank, title_);
    return false;
  }
  collect(rank, links_.sent(rank));
  if (vectors_.empty()) return false;
  const size_t count = links_.send(rank, vectors_, title_);
  peer.is_full = count < gathered_ || (links_.sent(rank) == sendable(rank) && !links_.flush(rank, title_));
  note(count);
  return count > 0;
}

// Called at the operation's end: for each rank, stores a copy of the bytes that it may not have received, to
// send them again if a connection breaks. Values of phase 1 need no copy, since a rank has received all of
// them before it sends its sums.
void Collective::settle() {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    size_t lacks = links_.unacknowledged(rank);
    if (operation_.kind == Kind::kAllreduce && !direct_) lacks = std::min(lacks, peers_[rank].send_second);
    std::string tail;
    tail.reserve(lacks);
    for (size_t at = links_.sent(rank) - lacks; tail.size() < lacks; at += gathered_) {
      collect(rank, at);
      for (const iovec& part : vectors_) tail.append(static_cast<const char*>(part.iov_base), part.iov_len);
    }
    links_.settle(rank, std::move(tail));
  }
}

// Receiving -----------------------------------------------------------------------------------------------

const uint8_t* Collective::slot_of(int rank, size_t piece) const {
  const size_t slot = static_cast<size_t>(rank) * kAhead + piece % kAhead;
  return slots_ + slot * piece_ * item_;
}

// Returns how many bytes this rank can receive from another one now: those for which it has memory, and which
// the other rank sends without waiting for this one.
size_t Collective::readable(int rank) const {
  const Peer& peer = peers_[rank];
  if (!greetings_.has(rank)) return greetings_.missing(rank);
  const size_t piece = piece_ * item_;
  if (peer.first < peer.receive_first) {
    if (operation_.kind == Kind::kExchange) return greetings_.has_all() ? peer.receive_first - peer.first : 0;
    if (operation_.kind == Kind::kBroadcast) return peer.receive_first - peer.first;
    return std::min(peer.receive_first, (done_ + kAhead) * piece) - peer.first;
  }
  if (combined_ == nullptr) return peer.receive_second - peer.second;
  // Pieces of phase 2 use the slots of the pieces of phase 1.
  const size_t free = done_ + peer.consumed + kAhead;
  const size_t limit = free > pieces_ ? std::min(peer.receive_second, (free - pieces_) * piece) : 0;
  return limit > peer.second ? limit - peer.second : 0;
}

bool Collective::read(int rank) {
  Peer& peer = peers_[rank];
  if (!greetings_.has(rank)) {
    if (!greetings_.read(rank)) return false;
    moved_at_ = Clock::now();
    if (greetings_.has_all()) greeted();
    return true;
  }
  vectors_.clear();
  gathered_ = 0;
  const bool is_first = peer.first < peer.receive_first;
  if (is_first) {
    place_first(rank);
  } else {
    place_second(rank);
  }
  if (vectors_.empty()) return false;
  const size_t count = links_.receive(rank, vectors_, title_);
  (is_first ? peer.first : peer.second) += count;
  if (is_first && operation_.kind == Kind::kBroadcast) ready_ = peer.first;
  if (!is_first && rank == later()) ready_ = peer.second;
  note(count);
  return count > 0;
}

// Handles the headers and lanes of all ranks, once they have arrived.
void Collective::greeted() {
  result_.waited = seconds_between(begun_, Clock::now());
  if (operation_.kind == Kind::kAllreduce) {
    shares_.emplace(operation_, greetings_.weights());
    result_.weight_sum = shares_->sum;
  }
  if (operation_.kind != Kind::kExchange) return;
  for (int rank = 0; rank < world_size_; ++rank) {
    const size_t bytes = greetings_.bytes_from(rank);
    if (operation_.outputs.empty()) result_.received.emplace_back(bytes);
    if (rank != rank_) peers_[rank].receive_first = bytes;
  }
}

// Adds the memory of the slots for the next bytes from a rank to vectors_. piece: number of the first piece
// of this phase. at: bytes of this phase that have already arrived.
void Collective::add_slots(int rank, size_t piece, size_t at, size_t bytes) {
  const size_t whole = piece_ * item_;
  for (const size_t end = at + bytes; at < end;) {
    const size_t some = std::min(end - at, whole - at % whole);
    add(slot_of(rank, piece + at / whole) + at % whole, some);
    at += some;
  }
}

void Collective::place_first(int rank) {
  Peer& peer = peers_[rank];
  const size_t bytes = readable(rank);
  if (operation_.kind == Kind::kExchange) return add(output_bytes(rank) + peer.first, bytes);
  if (operation_.kind == Kind::kBroadcast) {
    const size_t begin = part(rank_).begin * item_ + peer.first;
    return add_tensors(operation_.outputs, begin, begin + bytes, nullptr);
  }
  add_slots(rank, 0, peer.first, bytes);
}

void Collective::place_second(int rank) {
  Peer& peer = peers_[rank];
  const size_t bytes = readable(rank);
  if (rank == later()) return add_sums(peer.second, peer.second + bytes);
  if (combined_ == nullptr) {
    const size_t begin = part(rank).begin * item_ + peer.second;
    return add_tensors(operation_.outputs, begin, begin + bytes, memory_.sink.take(kAtOnce));
  }
  add_slots(rank, pieces_, peer.second, bytes);
}

}  // namespace dadt
