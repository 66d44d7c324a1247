#include "shm/transfer.h"

#include <cstring>

#include "engine/compress.h"
#include "kernels/kernels.h"

namespace dadt {
namespace {

// Number of chunks that a rank packs before it has delivered the peers' chunks. A rank that has delivered d
// chunks knows that each peer has packed d chunks, and so has delivered d - kChunksAhead chunks. The last
// chunk that it may pack now, d + kChunksAhead - 1, goes to the slot of a chunk that no rank reads any more.
// So no rank ever waits for a free slot.
constexpr uint32_t kChunksAhead = 2;
static_assert(ChunkSlots::kSlots >= 2 * kChunksAhead);

// With at most this many ranks, each rank reduces whole chunks for itself. This was measured to take less
// time than reducing a share of each chunk for all ranks, for which ranks must wait for each other twice.
constexpr int kDirect = 8;

size_t padded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

Transfer::Transfer(ChunkSlots& ring, const Operation& operation, int rank, int world_size, uint32_t first,
                   size_t slot_bytes, double timeout)
    : ring_(ring),
      operation_(operation),
      rank_(rank),
      world_size_(world_size),
      first_(first),
      slot_bytes_(slot_bytes),
      timeout_(timeout),
      codec_(operation.compression.codec),
      item_(codec_ == Codec::kNone ? item_size(operation.layout.dtype()) : block_bytes(codec_)),
      exchange_(operation, rank, world_size),
      lane_(operation.kind == Kind::kExchange ? exchange_.table() : operation.lane),
      two_phase_(operation.kind == Kind::kAllreduce && codec_ == Codec::kNone && world_size > kDirect),
      stream_(operation.layout.bytes() >= kStreamBytes) {
  size_t bytes = operation.layout.bytes();
  if (operation.kind == Kind::kExchange) bytes = exchange_.bytes();
  if (codec_ != Codec::kNone) bytes = block_count(operation.layout.total()) * item_;
  plan(lane_.size(), bytes);
}

void Transfer::plan(size_t lane_bytes, size_t data_bytes) {
  // Whether data consists of compressed blocks, of which each must lie in one chunk.
  const bool blocks = codec_ != Codec::kNone;
  lane_room_ = padded(lane_bytes, blocks ? item_ : 64);
  data_bytes_ = data_bytes;
  const size_t bytes = lane_room_ + data_bytes_;
  chunk_bytes_ = blocks ? slot_bytes_ / item_ * item_ : slot_bytes_;
  chunks_ = static_cast<uint32_t>(std::max<size_t>(1, (bytes + chunk_bytes_ - 1) / chunk_bytes_));
}

Transfer::Extent Transfer::extent(uint32_t chunk) const {
  const size_t from = chunk * chunk_bytes_;
  const size_t to = std::min(from + chunk_bytes_, lane_room_ + data_bytes_);
  Extent extent;
  extent.lane_begin = std::min(from, lane_room_);
  extent.lane_end = std::min(to, lane_room_);
  extent.begin = (std::max(from, lane_room_) - lane_room_) / item_;
  extent.end = (std::max(to, lane_room_) - lane_room_) / item_;
  extent.slot_offset = extent.lane_end - extent.lane_begin;
  return extent;
}

Result Transfer::run() {
  const auto start = Clock::now();
  ring_.check_aborted();
  write_head();
  pack();
  result_.packed = Clock::now();
  wait_for_heads();
  const auto arrived = Clock::now();
  read_heads();
  while (delivered_ < chunks_) {
    switch (next_move()) {
      case Move::kPack:
        pack();
        break;
      case Move::kReduce:
        reduce();
        break;
      case Move::kDeliver:
        deliver();
        break;
      case Move::kNone:
        ring_.wait([this] { return next_move() != Move::kNone; }, [this](int rank) { return lags(rank); },
                   operation_.title(), timeout_);
    }
  }
  result_.waited = seconds_between(start, arrived);
  result_.seconds = seconds_between(arrived, Clock::now());
  if (operation_.kind == Kind::kAllreduce) {
    result_.sent = codec_ == Codec::kNone ? data_bytes_ : wire_bytes(codec_, operation_.layout.total());
    result_.plain = operation_.plain_bytes();
  }
  return std::move(result_);
}

void Transfer::wait_for_heads() {
  ring_.wait([&] { return ring_.all_passed(kPacked, first_); },
             [&](int rank) { return !ring_.passed(rank, kPacked, first_); }, operation_.title(), timeout_);
}

void Transfer::write_head() {
  const size_t total = codec_ == Codec::kNone ? data_bytes_ / item_ : operation_.layout.total();
  ring_.slot_head(rank_, first_) = head_of(operation_, total, lane_.size());
}

void Transfer::read_heads() {
  const Head& mine = ring_.slot_head(rank_, first_);
  size_t longest_lane = 0;
  size_t most_data = 0;
  std::vector<double> weights;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Head& head = ring_.slot_head(rank, first_);
    const std::string text =
        rank < rank_ ? difference(rank, head, rank_, mine) : difference(rank_, mine, rank, head);
    if (!text.empty()) throw Error(Code::kMismatch, text);
    if (operation_.kind != Kind::kBroadcast) result_.lanes.emplace_back(head.lane, '\0');
    longest_lane = std::max<size_t>(longest_lane, head.lane);
    most_data = std::max<size_t>(most_data, codec_ == Codec::kNone ? head.total * item_ : data_bytes_);
    weights.push_back(head.weight);
  }
  plan(longest_lane, most_data);
  shares_.emplace(operation_, std::move(weights));
  result_.weight_sum = operation_.kind == Kind::kAllreduce ? shares_->sum : 0;
}

Transfer::Move Transfer::next_move() const {
  if (packed_ < std::min(chunks_, delivered_ + kChunksAhead)) return Move::kPack;
  if (two_phase_) {
    if (delivered_ < reduced_ && ring_.all_passed(kReduced, first_ + delivered_)) return Move::kDeliver;
    if (reduced_ < packed_ && ring_.all_passed(kPacked, first_ + reduced_)) return Move::kReduce;
  } else if (delivered_ < packed_ && ring_.all_passed(kPacked, first_ + delivered_)) {
    return Move::kDeliver;
  }
  return Move::kNone;
}

// Returns whether this rank waits for rank `rank`. Called when this rank has no next move.
bool Transfer::lags(int rank) const {
  if (!two_phase_) return !ring_.passed(rank, kPacked, first_ + delivered_);
  if (delivered_ < reduced_) return !ring_.passed(rank, kReduced, first_ + delivered_);
  return !ring_.passed(rank, kPacked, first_ + reduced_);
}

void Transfer::pack() {
  const Extent part = extent(packed_);
  uint8_t* slot = ring_.slot(rank_, first_ + packed_);
  if (part.lane_begin < lane_.size()) {
    const size_t bytes = std::min(part.lane_end, lane_.size()) - part.lane_begin;
    std::memcpy(slot, lane_.data() + part.lane_begin, bytes);
  }
  if (operation_.kind == Kind::kExchange) {
    exchange_.pack(slot + part.slot_offset, part.begin, part.end);
  } else if (codec_ != Codec::kNone) {
    compress(operation_, part.begin, part.end, slot + part.slot_offset);
  } else if (part.count() > 0 && (operation_.kind == Kind::kAllreduce || operation_.root == rank_)) {
    uint8_t* to = slot + part.slot_offset;
    operation_.layout.pieces(
        part.begin, part.end, [&](size_t tensor, size_t offset, size_t at, size_t count) {
          const uint8_t* from = static_cast<const uint8_t*>(operation_.inputs[tensor]);
          if (from == nullptr) {
            std::memset(to + at * item_, 0, count * item_);
          } else {
            // Large inputs are written past the cache (stream_), since peers would fetch cache lines from
            // this core's cache more slowly than from memory.
            kernels().copy(to + at * item_, from + offset * item_, count * item_, stream_);
          }
        });
  }
  ring_.publish(kPacked, first_ + ++packed_);
}

// Returns the part of a chunk that a rank reduces for all ranks, in elements from the chunk's beginning and
// in whole cache lines.
std::pair<size_t, size_t> Transfer::share(const Extent& part, int rank) const {
  const size_t line = 64 / item_;
  const size_t lines = (part.count() + line - 1) / line;
  const auto edge = [&](size_t i) { return std::min(lines * i / world_size_ * line, part.count()); };
  return {edge(rank), edge(rank + 1)};
}

void Transfer::reduce_to(void* destination, const Extent& part, size_t offset, size_t count,
                         bool stream) const {
  const uint32_t chunk = first_ + (two_phase_ ? reduced_ : delivered_);
  const void* from[64];
  std::vector<const void*> many;
  const void** sources = from;
  if (shares_->ranks.size() > std::size(from)) {
    many.resize(shares_->ranks.size());
    sources = many.data();
  }
  for (size_t i = 0; i < shares_->ranks.size(); ++i) {
    sources[i] = ring_.slot(shares_->ranks[i], chunk) + part.slot_offset + offset * item_;
  }
  dadt::reduce(operation_.layout.dtype(), operation_.reduction, destination, sources,
               shares_->weights.empty() ? nullptr : shares_->weights.data(),
               static_cast<int>(shares_->ranks.size()), shares_->divisor, count, stream);
}

// Reduces this rank's share of a chunk for all ranks (only with two_phase_). The result overwrites the share
// in this rank's own slot, which no other rank reads before.
void Transfer::reduce() {
  const Extent part = extent(reduced_);
  const auto [begin, end] = share(part, rank_);
  if (begin < end) {
    reduce_to(ring_.slot(rank_, first_ + reduced_) + part.slot_offset + begin * item_, part, begin,
              end - begin, false);
  }
  ring_.publish(kReduced, first_ + ++reduced_);
}

void Transfer::deliver() {
  const Extent part = extent(delivered_);
  const uint32_t chunk = first_ + delivered_;
  deliver_lanes(part);
  const auto copy_from = [&](int rank, size_t first, size_t last) {
    const uint8_t* from = ring_.slot(rank, chunk) + part.slot_offset + first * item_;
    operation_.layout.pieces(part.begin + first, part.begin + last,
                             [&](size_t tensor, size_t offset, size_t at, size_t count) {
                               uint8_t* to = static_cast<uint8_t*>(operation_.outputs[tensor]);
                               if (to == nullptr) return;
                               kernels().copy(to + offset * item_, from + at * item_, count * item_, stream_);
                             });
  };
  if (operation_.kind == Kind::kExchange) {
    deliver_exchange(part);
  } else if (part.count() == 0) {
    // The chunk consists of lanes only, so there is nothing else to deliver.
  } else if (codec_ != Codec::kNone) {
    decompress_all(part);
  } else if (operation_.kind == Kind::kBroadcast) {
    if (operation_.root != rank_) copy_from(operation_.root, 0, part.count());
  } else if (two_phase_) {
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto [begin, end] = share(part, rank);
      if (begin < end) copy_from(rank, begin, end);
    }
  } else {
    operation_.layout.pieces(part.begin, part.end,
                             [&](size_t tensor, size_t offset, size_t at, size_t count) {
                               uint8_t* to = static_cast<uint8_t*>(operation_.outputs[tensor]);
                               if (to != nullptr) reduce_to(to + offset * item_, part, at, count, stream_);
                             });
  }
  ++delivered_;
}

