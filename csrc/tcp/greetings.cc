#include "tcp/greetings.h"

#include <cstring>

namespace dadt {
namespace {

constexpr size_t kLaneStep = size_t{1} << 20;     // step by which a lane's memory grows as its bytes arrive
constexpr uint64_t kLongest = uint64_t{1} << 40;  // most bytes that a rank may send to another one
constexpr uint64_t kFastest = uint64_t{1} << 50;  // highest valid speed of a link, in bytes per second

// An entry of the table in a rank's lane in an exchange: how many bytes it sends to and expects from one
// other rank.
struct Entry {
  uint64_t bytes;
  uint64_t expected;  // number of bytes expected; kWhatever for any number
};
constexpr uint64_t kWhatever = ~uint64_t{0};

Entry entry(const std::string& table, int rank) {
  Entry found;
  std::memcpy(&found, table.data() + static_cast<size_t>(rank) * sizeof found, sizeof found);
  return found;
}

Error unsound(int rank) {
  return Error(Code::kComm, "rank " + std::to_string(rank) + " sent what is no operation of DADT's");
}

}  // namespace

Greetings::Greetings(Links& links, const Operation& operation, uint32_t number, uint64_t rate, uint64_t cost)
    : links_(links),
      operation_(operation),
      rank_(links.rank()),
      world_size_(links.world_size()),
      peers_(world_size_),
      lanes_(world_size_) {
  lanes_[rank_] = lane();
  Head& head = peers_[rank_].head;
  head = head_of(operation, operation.layout.total(), lanes_[rank_].size());
  head.number = number;
  head.rate = std::min(rate, kFastest);
  head.cost = cost;
  peers_[rank_].head_bytes = sizeof head;
  peers_[rank_].is_here = true;
  mine_.assign(reinterpret_cast<const char*>(&head), sizeof head);
  mine_ += lanes_[rank_];
}

std::string Greetings::lane() const {
  if (operation_.kind != Kind::kExchange) return operation_.lane;
  std::vector<Entry> entries(world_size_);
  for (int rank = 0; rank < world_size_; ++rank) {
    const bool any = operation_.outputs.empty();
    entries[rank] = {operation_.layout.counts()[rank], any ? kWhatever : operation_.receives.counts()[rank]};
  }
  return std::string(reinterpret_cast<const char*>(entries.data()), entries.size() * sizeof(Entry));
}

size_t Greetings::missing(int rank) const {
  const Peer& peer = peers_[rank];
  if (peer.head_bytes < sizeof(Head)) return sizeof(Head) - peer.head_bytes;
  return peer.differs ? 0 : peer.head.lane - peer.lane_bytes;
}

bool Greetings::read(int rank) {
  Peer& peer = peers_[rank];
  std::string& lane = lanes_[rank];
  const bool is_head = peer.head_bytes < sizeof(Head);
  if (!is_head && lane.size() == peer.lane_bytes) {
    lane.resize(std::min<size_t>(peer.head.lane, lane.size() + kLaneStep));
  }
  iovec to{reinterpret_cast<uint8_t*>(&peer.head) + peer.head_bytes, sizeof(Head) - peer.head_bytes};
  if (!is_head) to = {lane.data() + peer.lane_bytes, lane.size() - peer.lane_bytes};
  const size_t count = links_.receive(rank, {to}, operation_.title());
  (is_head ? peer.head_bytes : peer.lane_bytes) += count;
  if (is_head && peer.head_bytes == sizeof(Head)) take_head(rank);
  peer.is_here = missing(rank) == 0 && !peer.differs;
  if (count > 0) check();
  return count > 0;
}

void Greetings::take_head(int rank) {
  Peer& peer = peers_[rank];
  const Head& mine = peers_[rank_].head;
  const bool is_table = operation_.kind == Kind::kExchange && peer.head.kind == mine.kind;
  if (!is_sound(peer.head) || peer.head.number != mine.number || peer.head.lane > kLongest ||
      peer.head.rate > kFastest || (is_table && peer.head.lane != mine.lane)) {
    throw unsound(rank);
  }
  peer.differs = !difference(rank_, mine, rank, peer.head).empty();
}

// Once the headers of all ranks have arrived, checks that all ranks run the same operation.
void Greetings::check() {
  for (const Peer& peer : peers_) {
    if (peer.head_bytes < sizeof(Head)) return;
  }
  for (int rank = 1; rank < world_size_; ++rank) {
    const std::string text = difference(0, peers_[0].head, rank, peers_[rank].head);
    if (!text.empty()) throw Error(Code::kMismatch, text);
  }
  has_all_ = std::ranges::all_of(peers_, &Peer::is_here);
  if (has_all_ && operation_.kind == Kind::kExchange) check_tables();
}

void Greetings::check_tables() const {
  for (int from = 0; from < world_size_; ++from) {
    for (int to = 0; to < world_size_; ++to) {
      const uint64_t sent = entry(lanes_[from], to).bytes;
      const uint64_t expected = entry(lanes_[to], from).expected;
      if (sent > kLongest) throw unsound(from);
      if (expected == kWhatever || expected == sent) continue;
      throw Error(Code::kMismatch, operation_.title() + ": rank " + std::to_string(from) + " sends " +
                                       std::to_string(sent) + " bytes to rank " + std::to_string(to) +
                                       ", which expects " + std::to_string(expected));
    }
  }
}

std::vector<double> Greetings::weights() const {
  std::vector<double> weights;
  for (const Peer& peer : peers_) weights.push_back(peer.head.weight);
  return weights;
}

std::vector<uint64_t> Greetings::rates() const {
  std::vector<uint64_t> rates;
  for (const Peer& peer : peers_) rates.push_back(peer.head.rate);
  return rates;
}

std::vector<uint64_t> Greetings::costs() const {
  std::vector<uint64_t> costs;
  for (const Peer& peer : peers_) costs.push_back(peer.head.cost);
  return costs;
}

size_t Greetings::bytes_from(int rank) const { return entry(lanes_[rank], rank_).bytes; }

}  // namespace dadt
