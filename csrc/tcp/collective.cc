#include "tcp/collective.h"

#include <poll.h>

#include <cstring>

#include "engine/executor.h"
#include "kernels/kernels.h"

namespace dadt {
namespace {

constexpr size_t kPieceBytes = 256 * 1024;
constexpr size_t kAhead = 2;                // pieces of a rank that may come before they are summed
constexpr size_t kDirectBytes = 64 * 1024;  // that a rank sends in all, up to which it sends all to each
constexpr size_t kAtOnce = 1 << 20;         // bytes of a call of the kernel
constexpr size_t kVectors = 64;
constexpr size_t kUnknown = ~size_t{0};

bool is_direct(const Operation& operation, size_t bytes, int world_size) {
  const bool parted = operation.kind == Kind::kAllreduce || operation.kind == Kind::kBroadcast;
  return !parted || bytes * static_cast<size_t>(world_size - 1) <= kDirectBytes;
}

}  // namespace

Collective::Collective(Links& links, CollectiveMemory& memory, const Operation& operation, uint32_t number,
                       double timeout)
    : links_(links),
      memory_(memory),
      operation_(operation),
      rank_(links.rank()),
      world_size_(links.world_size()),
      timeout_(timeout),
      title_(operation.title()),
      codec_(operation.compression.codec),
      item_(codec_ == Codec::kNone ? item_size(operation.layout.dtype()) : block_bytes(codec_)),
      total_(codec_ == Codec::kNone ? operation.layout.total() : block_count(operation.layout.total())),
      direct_(is_direct(operation, total_ * item_, world_size_)),
      piece_(std::max<size_t>(1, kPieceBytes / item_)),
      greetings_(links, operation, number),
      peers_(world_size_),
      encoded_(world_size_) {
  prepare();
}

// The part of the values that a rank sums for all, in whole cache lines.
Collective::Range Collective::part(int owner) const {
  if (direct_) return {0, total_};
  const size_t line = std::max<size_t>(1, 64 / item_);
  const size_t lines = (total_ + line - 1) / line;
  const auto edge = [&](int rank) {
    return std::min(lines * static_cast<size_t>(rank) / static_cast<size_t>(world_size_) * line, total_);
  };
  return {edge(owner), edge(owner + 1)};
}

// What goes to whom, and what memory that takes.
void Collective::prepare() {
  const bool reduces = operation_.kind == Kind::kAllreduce;
  const size_t mine = bytes_of(rank_);
  for (int rank = 0; rank < world_size_; ++rank) {
    Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    if (reduces) {
      peer.send_first = bytes_of(rank);
      peer.receive_first = mine;
    } else if (operation_.kind == Kind::kBroadcast) {
      if (operation_.root == rank_) peer.send_first = bytes_of(rank);
      if (operation_.root == rank) peer.receive_first = mine;
    } else if (operation_.kind == Kind::kExchange) {
      peer.send_first = operation_.layout.counts()[rank];
      peer.receive_first = kUnknown;  // its table says it
    }
    if (direct_ || (operation_.kind == Kind::kBroadcast && operation_.root == rank_)) {
      if (!direct_) peer.send_second = mine;
      continue;
    }
    peer.receive_second = bytes_of(rank);
    if (reduces || operation_.root != rank) peer.send_second = mine;
  }
  if (operation_.kind == Kind::kBroadcast && operation_.root == rank_) ready_ = mine;
  if (!reduces) return;
  pieces_ = (part(rank_).count() + piece_ - 1) / piece_;
  has_holes_ = std::ranges::any_of(operation_.outputs, [](const void* output) { return output == nullptr; });
  slots_ = memory_.slots.take(static_cast<size_t>(world_size_) * kAhead * piece_ * item_);
  if (codec_ != Codec::kNone) {
    wires_ = memory_.wires.take(total_ * item_);
    if (!direct_) combined_ = memory_.combined.take(mine);
  } else if (has_holes_ && !direct_) {
    reduced_ = memory_.reduced.take(mine);
  }
}

Result Collective::run() {
  begun_ = moved_at_ = Clock::now();
  links_.check_aborted();
  while (true) {
    bool moved = false;
    for (int step = 1; step < world_size_; ++step) {
      const int rank = (rank_ + step) % world_size_;
      if (!peers_[rank].is_full) moved |= write(rank);
    }
    if (result_.packed == Clock::time_point{}) result_.packed = Clock::now();
    moved |= advance();
    if (is_done()) break;
    if (!moved) wait();
  }
  for (Peer& peer : peers_) {
    if (operation_.kind == Kind::kAllreduce) result_.sent += peer.send_first + peer.send_second;
  }
  if (operation_.kind == Kind::kAllreduce) {
    const size_t ranks = static_cast<size_t>(world_size_);
    result_.plain = (ranks - 1) * operation_.plain_bytes() * (direct_ ? 1 : 2) / (direct_ ? 1 : ranks);
  } else if (operation_.kind == Kind::kExchange) {
    uint8_t* to = output_bytes(rank_);
    const size_t bytes = operation_.layout.counts()[rank_];
    if (bytes > 0 && to != operation_.inputs[rank_]) std::memcpy(to, operation_.inputs[rank_], bytes);
  }
  if (operation_.kind == Kind::kAllreduce || operation_.kind == Kind::kAllgather)
    result_.lanes = greetings_.take_lanes();
  result_.seconds = seconds_between(begun_, Clock::now()) - result_.waited;
  return std::move(result_);
}

uint8_t* Collective::output_bytes(int rank) const {
  return operation_.outputs.empty() ? result_.received[rank].data.get()
                                    : static_cast<uint8_t*>(operation_.outputs[rank]);
}

// Sending -------------------------------------------------------------------------------------------------

void Collective::add(const void* data, size_t bytes) {
  bytes = std::min(bytes, kAtOnce - gathered_);
  if (bytes == 0) return;
  vectors_.push_back({const_cast<void*>(data), bytes});
  gathered_ += bytes;
}

// Bytes [begin, end) of the tensors, one after the other. missing: memory in place of a tensor that is null.
template <typename Pointer>
void Collective::add_tensors(const std::vector<Pointer>& tensors, size_t begin, size_t end, void* missing) {
  end = std::min(end, begin + kAtOnce - gathered_);
  if (begin >= end) return;
  operation_.layout.pieces(
      begin / item_, (end + item_ - 1) / item_, [&](size_t tensor, size_t offset, size_t at, size_t count) {
        if (vectors_.size() >= kVectors || gathered_ >= kAtOnce) return;
        const size_t first = begin / item_ * item_ + at * item_;  // of these bytes in the bucket
        const size_t from = std::max(first, begin);
        const size_t to = std::min(first + count * item_, end);
        const uint8_t* memory = static_cast<const uint8_t*>(tensors[tensor]);
        add(memory == nullptr ? missing : memory + offset * item_ + (from - first), to - from);
      });
}

// The values of an owner's part, up to so many items, to the wire.
void Collective::encode(int owner, size_t items) {
  size_t& encoded = encoded_[direct_ ? 0 : owner];
  if (encoded >= items) return;
  const size_t first = part(owner).begin;
  compress(operation_, first + encoded, first + items, wires_ + (first + encoded) * item_);
  encoded = items;
}

// What goes to a rank next, as far as it is there.
void Collective::collect(int rank) {
  Peer& peer = peers_[rank];
  vectors_.clear();
  gathered_ = 0;
  size_t at = peer.sent;
  const std::string& greeting = greetings_.mine();
  if (at < greeting.size()) add(greeting.data() + at, greeting.size() - at);
  at = std::max(at, greeting.size()) - greeting.size();
  if (at < peer.send_first) {
    if (operation_.kind == Kind::kExchange) {
      add(static_cast<const uint8_t*>(operation_.inputs[rank]) + at, peer.send_first - at);
    } else if (codec_ == Codec::kNone) {
      const size_t begin = part(rank).begin * item_;
      add_tensors(operation_.inputs, begin + at, begin + peer.send_first, memory_.zeros.take(kAtOnce, true));
    } else {
      const size_t items = part(rank).count();
      encode(rank, std::min(items, (at / item_ / piece_ + 1) * piece_));
      const size_t bytes = encoded_[direct_ ? 0 : rank] * item_;
      add(wires_ + part(rank).begin * item_ + at, bytes - at);
      return;  // what follows waits until that has gone
    }
    if (vectors_.size() >= kVectors || gathered_ >= kAtOnce) return;
  }
  at = std::max(at, peer.send_first) - peer.send_first;
  const size_t ready = std::min(ready_, peer.send_second);
  if (at >= ready) return;
  if (combined_ != nullptr || reduced_ != nullptr) {
    add((combined_ != nullptr ? combined_ : reduced_) + at, ready - at);
  } else {
    const size_t begin = part(rank_).begin * item_;
    add_tensors(operation_.outputs, begin + at, begin + ready, nullptr);
  }
}

bool Collective::write(int rank) {
  Peer& peer = peers_[rank];
  if (peer.sent == greetings_.mine().size() + peer.send_first + std::min(ready_, peer.send_second))
    return false;
  collect(rank);
  if (vectors_.empty()) return false;
  const size_t count = links_.send(rank, vectors_, title_);
  peer.sent += count;
  peer.is_full = count < gathered_;
  if (count > 0) moved_at_ = Clock::now();
  return count > 0;
}

// Receiving -----------------------------------------------------------------------------------------------

const uint8_t* Collective::slot_of(int rank, size_t piece) const {
  const size_t slot = static_cast<size_t>(rank) * kAhead + piece % kAhead;
  return slots_ + slot * piece_ * item_;
}

// Bytes that may be read from a rank now, all of which it sends without waiting for this one.
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
  // Pieces of phase 2 take the places of those of phase 1.
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
  if (count > 0) moved_at_ = Clock::now();
  return count > 0;
}

