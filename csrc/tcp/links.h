#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/event_count.h"

namespace dadt {

// One rank's TCP connections with the others of a group: one for data with each of them, and one on which
// each says why it gives up, or that it has come to its orderly end. They are connected by somebody else, who
// has let both sides prove themselves.
class Links {
 public:
  // data, notices: the descriptors of connected sockets by rank, below 0 at this rank's place. They belong to
  // it from now on.
  Links(int rank, std::vector<int> data, std::vector<int> notices);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(data_.size()); }

  // See Executor: abort from any thread, close from one.
  void abort(const Error& error);
  void close();

  // The engine's thread:

  // Send to and receive from a rank as many bytes as the kernel has room for, or has; 0 where that is none.
  // Never block. Throw Error if the rank is gone. title: what this rank is in.
  size_t send(int rank, const std::vector<iovec>& from, const std::string& title);
  size_t receive(int rank, const std::vector<iovec>& to, const std::string& title);
  // Have a wait for data from a rank end once so many bytes are there.
  void wake_at(int rank, int bytes);
  // Throws Error if this rank or a peer was aborted.
  void check_aborted();
  // What poll(2) is to wait for on a rank's socket for data, and after `wait`, what has come.
  struct Interest {
    int rank;
    short events;
    short found;
  };
  // Blocks until there is something for one of them, this rank or a peer is aborted (throws Error), or the
  // deadline has passed.
  void wait(std::vector<Interest>& interests, Clock::time_point deadline);

 private:
  struct Notice {
    std::string text{};   // what has come so far
    bool ended = false;   // nothing more comes
    bool closed = false;  // the rank has come to its orderly end
  };

  bool inert() const;
  size_t moved(ssize_t count, int rank, const std::string& title);
  Error lost(int rank, const std::string& title);
  void send_notices(uint32_t code, const std::string& text);
  void read_notice(int rank);

  // Constant after construction.
  const int rank_;
  const std::vector<int> data_;
  const std::vector<int> notices_;
  std::vector<std::string> addresses_;  // of the peers, for texts
  const pid_t pid_;
  int bell_ = -1;  // an eventfd that abort rings

  // Any thread.
  std::atomic<bool> is_aborted_{false};

  // Guarded by mutex.
  std::mutex mutex_;
  std::optional<Error> error_;  // of this rank's own abort
  bool told_ = false;           // the peers know of the end

  // Engine thread only.
  std::vector<Notice> heard_;
  std::vector<int> low_water_;  // by rank, as the kernel knows it
};

}  // namespace dadt