void Transfer::decompress_all(const Extent& part) {
  Wires wires;
  for (int rank : shares_->ranks) {
    wires.addresses.push_back(ring_.slot(rank, first_ + delivered_) + part.slot_offset);
  }
  wires.weights = shares_->weights;
  wires.divisor = operation_.reduction == Reduction::kMean ? shares_->divisor : 1;
  decompress(operation_, part.begin, part.end, wires);
}

void Transfer::deliver_lanes(const Extent& part) {
  if (part.lane_begin == part.lane_end) return;
  for (size_t rank = 0; rank < result_.lanes.size(); ++rank) {
    std::string& lane = result_.lanes[rank];
    if (part.lane_begin >= lane.size()) continue;
    const size_t bytes = std::min(part.lane_end, lane.size()) - part.lane_begin;
    std::memcpy(lane.data() + part.lane_begin, ring_.slot(static_cast<int>(rank), first_ + delivered_),
                bytes);
  }
}

void Transfer::deliver_exchange(const Extent& part) {
  const uint32_t chunk = first_ + delivered_;
  if (part.lane_begin < lane_room_ && part.lane_end == lane_room_) {
    exchange_.route(result_.lanes, result_);
    result_.lanes.clear();
  }
  for (int rank = 0; part.count() > 0 && rank < world_size_; ++rank) {
    exchange_.deliver(rank, ring_.slot(rank, chunk) + part.slot_offset, part.begin, part.end);
  }
  if (delivered_ + 1 == chunks_) exchange_.deliver_own();
}

}  // namespace dadt
