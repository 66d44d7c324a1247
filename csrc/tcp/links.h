#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/event_count.h"
#include "tcp/kept_link.h"
#include "tcp/link_meter.h"
#include "tcp/link_notice.h"
#include "tcp/stream.h"

namespace dadt {

// Numbers of bytes that a rank has received from another one in its data stream and its stream of messages.
struct Positions {
  uint64_t data, mail;
};

// One rank's TCP connections with the other ranks of a group: for each rank one for a notice with which a
// rank reports that it ends normally, or the error with which it fails, one for messages between two ranks,
// and one or more for the data of operations. Python code connects them, authenticates both sides, and may
// replace all connections with a rank together if some break.
class Links {
 public:
  // Index of a connection among those with a rank: the one for notices, the one for messages, and the first
  // one for data.
  static constexpr size_t kNotices = 0, kMail = 1, kData = 2;

  // sockets: descriptors of connected sockets by rank, in the order of these indices; for this rank itself,
  // none. This object takes ownership of the sockets. silence: seconds without an acknowledgement after which
  // a connection counts as broken. If above 0, a thread waits in `await_break` for connections that break and
  // replaces them. If 0, a rank whose connections break is lost.
  Links(int rank, const std::vector<std::vector<int>>& sockets, double silence = 0);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(sockets_.size()); }
  // Returns the address of a rank, for error messages.
  const std::string& address(int rank) const { return addresses_[rank]; }

  // These methods have the same meaning as in Executor. Any thread may call abort, and one thread close.
  void abort(const Error& error);
  void close();
  // Gives up the connections, after `close` and after the mailbox is closed. Returns by rank those that
  // stand, if this object was aborted, for the next group of ranks; otherwise null.
  std::vector<std::unique_ptr<KeptLink>> release();

  // Returns the kernel's counts for the data connections with each rank, as last read. May be called from any
  // thread.
  std::vector<LinkCounts> counts() const;

  // The following methods may be called from any thread except the engine's and the mailbox's; in a forked
  // child they do nothing.

  // Blocks until connections with a rank break, detaches them as `detach` does, and returns the rank. Returns
  // nullopt once this object is closed or aborted.
  std::optional<int> await_break();
  // Shuts down the connections with a rank, unless they already are, and returns how many bytes of the rank's
  // streams were received. Returns nullopt if the rank has ended, or this object is closed or aborted.
  std::optional<Positions> detach(int rank);
  // Returns whether the connections with a rank are detached and may still be replaced.
  bool is_detached(int rank);
  // Returns whether nothing more will arrive on the rank's connection for notices.
  bool has_left(int rank);
  // Replaces the connections with a rank by new ones in the same order, whose descriptors the caller keeps.
  // received: number of bytes of this rank's streams that the other rank has received. Blocks until all bytes
  // of earlier operations that the other rank has not received are passed to the kernel, or until the new
  // connections break. Returns false if no replacement is needed, or if some of these bytes are no longer
  // stored.
  bool attach(int rank, const std::vector<int>& sockets, Positions received);
  // Records that a rank is gone, so that its connections will not be replaced.
  void give_up(int rank);

  // The following methods are for the engine's thread, which holds `streams` during an operation.

  std::mutex& streams() { return streams_mutex_; }

  // Reads the kernel's counts for the connections, if a reading is due.
  void measure();