// All ranks have come.
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

// Bytes of pieces that come from a rank, into its slots. piece: the first one that comes in this phase.
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
  if (combined_ == nullptr) {
    const size_t begin = part(rank).begin * item_ + peer.second;
    return add_tensors(operation_.outputs, begin, begin + bytes, memory_.sink.take(kAtOnce));
  }
  add_slots(rank, pieces_, peer.second, bytes);
}

// Summing -------------------------------------------------------------------------------------------------

bool Collective::advance() {
  if (operation_.kind != Kind::kAllreduce || !greetings_.has_all()) return false;
  bool moved = false;
  while (reduce_piece()) moved = true;
  if (combined_ == nullptr) return moved;
  for (int rank = 0; rank < world_size_; ++rank) {
    while (rank != rank_ && decode_piece(rank)) moved = true;
  }
  return moved;
}

// The next piece of this rank's part, if all have sent theirs.
bool Collective::reduce_piece() {
  if (done_ == pieces_) return false;
  const Range mine = part(rank_);
  const Range piece{done_ * piece_, std::min((done_ + 1) * piece_, mine.count())};
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank != rank_ && peers_[rank].first < piece.end * item_) return false;
  }
  const Range items{mine.begin + piece.begin, mine.begin + piece.end};
  if (codec_ == Codec::kNone) {
    reduce_plain(items);
  } else {
    reduce_coded(items);
  }
  ++done_;
  ready_ = direct_ ? 0 : piece.end * item_;
  return true;
}

