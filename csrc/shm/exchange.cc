#include "shm/exchange.h"

#include <cstring>

#include "kernels/kernels.h"

namespace dadt {

Exchange::Exchange(const Operation& operation, int rank, int world_size)
    : operation_(operation), rank_(rank), world_size_(world_size) {
  if (operation.kind == Kind::kExchange) place();
}

void Exchange::place() {
  const auto& sizes = operation_.layout.counts();
  std::vector<Entry> entries(world_size_);
  for (int step = 1; step <= world_size_; ++step) {
    const int peer = (rank_ + step) % world_size_;
    const uint8_t* data = static_cast<const uint8_t*>(operation_.inputs[peer]);
    const size_t bytes = sizes[peer];
    Entry& mine = entries[peer];
    mine = {kUnknown, bytes, operation_.outputs.empty() ? kUnknown : operation_.receives.counts()[peer]};
    if (bytes == 0) continue;
    for (const Piece& piece : pieces_) {
      if (piece.data == data && piece.bytes == bytes) mine.offset = piece.offset;
    }
    if (mine.offset != kUnknown || peer == rank_) continue;
    mine.offset = bytes_;
    pieces_.push_back({data, bytes_, bytes});
    bytes_ += bytes;
  }
  table_.assign(reinterpret_cast<const char*>(entries.data()), entries.size() * sizeof(Entry));
}

Exchange::Entry Exchange::entry(const std::string& table, int rank) {
  Entry entry;
  std::memcpy(&entry, table.data() + static_cast<size_t>(rank) * sizeof entry, sizeof entry);
  return entry;
}

void Exchange::route(const std::vector<std::string>& tables, Result& result) {
  for (int from = 0; from < world_size_; ++from) {
    for (int to = 0; to < world_size_; ++to) {
      const uint64_t sent = entry(tables[from], to).bytes;
      const uint64_t expected = entry(tables[to], from).expected;
      if (expected == kUnknown || expected == sent) continue;
      throw Error(Code::kMismatch, operation_.title() + ": rank " + std::to_string(from) + " sends " +
                                       std::to_string(sent) + " bytes to rank " + std::to_string(to) +
                                       ", which expects " + std::to_string(expected));
    }
  }
  size_t total = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    incoming_.push_back(entry(tables[rank], rank_));
    void* to = operation_.outputs.empty() ? result.received.emplace_back(incoming_.back().bytes).data.get()
                                          : operation_.outputs[rank];
    to_.push_back(static_cast<uint8_t*>(to));
    total += incoming_.back().bytes;
  }
  stream_ = total >= kStreamBytes;
}

void Exchange::pack(void* slot, size_t begin, size_t end) const {
  for (const Piece& piece : pieces_) {
    const size_t from = std::max(begin, piece.offset);
    const size_t to = std::min(end, piece.offset + piece.bytes);
    if (from >= to) continue;
    std::memcpy(static_cast<uint8_t*>(slot) + (from - begin), piece.data + (from - piece.offset), to - from);
  }
}

void Exchange::deliver(int rank, const void* slot, size_t begin, size_t end) const {
  const Entry& piece = incoming_[rank];
  if (piece.offset == kUnknown || (rank == rank_ && to_[rank] == operation_.inputs[rank])) return;
  const size_t from = std::max<size_t>(begin, piece.offset);
  const size_t to = std::min<size_t>(end, piece.offset + piece.bytes);
  if (from >= to) return;
  kernels().copy(to_[rank] + (from - piece.offset), static_cast<const uint8_t*>(slot) + (from - begin),
                 to - from, stream_);
}

void Exchange::deliver_own() const {
  const Entry& own = incoming_[rank_];
  if (own.bytes == 0 || own.offset != kUnknown || to_[rank_] == operation_.inputs[rank_]) return;
  kernels().copy(to_[rank_], operation_.inputs[rank_], own.bytes, stream_);
}

}  // namespace dadt
