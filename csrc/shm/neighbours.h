#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/process.h"
#include "engine/executor.h"
#include "shm/segment.h"

namespace dadt {

// The ranks of one host: each rank's segment of shared memory, and whether its owner is alive. Other classes
// define the content of the segments.
class Neighbours {
 public:
  // body_bytes, ready: as in Segment; the same on all ranks.
  Neighbours(int rank, int world_size, size_t body_bytes, bool ready);
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  std::string endpoint() const;
  // Blocks until all ranks have opened each other's segments, as Executor::connect does.
  void connect(const std::vector<std::string>& endpoints, double timeout);
  // These methods have the same meaning as in Executor. Any thread may call abort, and one thread close.
  void abort(const Error& error);
  void close();

  // The following methods may be called after connect.

  SegmentHead& head(int rank) const { return segments_[rank]->head(); }
  uint8_t* body(int rank) const { return segments_[rank]->body(); }
  State state(int rank) const { return head(rank).state.load(); }
  bool alive(int rank) const { return watches_[rank] == nullptr || watches_[rank]->alive(); }

  // Throws Error if this rank or a peer has called abort.
  void check_aborted() const;

  // Blocks until ready() is true. lags(rank) returns whether this rank waits for the given rank. Throws Error
  // if a rank that this one waits for has died or closed, if ready() is false for `timeout` seconds, or if
  // any rank aborts. title: the operation for error messages.
  template <typename Ready, typename Lags>
  void wait(Ready&& ready, Lags&& lags, const std::string& title, double timeout) {
    for (int i = 0; i < kSpins; ++i) {
      if (ready()) return;
      spin_pause();
    }
    const auto deadline = deadline_after(timeout);
    while (true) {
      const auto slice = std::min(deadline, Clock::now() + kLook);
      head(rank_).event.wait([&] { return ready() || has_ended(lags); }, slice);
      if (ready()) return;
      check_aborted();
      check_peers(lags, title);
      if (Clock::now() >= deadline) throw late(lags, title, timeout);
    }
  }

  // Returns the error for a peer that has died, or has closed its segment while it lives. title: the
  // operation in which this rank waited for it.
  Error lost(int rank, bool lives, const std::string& title) const;

  static constexpr int kSpins = 500;
  static constexpr auto kLook =
      // Interval at which a waiting rank checks whether its peers are alive.
      std::chrono::milliseconds(100);

 private:
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
      const bool lives = alive(rank);
      if (state(rank) != State::kClosed && lives) continue;
      // Checked again, since the rank may have done what this rank waits for just before it ended.
      if (lags(rank)) throw lost(rank, lives, title);
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

  // The following fields are constant after construction.
  const int rank_;
  const int world_size_;
  const size_t body_bytes_;
  const bool ready_;
  const pid_t pid_;

  // The following fields are constant after `connect`.
  std::vector<std::unique_ptr<Segment>> segments_;  // segment of each rank; before connect, only this rank's
  std::vector<std::unique_ptr<Watch>> watches_;     // watch on each rank; null for a rank in this process
  std::atomic<bool> connected_{false};              // whether abort may use the peers' segments
};

}  // namespace dadt