void Collective::reduce_plain(Range piece) {
  const Range mine = part(rank_);
  const auto& ranks = shares_->ranks;
  std::vector<const void*> sources(ranks.size());
  operation_.layout.pieces(
      piece.begin, piece.end, [&](size_t tensor, size_t offset, size_t at, size_t count) {
        for (size_t i = 0; i < ranks.size(); ++i) {
          const uint8_t* input = static_cast<const uint8_t*>(operation_.inputs[tensor]);
          if (ranks[i] != rank_) {
            sources[i] = slot_of(ranks[i], done_) + at * item_;
          } else {
            sources[i] = input == nullptr ? memory_.zeros.take(kAtOnce, true) : input + offset * item_;
          }
        }
        uint8_t* output = static_cast<uint8_t*>(operation_.outputs[tensor]);
        uint8_t* to = output == nullptr ? nullptr : output + offset * item_;
        if (reduced_ != nullptr) to = reduced_ + (piece.begin - mine.begin + at) * item_;
        if (to == nullptr) return;
        reduce(operation_.layout.dtype(), operation_.reduction, to, sources.data(),
               shares_->weights.empty() ? nullptr : shares_->weights.data(), static_cast<int>(ranks.size()),
               shares_->divisor, count, false);
        if (reduced_ != nullptr && output != nullptr) std::memcpy(output + offset * item_, to, count * item_);
      });
}

