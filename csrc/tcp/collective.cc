#include "tcp/collective.h"

#include <poll.h>

#include <cstring>

#include "engine/executor.h"
#include "kernels/kernels.h"

namespace dadt {
namespace {

constexpr size_t kPieceBytes = 256 * 1024;
// If all data of a rank times the number of other ranks is at most this many bytes, the rank sends all its
// data to every other rank, instead of parts in two phases.
constexpr size_t kDirectBytes = 64 * 1024;
constexpr size_t kUnknown = ~size_t{0};

constexpr size_t kLeastPieceBytes = 64 * 1024;
// Allreduces of fewer bytes go in one group, as others take more hops.
constexpr size_t kLargeBytes = size_t{1} << 20;

// Returns whether several groups give the same bits as one, and may be quicker. Sums so far of 16-bit floats
// would lose digits, as would means of integers.
bool is_large(const Operation& operation, size_t bytes, int world_size) {
  const DType dtype = operation.layout.dtype();
  return operation.kind == Kind::kAllreduce && operation.compression.codec == Codec::kNone &&
         world_size > 2 && (dtype == DType::kFloat32 || dtype == DType::kFloat64) && bytes >= kLargeBytes;
}

// Returns how many of a part's bytes are summed at once: fewer where they pass many groups, as the last group
// waits for the first of them.
size_t piece_bytes(size_t bytes, int groups) {
  if (groups == 1) return kPieceBytes;
  return std::clamp(bytes / (32 * static_cast<size_t>(groups)), kLeastPieceBytes, kPieceBytes);
}

bool is_direct(const Operation& operation, size_t bytes, int world_size) {
  const bool parted = operation.kind == Kind::kAllreduce || operation.kind == Kind::kBroadcast;
  return !parted || bytes * static_cast<size_t>(world_size - 1) <= kDirectBytes;
}

}  // namespace

Collective::Collective(Links& links, CollectiveMemory& memory, Parts& parts, Ways& ways,
                       const Operation& operation, uint32_t number, double timeout)
    : links_(links),
      memory_(memory),
      parts_(parts),
      ways_(ways),
      operation_(operation),
      rank_(links.rank()),
      world_size_(links.world_size()),
      timeout_(timeout),
      title_(operation.title()),
      codec_(operation.compression.codec),
      item_(codec_ == Codec::kNone ? item_size(operation.layout.dtype()) : block_bytes(codec_)),
      total_(codec_ == Codec::kNone ? operation.layout.total() : block_count(operation.layout.total())),
      direct_(is_direct(operation, total_ * item_, world_size_)),
      is_large_(!direct_ && is_large(operation, total_ * item_, world_size_)),
      group_(is_large_ ? ways.group() : world_size_),
      piece_(std::max<size_t>(1, piece_bytes(total_ * item_ / group_, world_size_ / group_) / item_)),
      greetings_(links, operation, number, parts.rate(), ways.cost()),
      peers_(world_size_),
      encoded_(world_size_) {
  divide();
  prepare();
}

// Divides the values into parts of whole cache lines, one for each rank of a group. Compressed values get
// equal parts, because an owner keeps the residual of its part.
void Collective::divide() {
  const size_t line = std::max<size_t>(1, 64 / item_);
  const size_t lines = (total_ + line - 1) / line;
  const bool by_rate = operation_.kind == Kind::kAllreduce && codec_ == Codec::kNone && !direct_;
  edges_ = (by_rate && group_ == world_size_ ? parts_ : Parts(group_)).edges(lines);
  for (size_t& edge : edges_) edge = std::min(edge * line, total_);
}

// Returns the part of the values that a rank sums for all ranks of its group.
Collective::Range Collective::part(int owner) const {
  if (direct_) return {0, total_};
  return {edges_[place_of(owner)], edges_[place_of(owner) + 1]};
}

// Ends the measurement of this rank's link, and divides the following operations among all ranks' links.
void Collective::measure() {
  parts_.told(greetings_.rates());
  ways_.told(greetings_.costs());
  if (is_large_) {
    const double took = seconds_between(begun_, Clock::now()) - result_.waited;
    ways_.ended(group_, static_cast<uint64_t>(took * 1e9), total_ * item_, parts_.nanoseconds());
  }
  if (speed_) {
    speed_->record(links_.traffic(), Clock::now());
    parts_.measured(speed_->rate());
  }
  const int group = ways_.group();
  if (speed_ || is_large_) links_.share_windows(parts_.rates(), group == world_size_ ? group - 1 : group + 1);
}

// Counts bytes that were sent or received.
void Collective::note(size_t bytes) {
  if (bytes == 0) return;
  moved_at_ = Clock::now();
  unrecorded_ += bytes;
  if (!speed_ || unrecorded_ < speed_->span()) return;
  unrecorded_ = 0;
  speed_->record(links_.traffic(), moved_at_);
}

// Determines how many bytes are sent to and received from each rank, and allocates the memory for them.
void Collective::prepare() {
  if (operation_.kind == Kind::kAllreduce) return prepare_sums();
  const size_t mine = bytes_of(rank_);
  for (int rank = 0; rank < world_size_; ++rank) {
    Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    if (operation_.kind == Kind::kExchange) {
      peer.send_first = operation_.layout.counts()[rank];
      peer.receive_first = kUnknown;  // known once the rank's table has arrived
    } else if (operation_.kind == Kind::kBroadcast) {
      if (operation_.root == rank_) peer.send_first = bytes_of(rank);
      if (operation_.root == rank) peer.receive_first = mine;
      if (direct_) continue;
      if (operation_.root != rank_) peer.receive_second = bytes_of(rank);
      if (operation_.root != rank) peer.send_second = mine;
    }
  }
  if (operation_.kind == Kind::kBroadcast && operation_.root == rank_) ready_ = mine;
}

void Collective::prepare_sums() {
  const size_t mine = bytes_of(rank_);
  for (int rank = 0; rank < world_size_; ++rank) {
    Peer& peer = peers_[rank];
    if (rank == rank_ || !is_in_group(rank)) continue;
    peer.send_first = bytes_of(rank);
    peer.receive_first = mine;
    if (direct_) continue;
    peer.send_second = mine;
    peer.receive_second = bytes_of(rank);
  }
  if (has_earlier()) peers_[earlier()].receive_first = peers_[earlier()].send_second = mine;
  if (has_later()) peers_[later()].send_first = peers_[later()].receive_second = mine;
  const uint64_t each_way = total_ * item_ - mine + mine * static_cast<size_t>(world_size_ - 1);
  const bool is_measured = !direct_ && group_ == world_size_ && world_size_ > 2;
  if (is_measured && each_way >= LinkSpeed::kLeastSpan) speed_.emplace(each_way);
  pieces_ = (part(rank_).count() + piece_ - 1) / piece_;
  has_holes_ = std::ranges::any_of(operation_.outputs, [](const void* output) { return output == nullptr; });
  slots_ = memory_.slots.take(static_cast<size_t>(world_size_) * kAhead * piece_ * item_);
  if (codec_ != Codec::kNone) {
    wires_ = memory_.wires.take(total_ * item_);
    if (!direct_) combined_ = memory_.combined.take(mine);
  } else if (direct_) {
    copy_values();
  } else if (has_holes_) {
    reduced_ = memory_.reduced.take(mine);
  }
}

void Collective::copy_values() {
  copy_ = memory_.copy.take(total_ * item_);
  operation_.layout.pieces(0, total_, [&](size_t tensor, size_t offset, size_t at, size_t count) {
    const uint8_t* input = static_cast<const uint8_t*>(operation_.inputs[tensor]);
    if (input == nullptr) {
      std::memset(copy_ + at * item_, 0, count * item_);
    } else {
      std::memcpy(copy_ + at * item_, input + offset * item_, count * item_);
    }
  });
}

Result Collective::run() {
  const std::lock_guard lock(links_.streams());
  begun_ = moved_at_ = Clock::now();
  if (speed_) speed_->record(links_.traffic(), begun_);
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
  settle();
  measure();
  for (Peer& peer : peers_) {
    if (operation_.kind == Kind::kAllreduce) result_.sent += peer.send_first + peer.send_second;
  }
  if (operation_.kind == Kind::kAllreduce) {
    hand_out();
    const size_t ranks = static_cast<size_t>(world_size_);
    result_.plain = group_ < world_size_
                        ? result_.sent
                        : (ranks - 1) * operation_.plain_bytes() * (direct_ ? 1 : 2) / (direct_ ? 1 : ranks);
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

// Returns whether the next piece may be summed: only a few are summed before they can be sent to the next
// group, so that the first ones are not late there.
bool Collective::has_room() const {
  if (!has_later()) return true;
  return passed_ + greetings_.mine().size() < links_.sent(later()) + kAhead * piece_ * item_;
}

// Sums the next piece of this rank's part, if all values of it have arrived. Returns whether a piece was
// summed.
bool Collective::reduce_piece() {
  if (done_ == pieces_ || !has_room()) return false;
  const Range mine = part(rank_);
  const Range piece{done_ * piece_, std::min((done_ + 1) * piece_, mine.count())};
  for (int rank = 0; rank < world_size_; ++rank) {
    const Peer& peer = peers_[rank];
    if (peer.first < std::min(piece.end * item_, peer.receive_first)) return false;
  }
  const Range items{mine.begin + piece.begin, mine.begin + piece.end};
  if (codec_ == Codec::kNone) {
    reduce_plain(items);
  } else {
    reduce_coded(items);
  }
  ++done_;
  if (direct_) return true;
  (has_later() ? passed_ : ready_) = piece.end * item_;
  return true;
}

// Sums a piece for this rank's group, after the sums of the groups before it; the last group computes the
// result. Whatever the groups are, the order of additions is that of ranks, and so is every rounding.
void Collective::reduce_plain(Range piece) {
  const Range mine = part(rank_);
  const bool goes_on = has_earlier() && shares_->ranks.front() < rank_ - place_of(rank_);
  std::vector<int> ranks;
  std::vector<double> weights;
  if (goes_on) {
    ranks.push_back(earlier());
    weights.push_back(1);
  }
  for (size_t i = 0; i < shares_->ranks.size(); ++i) {
    if (!is_in_group(shares_->ranks[i])) continue;
    ranks.push_back(shares_->ranks[i]);
    weights.push_back(shares_->weights.empty() ? 1 : shares_->weights[i]);
  }
  if (ranks.empty()) return;  // nobody takes part so far, and all know that
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
        uint8_t* to = static_cast<uint8_t*>(operation_.outputs[tensor]);
        if (to != nullptr) to += offset * item_;
        if (reduced_ != nullptr) to = reduced_ + (piece.begin - mine.begin + at) * item_;
        if (to == nullptr) return;
        reduce(operation_.layout.dtype(), operation_.reduction, to, sources.data(),
               shares_->weights.empty() ? nullptr : weights.data(), static_cast<int>(ranks.size()),
               has_later() ? 1 : shares_->divisor, count, false);
      });
}

// Copies the results of this rank's part to the outputs, if they are elsewhere as some outputs are discarded.
void Collective::hand_out() {
  if (reduced_ == nullptr) return;
  const Range mine = part(rank_);
  operation_.layout.pieces(mine.begin, mine.end, [&](size_t tensor, size_t offset, size_t at, size_t count) {
    uint8_t* output = static_cast<uint8_t*>(operation_.outputs[tensor]);
    if (output != nullptr) std::memcpy(output + offset * item_, reduced_ + at * item_, count * item_);
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

// Decodes the next piece of another rank's sums, if it has arrived. Returns whether a piece was decoded.
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
    if (peer.is_full || links_.sent(rank) < greetings_.mine().size() + peer.send_first + peer.send_second) {
      return false;
    }
    if (peer.first < peer.receive_first || peer.second < peer.receive_second) return false;
    if (combined_ != nullptr && peer.consumed * piece_ < part(rank).count()) return false;
  }
  return true;
}

// Returns the ranks from which data is still missing.
std::vector<int> Collective::awaited() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    if (!greetings_.has(rank) || peer.is_full || readable(rank) > 0) ranks.push_back(rank);
  }
  return ranks;
}

// Sleeps until data of a rank can be read or written, and reads it. The kernel wakes this thread only once
// enough bytes have arrived, so that it wakes less often.
void Collective::wait() {
  interests_.clear();
  for (int rank = 0; rank < world_size_; ++rank) {
    Peer& peer = peers_[rank];
    if (rank == rank_) continue;
    short events = peer.is_full ? POLLOUT : short{0};
    if (const size_t bytes = readable(rank); bytes > 0) {
      events = static_cast<short>(events | POLLIN);
      links_.wake_at(rank, greetings_.has(rank)
                               ? std::min(bytes, group_ < world_size_ ? piece_ * item_ : kAtOnce / 2)
                               : 1);
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
