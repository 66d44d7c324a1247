#include "shm/neighbours.h"

#include <unistd.h>

#include <cstring>

namespace dadt {
namespace {

// Changes a segment's state to the end state `to`, unless it already has an end state. Returns whether the
// state was changed.
bool end(SegmentHead& head, State to) {
  State from = head.state.load();
  while (from == State::kOpening || from == State::kAttached) {
    if (head.state.compare_exchange_weak(from, to)) return true;
  }
  return false;
}

}  // namespace

Neighbours::Neighbours(int rank, int world_size, size_t body_bytes, bool ready)
    : rank_(rank),
      world_size_(world_size),
      body_bytes_(body_bytes),
      ready_(ready),
      pid_(getpid()),
      segments_(world_size) {
  segments_[rank] = std::make_unique<Segment>(body_bytes, ready);
}

Neighbours::~Neighbours() { close(); }

std::string Neighbours::endpoint() const { return segments_[rank_]->endpoint(); }

void Neighbours::connect(const std::vector<std::string>& endpoints, double timeout) {
  if (static_cast<int>(endpoints.size()) != world_size_) {
    throw std::invalid_argument(std::to_string(endpoints.size()) + " endpoints for " +
                                std::to_string(world_size_) + " ranks");
  }
  if (getpid() != pid_) throw std::runtime_error("the executor belongs to the parent process");
  if (connected_) throw std::runtime_error("the executor is connected already");
  std::vector<std::unique_ptr<Segment>> peers(world_size_);
  std::vector<std::unique_ptr<Watch>> watches(world_size_);
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    try {
      peers[rank] = std::make_unique<Segment>(endpoints[rank], body_bytes_, ready_);
      if (peers[rank]->owner() != pid_) {
        watches[rank] = std::make_unique<Watch>(peers[rank]->owner(), peers[rank]->owner_start());
      }
    } catch (const Error& error) {
      throw Error(error.code(), "cannot connect to rank " + std::to_string(rank) + ": " + error.what());
    }
  }
  peers[rank_] = std::move(segments_[rank_]);
  segments_ = std::move(peers);
  watches_ = std::move(watches);
  connected_ = true;
  State opening = State::kOpening;
  head(rank_).state.compare_exchange_strong(opening, State::kAttached);
  ring_all();
  const auto absent = [this](int rank) { return state(rank) == State::kOpening; };
  const auto all_here = [&] {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (absent(rank)) return false;
    }
    return true;
  };
  wait(all_here, absent, "the start", timeout);
  segments_[rank_]->seal();
}

void Neighbours::ring_all() {
  if (!connected_) return head(rank_).event.notify();
  for (const auto& segment : segments_) segment->head().event.notify();
}

void Neighbours::abort(const Error& error) {
  if (getpid() != pid_) return;
  SegmentHead& own = head(rank_);
  if (!end(own, State::kAborting)) return;
  own.code = error.code();
  std::strncpy(own.reason, error.what(), sizeof own.reason - 1);
  own.state.store(State::kAborted);
  ring_all();
}

void Neighbours::close() {
  if (getpid() != pid_) return;
  if (end(head(rank_), State::kClosed)) ring_all();
}

void Neighbours::check_aborted() const {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (state(rank) != State::kAborted) continue;
    const SegmentHead& from = head(rank);
    const std::string reason(from.reason, strnlen(from.reason, sizeof from.reason));
    throw Error(from.code, rank == rank_ ? reason : "rank " + std::to_string(rank) + " gave up: " + reason);
  }
}

Error Neighbours::lost(int rank, bool lives, const std::string& title) const {
  const std::string pid = std::to_string(segments_[rank]->owner());
  return lost_error("rank " + std::to_string(rank) + " (pid " + pid + ")", lives, title);
}

}  // namespace dadt
