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
#include "tcp/link_meter.h"
#include "tcp/stream.h"

namespace dadt {

// One rank's TCP connections with the others of a group: one or more for data with each of them, and one on
// which each says why it gives up, or that it has come to its orderly end. They are connected by somebody
// else, who has let both sides prove themselves, and who may replace those with a rank when they break.
class Links {
 public:
  // data, notices: the descriptors of connected sockets by rank, none and below 0 at this rank's place. They
  // belong to it from now on. silence: seconds after which a connection on which nothing is acknowledged
  // counts as broken; above 0, somebody waits in `await_break` for those that break, and replaces them. 0: a
  // rank whose connections break is gone.
  Links(int rank, const std::vector<std::vector<int>>& data, const std::vector<int>& notices,
        double silence = 0);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(notices_.size()); }

  // See Executor: abort from any thread, close from one.
  void abort(const Error& error);
  void close();

  // Any thread: what was last read of the connections for data with each rank.
  std::vector<LinkCounts> counts() const;

  // Any thread but the engine's, nothing in a forked child:

  // Blocks until connections with a rank break, and gives them up as `detach` does. None once this rank has
  // been closed or aborted.
  std::optional<int> await_break();
  // Gives the connections with a rank up, unless they are already, and returns how much has come of what it
  // sends. None if the rank is gone, or this one has been closed or aborted.
  std::optional<uint64_t> detach(int rank);
  // Whether they are given up, and nothing stands in their place yet.
  bool is_detached(int rank);
  // Whether the rank has ended the connection for its notices, too.
  bool has_left(int rank);
  // Puts others in their place, whose descriptors stay the caller's. received: how much the rank says has
  // come of what this one sends. Blocks until what it lacks of earlier operations has been handed to the
  // kernel, or these break. False if none is needed, or what it lacks is not known any more.
  bool attach(int rank, const std::vector<int>& data, int notices, uint64_t received);
  // The rank is gone: nothing will be put in their place.
  void give_up(int rank);

  // The engine's thread, which holds `streams` while it is in an operation:

  std::mutex& streams() { return streams_mutex_; }

  // Reads what the kernel counts for the connections, if it is time.
  void measure();

  // Send to and receive from a rank as many bytes as the kernel has room for, or has; 0 where that is none.
  // Never block. Throw Error if the rank is gone. title: what this rank is in.
  size_t send(int rank, const std::vector<iovec>& from, const std::string& title);
  size_t receive(int rank, const std::vector<iovec>& to, const std::string& title);
  // Hands the kernel what is left of earlier sends; false if something still is.
  bool flush(int rank, const std::string& title);
  // See Stream.
  size_t sent(int rank) const { return streams_[rank].sent(); }
  size_t unacknowledged(int rank) { return streams_[rank].unacknowledged(); }
  void settle(int rank, std::string tail) { streams_[rank].settle(std::move(tail)); }
  // Have a wait for data from a rank end once so many bytes are there.
  void wake_at(int rank, size_t bytes) { streams_[rank].wake_at(bytes); }
  // See Stream.
  double held_up(int rank) const { return streams_[rank].held_up(); }
  // Throws Error if this rank or a peer was aborted.
  void check_aborted();
  // What poll(2) is to wait for on a rank's sockets for data, and after `wait`, what has come.
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
    std::string text{};             // what has come so far
    bool ended = false;             // nothing more comes
    bool closed = false;            // the rank has come to its orderly end
    std::optional<Error> reason{};  // why it gives up
  };

  bool inert() const;
  void ring(int bell) const;
  bool has_told();
  bool is_gone(int rank) const;
  bool breaks(int rank, bool is_sure);
  std::optional<uint64_t> detach_held(int rank);
  Error lost(int rank, const std::string& title);
  void check_reasons() const;
  void send_notices(uint32_t code, const std::string& text);
  void read_notice(int rank);

  // Constant after construction.
  const int rank_;
  const std::vector<std::vector<int>> data_;
  const std::vector<int> notices_;
  std::vector<int> sockets_;            // all of them
  std::vector<std::string> addresses_;  // of the peers, for texts
  const pid_t pid_;
  const double silence_;
  int bell_ = -1;   // an eventfd for the engine's thread
  int watch_ = -1;  // one for await_break

  // Any thread.
  std::atomic<bool> is_aborted_{false};
  LinkMeter meter_;

  // Guarded by mutex.
  std::mutex mutex_;
  std::optional<Error> error_;  // of this rank's own abort
  bool told_ = false;           // the peers know of the end

  // Guarded by streams_mutex_.
  std::mutex streams_mutex_;
  std::vector<Notice> heard_;
  std::vector<Stream> streams_;  // by rank, for data
  std::vector<bool> given_up_;   // by rank
};

}  // namespace dadt