  // Send to or receive from a rank as many bytes as is possible at once, possibly 0. Never block. Throw Error
  // if the rank is gone. title: the operation for error messages.
  size_t send(int rank, const std::vector<iovec>& from, const std::string& title);
  size_t receive(int rank, const std::vector<iovec>& to, const std::string& title);
  // Passes bytes to the kernel that earlier sends have stored. Returns false if some still remain.
  bool flush(int rank, const std::string& title);
  // For these methods see Stream.
  size_t sent(int rank) const { return streams_[rank].sent(); }
  size_t unacknowledged(int rank) { return streams_[rank].unacknowledged(); }
  void settle(int rank, std::string tail) { streams_[rank].settle(std::move(tail)); }
  // Lets `wait` for data from a rank end only once this many bytes have arrived.
  void wake_at(int rank, size_t bytes) { streams_[rank].wake_at(bytes); }
  // Returns what the kernel has counted on all data connections.
  Traffic traffic() const;
  // Limits how many bytes each other rank may have in flight to this one, such that all together hardly
  // overflow the queue before a link. rates: speed of each rank's link in bytes per second; 0 if unknown.
  // senders: number of ranks that send to this one at once.
  void share_windows(const std::vector<uint64_t>& rates, int senders);
  // Throws Error if this rank or a peer has called abort.
  void check_aborted();
  // The events of poll(2) to await on a rank's data sockets, and after `wait` the events that have occurred.
  struct Interest {
    int rank;
    short events;
    short found;
  };
  // Blocks until one of the events occurs or the deadline passes. Throws Error if this rank or a peer calls
  // abort.
  void wait(std::vector<Interest>& interests, Clock::time_point deadline);

  // The following methods are for the mailbox.

  // The mutex that guards the streams of messages.
  std::mutex& mail() { return mail_mutex_; }
  Stream& mail(int rank) { return mail_[rank]; }
  // Returns the connection for messages of each rank, as LinkMeter reads it.
  const std::vector<std::vector<int>>& mail_sockets() const { return mail_sockets_; }
  // Returns the eventfd that wakes the mailbox's thread, also when a connection has broken or was replaced.
  int mail_bell() const { return mail_bell_; }
  void ring_mail() const { ring(mail_bell_); }
  // Returns, for a rank whose stream of messages has ended, whether the rank has ended normally; nullopt if
  // its connections may be replaced, or this rank was aborted. Call it without locking the mutex.
  std::optional<bool> fate(int rank);
  // Records that the mailbox sends nothing more to any rank.
  void end_mail();
  // Returns whether this rank was aborted, and so has told the others that it fails.
  bool is_aborted() const { return is_aborted_; }

 private:
  struct Heard {
    LinkNotice notice{};
    bool ended = false;             // whether the rank sends nothing more
    bool closed = false;            // whether the rank has ended normally
    bool speaks = true;             // whether the notice is valid
    std::optional<Error> reason{};  // error with which the rank fails
  };

  bool inert() const;
  void ring(int bell) const;
  void ring_all() const;
  bool has_told();
  bool is_over(int rank) const;
  bool is_gone(int rank) const;
  bool breaks(int rank, bool is_sure);
  std::optional<Positions> detach_held(int rank);
  Error lost(int rank, const std::string& title);
  void check_reasons() const;
  void send_notices(uint32_t code, const std::string& text);
  void read_notice(int rank);
  void hang_up(int rank);

  int notices(int rank) const { return sockets_[rank][kNotices]; }

  const int rank_;
  const std::vector<std::vector<int>> sockets_;  // all sockets, by rank
  std::vector<std::vector<int>> data_, mail_sockets_;
  std::vector<std::string> addresses_;
  const pid_t pid_;
  const double silence_;
  int bell_ = -1;       // eventfd that wakes the engine's thread
  int watch_ = -1;      // eventfd that wakes await_break
  int mail_bell_ = -1;  // eventfd that wakes the mailbox's thread

  // Any thread may use the following fields.
  std::atomic<bool> is_aborted_{false};
  LinkMeter meter_;

  // This mutex guards the following fields.
  std::mutex mutex_;
  std::optional<Error> error_;  // error with which `abort` was called on this rank
  bool told_ = false;           // whether the peers were informed of this rank's end
  bool is_closed_ = false;

  // This mutex guards the following fields.
  std::mutex streams_mutex_;
  std::vector<Heard> heard_;
  std::vector<Stream> streams_;  // data stream of each rank
  std::vector<bool> given_up_;   // for each rank, whether it was given up
  std::vector<bool> released_;   // for each rank, whether its sockets are those of a KeptLink

  // mail_mutex_ guards the following fields. It may be locked while streams_mutex_ is, but not the other way
  // round.
  std::mutex mail_mutex_;
  std::vector<Stream> mail_;  // stream of messages of each rank
};

}  // namespace dadt
