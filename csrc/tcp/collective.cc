#include "tcp/collective.h"

#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <sstream>

#include "kernels/kernels.h"

namespace dadt {
namespace {

constexpr size_t kPieceBytes = 256 * 1024;
constexpr size_t kAhead = 2;                // pieces of a rank that may come before they are summed
constexpr size_t kDirectBytes = 64 * 1024;  // that a rank sends in all, up to which it sends all to each
constexpr size_t kAtOnce = 1 << 20;         // bytes of a call of the kernel
constexpr size_t kVectors = 64;
constexpr size_t kLaneStep = 1 << 20;  // a lane's memory grows as its bytes come
constexpr size_t kUnknown = ~size_t{0};

// What a rank sends to and expects from another in an exchange, as its lane says.
struct Entry {
  uint64_t bytes;
  uint64_t expected;  // kUnknown: whatever comes
};

Entry entry(const std::string& table, int rank) {
  Entry found;
  std::memcpy(&found, table.data() + static_cast<size_t>(rank) * sizeof found, sizeof found);
  return found;
}

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
      peers_(world_size_),
      encoded_(world_size_) {
  const std::string lane = this->lane();
  Head head = head_of(operation, operation.layout.total(), lane.size());
  head.number = number;
  for (Peer& peer : peers_) {
    peer.greeting.assign(reinterpret_cast<const char*>(&head), sizeof head);
    peer.greeting += lane;
  }
  result_.lanes.resize(world_size_);
  result_.lanes[rank_] = lane;
  peers_[rank_].head = head;
  peers_[rank_].greeted = true;
  prepare();
}

std::string Collective::lane() const {
  if (operation_.kind != Kind::kExchange) return operation_.lane;
  std::vector<Entry> entries(world_size_);
  for (int rank = 0; rank < world_size_; ++rank) {
    entries[rank] = {operation_.layout.counts()[rank],
                     operation_.outputs.empty() ? kUnknown : operation_.receives.counts()[rank]};
  }
  return std::string(reinterpret_cast<const char*>(entries.data()), entries.size() * sizeof(Entry));
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
  if (operation_.kind == Kind::kBroadcast || operation_.kind == Kind::kExchange) result_.lanes.clear();
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
  if (at < peer.greeting.size()) add(peer.greeting.data() + at, peer.greeting.size() - at);
  at = std::max(at, peer.greeting.size()) - peer.greeting.size();
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
  if (peer.sent == peer.greeting.size() + peer.send_first + std::min(ready_, peer.send_second)) return false;
  collect(rank);
  if (vectors_.empty()) return false;
  msghdr message{};
  message.msg_iov = vectors_.data();
  message.msg_iovlen = vectors_.size();
  const ssize_t count = sendmsg(links_.data(rank), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count < 0) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN && errno != EWOULDBLOCK) throw links_.lost(rank, title_);
    peer.is_full = true;
    return false;
  }
  peer.sent += static_cast<size_t>(count);
  peer.is_full = static_cast<size_t>(count) < gathered_;
  moved_at_ = Clock::now();
  return true;
}

// Receiving -----------------------------------------------------------------------------------------------

const uint8_t* Collective::slot_of(int rank, size_t piece) const {
  const size_t slot = static_cast<size_t>(rank) * kAhead + piece % kAhead;
  return slots_ + slot * piece_ * item_;
}