void Collective::reduce_coded(Range piece) {
  const Range mine = part(rank_);
  encode(rank_, piece.end - mine.begin);
  Wires wires;
  for (int rank : shares_->ranks) {
    wires.addresses.push_back(rank == rank_ ? wires_ + piece.begin * item_ : slot_of(rank, done_));
  }
  wires.weights = shares_->weights;
  wires.divisor = operation_.reduction == Reduction::kMean ? shares_->divisor : 1;
  if (direct_) return decompress(operation_, piece.begin, piece.end, wires);
  uint8_t* to = combined_ + (piece.begin - mine.begin) * item_;
  const double weight = wires.weights.empty() || operation_.weight == 0 ? 1 : operation_.weight;
  combine(codec_, wires, piece.begin * kBlock, operation_.layout.total(), piece.count(), to,
          operation_.compression.owed, wires.divisor / weight);
  decompress(operation_, piece.begin, piece.end, {{to}, {}, 1});
}

// The next piece of the sums of another rank, if it is here.
bool Collective::decode_piece(int rank) {
  Peer& peer = peers_[rank];
  const Range theirs = part(rank);
  const size_t begin = peer.consumed * piece_;
  const size_t end = std::min(begin + piece_, theirs.count());
  if (begin >= end || peer.second < end * item_) return false;
  decompress(operation_, theirs.begin + begin, theirs.begin + end,
             {{slot_of(rank, pieces_ + peer.consumed)}, {}, 1});
  ++peer.consumed;
  return true;
}

// Waiting -------------------------------------------------------------------------------------------------

bool Collective::is_done() const {
  if (!greetings_.has_all() || done_ < pieces_) return false;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    if (peer.sent < greetings_.mine().size() + peer.send_first + peer.send_second) return false;
    if (peer.first < peer.receive_first || peer.second < peer.receive_second) return false;
    if (combined_ != nullptr && peer.consumed * piece_ < part(rank).count()) return false;
  }
  return true;
}

// Ranks from which something is still to come.
std::vector<int> Collective::awaited() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    if (!greetings_.has(rank) || peer.is_full || readable(rank) > 0) ranks.push_back(rank);
  }
  return ranks;
}

// Sleeps until a rank may be read from or written to, and reads. The kernel wakes this rank once as much is
// there as it takes to be worth it.
void Collective::wait() {
  interests_.clear();
  for (int rank = 0; rank < world_size_; ++rank) {
    Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    short events = peer.is_full ? POLLOUT : short{0};
    if (const size_t bytes = readable(rank); bytes > 0) {
      events = static_cast<short>(events | POLLIN);
      links_.wake_at(rank, greetings_.has(rank) ? static_cast<int>(std::min(bytes, kAtOnce / 2)) : 1);
    }
    if (events != 0) interests_.push_back({rank, events, 0});
  }
  links_.wait(interests_, moved_at_ + duration(timeout_));
  for (const Links::Interest& each : interests_) {
    if ((each.found & (POLLOUT | POLLERR | POLLHUP)) != 0) peers_[each.rank].is_full = false;
    if ((each.found & (POLLIN | POLLERR | POLLHUP)) != 0 && readable(each.rank) > 0) read(each.rank);
  }
  if (Clock::now() < moved_at_ + duration(timeout_)) return;
  throw late_error(awaited(), title_, timeout_);
}

}  // namespace dadt
