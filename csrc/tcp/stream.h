#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tcp/kept_link.h"
#include "tcp/link_speed.h"

namespace dadt {

// The two streams of bytes to and from one rank, over one or more connected sockets, which this object does
// not own.
//
// Over one socket the bytes are sent as they are. Over several sockets they are sent in stripes: each stripe
// on the next socket that has room, after a header with its position in the stream. The receiver reads the
// stripes in the order of the stream; while one is late, the kernel stores those that arrive on other
// sockets.
//
// Sockets that break can be replaced: both sides detach their sockets, inform each other how many bytes of
// the stream they have received, and continue from this position over the new sockets.
class Stream {
 public:
  // rank: number of the other rank, for error messages.
  Stream(int rank, const std::vector<int>& sockets);

  // Send or receive as many bytes as is possible at once, possibly 0. Never block. After send, `flush` may be
  // needed for the last bytes. receive throws Error if the data is not a valid stream.
  size_t send(const std::vector<iovec>& from);
  size_t receive(const std::vector<iovec>& to);
  // Passes bytes to the kernel that must be sent again, and the rest of stripes that it has accepted in part.
  // Returns false if some still remain.
  bool flush();
  // Returns whether nothing more can be received or sent over these sockets.
  bool has_ended() const { return has_ended_ && early_.size() == early_at_; }

  // Returns the bytes sent in the current operation. This number may decrease when sockets are replaced,
  // since bytes must be sent again.
  size_t sent() const { return sent_ > settled_ ? static_cast<size_t>(sent_ - settled_) : 0; }
  // Returns how many of the sent bytes the other side may not have received.
  size_t unacknowledged();
  // Ends the operation. tail: copy of its last bytes, which the other side may not have received.
  void settle(std::string tail);
  // Adds bytes that belong to no operation, for `flush` to send. A copy is kept until the other side's kernel
  // has acknowledged them. A stream has either such bytes or operations.
  void append(const void* data, size_t bytes);

  // Shuts down the sockets, stores bytes that have arrived, and returns the position in the stream after
  // them. Idempotent.
  uint64_t detach();
  bool is_detached() const { return is_detached_; }
  // Returns whether all bytes after a position are still stored, so that they can be sent again.
  bool can_resume(uint64_t position) const {
    return position + tail_.size() >= settled_ && position <= sent_;
  }
  // Continues over the new sockets to which the same descriptors now refer. position: number of bytes that
  // the other side has received.
  void attach(uint64_t position);

  // Ends this object's use of the sockets, and returns them.
  std::vector<UsedSocket> release();

  // Returns what the kernel has counted on the current sockets.
  Traffic traffic() const;
  // Returns the shortest round trip of recent minutes, in seconds, as the kernel measures it.
  double shortest_round_trip() const;
  // Returns the largest number of bytes that the other side sends in one packet.
  size_t segment_bytes() const;

  // Limits how many bytes, at least 1, the other side may have in flight. There must be a single socket.
  void limit_window(size_t bytes);

  // Lets a wait for received bytes end only once this many have arrived.
  void wake_at(size_t bytes) { wake_at_ = bytes; }
  // Adds the sockets on which poll(2) must wait for these events. Returns whether data can be received
  // without waiting.
  bool add_to(std::vector<pollfd>& polled, short events);

 private:
  struct StripeHead {
    uint64_t position;
    uint64_t bytes;
  };
  struct Stripe {
    uint64_t end;       // position of the stripe's end among the bytes sent over the socket
    uint64_t position;  // position of the stripe in the stream
  };
  struct Socket {
    int descriptor;
    uint64_t written = 0, read = 0;  // bytes, including headers
    int low_water = 1;  // bytes from which the kernel reports the socket as readable (SO_RCVLOWAT)
    bool is_full = false;
    bool is_closed = false;        // whether the other side has closed the socket
    std::string left{};            // rest of a stripe of which the kernel has accepted a part
    uint64_t sent = 0;             // bytes sent, including headers and `left`
    std::deque<Stripe> stripes{};  // stripes that may not be acknowledged yet
    StripeHead head{};             // header of the stripe that is being received
    size_t head_bytes = 0;         // bytes of the header that were received
    size_t got = 0;                // bytes of the stripe that were received
    bool has_head() const { return head_bytes == sizeof head; }
  };

  void prepare(Socket& socket) const;
  void clamp_window() const;
  uint64_t acknowledged();
  bool resend();
  bool flush(Socket& socket);
  size_t push(const std::vector<iovec>& from);
  size_t take(const std::vector<iovec>& to);
  size_t take_early(const std::vector<iovec>& to);
  size_t send_some(Socket& socket, std::vector<iovec>& from);
  size_t receive_some(Socket& socket, std::vector<iovec>& to);
  Socket* next();
  Socket* found();

  int rank_;
  std::vector<Socket> sockets_;
  bool has_ended_ = false;
  bool is_detached_ = false;
  uint64_t sent_ = 0;      // total bytes sent, which is the position of the next stripe
  uint64_t received_ = 0;  // total bytes received
  uint64_t settled_ = 0;   // position at which the current operation begins
  std::string tail_;       // last bytes before `settled_`
  std::string early_;      // bytes that arrived before the sockets were detached
  size_t early_at_ = 0;    // bytes of `early_` that were already passed on
  size_t turn_ = 0;        // index of the socket to try first
  size_t wake_at_ = 1;
  size_t window_ = 0;  // most bytes in flight from the other side; 0 for as many as the kernel allows
  std::vector<iovec> parts_;
};

}  // namespace dadt