// Bytes that may be read from a rank now, all of which it sends without waiting for this one.
size_t Collective::readable(int rank) const {
  const Peer& peer = peers_[rank];
  if (peer.differs) return 0;
  if (!peer.greeted) {
    if (peer.head_bytes < sizeof(Head)) return sizeof(Head) - peer.head_bytes;
    return peer.head.lane - peer.lane_bytes;
  }
  const size_t piece = piece_ * item_;
  if (peer.first < peer.receive_first) {
    if (operation_.kind == Kind::kExchange) return all_greeted_ ? peer.receive_first - peer.first : 0;
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
  if (!peer.greeted) return read_greeting(rank);
  vectors_.clear();
  gathered_ = 0;
  const bool is_first = peer.first < peer.receive_first;
  if (is_first) {
    place_first(rank);
  } else {
    place_second(rank);
  }
  const size_t count = receive(rank);
  (is_first ? peer.first : peer.second) += count;
  if (is_first && operation_.kind == Kind::kBroadcast) ready_ = peer.first;
  return count > 0;
}

// Reads into the vectors. Throws Error if the rank is gone.
size_t Collective::receive(int rank) {
  if (vectors_.empty()) return 0;
  msghdr message{};
  message.msg_iov = vectors_.data();
  message.msg_iovlen = vectors_.size();
  const ssize_t count = recvmsg(links_.data(rank), &message, MSG_DONTWAIT);
  if (count > 0) {
    moved_at_ = Clock::now();
    return static_cast<size_t>(count);
  }
  if (count < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  throw links_.lost(rank, title_);
}

bool Collective::read_greeting(int rank) {
  Peer& peer = peers_[rank];
  std::string& lane = result_.lanes[rank];
  vectors_.clear();
  gathered_ = 0;
  if (peer.head_bytes < sizeof(Head)) {
    add(reinterpret_cast<uint8_t*>(&peer.head) + peer.head_bytes, sizeof(Head) - peer.head_bytes);
    const size_t count = receive(rank);
    peer.head_bytes += count;
    if (peer.head_bytes < sizeof(Head)) return count > 0;
    const Head& mine = peers_[rank_].head;
    const bool table = operation_.kind == Kind::kExchange && peer.head.kind == mine.kind;
    if (!is_sound(peer.head) || peer.head.number != mine.number || (table && peer.head.lane != mine.lane)) {
      throw Error(Code::kComm, "rank " + std::to_string(rank) + " sent what is no operation of DADT's");
    }
    peer.differs = !difference(rank_, mine, rank, peer.head).empty();
  } else {
    if (lane.size() == peer.lane_bytes) {
      lane.resize(std::min<size_t>(peer.head.lane, lane.size() + kLaneStep));
    }
    add(lane.data() + peer.lane_bytes, lane.size() - peer.lane_bytes);
    const size_t count = receive(rank);
    if (count == 0) return false;
    peer.lane_bytes += count;
  }
  peer.greeted = !peer.differs && peer.lane_bytes == peer.head.lane;
  check_heads();
  return true;
}

// Once the heads of all are here: whether all are in one operation.
void Collective::check_heads() {
  if (all_greeted_) return;
  bool all = true;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank != rank_ && peers_[rank].head_bytes < sizeof(Head)) return;
    all = all && peers_[rank].greeted;
  }
  for (int rank = 1; rank < world_size_; ++rank) {
    const std::string text = difference(0, peers_[0].head, rank, peers_[rank].head);
    if (!text.empty()) throw Error(Code::kMismatch, text);
  }
  if (!all) return;
  all_greeted_ = true;
  result_.waited = seconds_between(begun_, Clock::now());
  if (operation_.kind == Kind::kExchange) check_tables();
  if (operation_.kind != Kind::kAllreduce) return;
  std::vector<double> weights;
  for (const Peer& peer : peers_) weights.push_back(peer.head.weight);
  shares_.emplace(operation_, std::move(weights));
  result_.weight_sum = shares_->sum;
}

void Collective::check_tables() {
  for (int from = 0; from < world_size_; ++from) {
    for (int to = 0; to < world_size_; ++to) {
      const uint64_t sent = entry(result_.lanes[from], to).bytes;
      const uint64_t expected = entry(result_.lanes[to], from).expected;
      if (expected == kUnknown || expected == sent) continue;
      throw Error(Code::kMismatch, title_ + ": rank " + std::to_string(from) + " sends " +
                                       std::to_string(sent) + " bytes to rank " + std::to_string(to) +
                                       ", which expects " + std::to_string(expected));
    }
  }
  for (int rank = 0; rank < world_size_; ++rank) {
    const size_t bytes = entry(result_.lanes[rank], rank_).bytes;
    if (operation_.outputs.empty()) result_.received.emplace_back(bytes);
    if (rank != rank_) peers_[rank].receive_first = bytes;
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
  const size_t piece = piece_ * item_;
  for (size_t at = peer.first; at < peer.first + bytes;) {
    const size_t some = std::min(peer.first + bytes - at, piece - at % piece);
    add(slot_of(rank, at / piece) + at % piece, some);
    at += some;
  }
}

void Collective::place_second(int rank) {
  Peer& peer = peers_[rank];
  const size_t bytes = readable(rank);
  if (combined_ == nullptr) {
    const size_t begin = part(rank).begin * item_ + peer.second;
    return add_tensors(operation_.outputs, begin, begin + bytes, memory_.sink.take(kAtOnce));
  }
  const size_t piece = piece_ * item_;
  for (size_t at = peer.second; at < peer.second + bytes;) {
    const size_t some = std::min(peer.second + bytes - at, piece - at % piece);
    add(slot_of(rank, pieces_ + at / piece) + at % piece, some);
    at += some;
  }
}

// Summing -------------------------------------------------------------------------------------------------

bool Collective::advance() {
  if (operation_.kind != Kind::kAllreduce || !all_greeted_) return false;
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
  if (!all_greeted_ || done_ < pieces_) return false;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    if (peer.sent < peer.greeting.size() + peer.send_first + peer.send_second) return false;
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
    if (!peer.greeted || peer.is_full || readable(rank) > 0) ranks.push_back(rank);
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
      links_.wake_at(rank, peer.greeted ? static_cast<int>(std::min(bytes, kAtOnce / 2)) : 1);
    }
    if (events != 0) interests_.push_back({rank, events, 0});
  }
  links_.wait(interests_, moved_at_ + duration(timeout_));
  for (const Links::Interest& each : interests_) {
    if ((each.found & (POLLOUT | POLLERR | POLLHUP)) != 0) peers_[each.rank].is_full = false;
    if ((each.found & (POLLIN | POLLERR | POLLHUP)) != 0 && readable(each.rank) > 0) read(each.rank);
  }
  if (Clock::now() < moved_at_ + duration(timeout_)) return;
  std::ostringstream text;
  const std::vector<int> ranks = awaited();
  text << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) text << (i == 0 ? "" : ", ") << ranks[i];
  text << " did not come to " << title_ << " within " << timeout_ << " s";
  throw Error(Code::kTimeout, text.str());
}

}  // namespace dadt
