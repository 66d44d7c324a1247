#pragma once

#include <memory>
#include <string>
#include <vector>

#include "process.h"
#include "segment.h"

namespace dadt {

// The segments of all ranks of a host, and waiting for one another. Every rank writes chunks 0, 1, 2, ... to
// the slots of its own segment, slot chunk % kSlots, and says in its counters how far it has come.
class Ring {
 public:
  Ring(int rank, int world_size, size_t slot_bytes);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  std::string endpoint() const;
  // Blocks until all ranks have opened each other's segments. See Executor::connect.
  void connect(const std::vector<std::string>& endpoints, double timeout);
  // See Executor: abort from any thread, close from one.
  void abort(const Error& error);
  void close();

  // Engine thread only, after connect:

  uint8_t* slot(int rank, uint32_t chunk) const { return segments_[rank]->slot(chunk); }
  SlotHead& slot_head(int rank, uint32_t chunk) const { return segments_[rank]->slot_head(chunk); }

  // Whether a rank's counter has gone past `chunk`.
  bool passed(int rank, Counter counter, uint32_t chunk) const {
    return static_cast<int32_t>(segments_[rank]->head().counters[counter].value.load() - chunk) > 0;
  }
  bool all_passed(Counter counter, uint32_t chunk) const {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!passed(rank, counter, chunk)) return false;
    }
    return true;
  }
  // Sets this rank's counter, and wakes the peers that sleep.
  void publish(Counter counter, uint32_t value);

  // Throws Error if this rank or a peer was aborted.
  void check_aborted() const;

  // Blocks until ready(). Throws Error if a rank that lags(rank) says holds this one up has died, has closed
  // or is silent for `timeout` seconds, or if anybody aborts. title: what this rank is in.
  template <typename Ready, typename Lags>
  void wait(Ready&& ready, Lags&& lags, const std::string& title, double timeout) {
    for (int i = 0; i < kSpins; ++i) {
      if (ready()) return;
      spin_pause();
    }
    const auto deadline = deadline_after(timeout);
    while (true) {
      const auto slice = std::min(deadline, Clock::now() + kLook);
      own().head().bell.wait([&] { return ready() || has_ended(lags); }, slice);
      if (ready()) return;
      check_aborted();
      check_peers(lags, title);
      if (Clock::now() >= deadline) throw late(lags, title, timeout);
    }
  }

  static constexpr int kSpins = 500;

 private:
  static constexpr auto kLook =
      std::chrono::milliseconds(100);  // how often a waiter looks whether its peers live

  Segment& own() const { return *segments_[rank_]; }
  State state(int rank) const { return segments_[rank]->head().state.load(); }
  void ring_all();

  template <typename Lags>
  bool has_ended(Lags&& lags) const {
    for (int rank = 0; rank < world_size_; ++rank) {
      const State now = state(rank);
      if (now == State::kAborted || (now == State::kClosed && lags(rank))) return true;
    }
    return false;
  }
  template <typename Lags>
  void check_peers(Lags&& lags, const std::string& title) const {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (rank == rank_ || !lags(rank)) continue;
      const bool alive = watches_[rank] == nullptr || watches_[rank]->alive();
      if (state(rank) != State::kClosed && alive) continue;
      // Looked at again: what it did last counts, even if it has gone since.
      if (lags(rank)) throw lost(rank, alive, title);
    }
  }
  template <typename Lags>
  Error late(Lags&& lags, const std::string& title, double timeout) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (rank != rank_ && lags(rank)) ranks.push_back(rank);
    }
    return late_error(ranks, title, timeout);
  }
  Error lost(int rank, bool alive, const std::string& title) const;
  static Error late_error(const std::vector<int>& ranks, const std::string& title, double timeout);

  // Constant after construction.
  const int rank_;
  const int world_size_;
  const size_t slot_bytes_;
  const pid_t pid_;

  // Constant after connect.
  std::vector<std::unique_ptr<Segment>> segments_;  // by rank; before connect, this rank's only
  std::vector<std::unique_ptr<Watch>> watches_;     // null: a rank of this process
  std::atomic<bool> connected_{false};              // the peers' segments may be used by abort
};

}  // namespace dadt
