#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace dadt {

// The bytes to and from one rank, over one or more connected sockets, which belong to somebody else.
//
// Over one socket they go as they are. Over several they go in stripes: each on the next socket that has
// room, behind a head that says where in the stream it lies. The receiver takes the stripes in the order of
// the stream; one that is late holds up no more than the sockets' memory, into which the others come
// meanwhile.
//
// Sockets that break can be replaced: both sides detach theirs, tell each other how many bytes of the stream
// they have received, and send on from there over the new ones.
class Stream {
 public:
  // rank: the other one, for texts.
  Stream(int rank, const std::vector<int>& sockets);

  // Send and receive as many bytes as the kernel has room for, or has; 0 where that is none. Never block.
  // What was sent last may have to be flushed. Receive throws Error, if what comes is no stream.
  size_t send(const std::vector<iovec>& from);
  size_t receive(const std::vector<iovec>& to);
  // Hands the kernel what is to be sent again of earlier operations, and what is left of stripes that it has
  // taken a part of; false if something still is.
  bool flush();
  // Nothing more comes, or can be sent, over these sockets.
  bool has_ended() const { return has_ended_ && early_.size() == early_at_; }

  // Bytes of the current operation that were sent. An attached socket may take some back.
  size_t sent() const { return sent_ > settled_ ? static_cast<size_t>(sent_ - settled_) : 0; }
  // Of those, how many the other side may lack.
  size_t unacknowledged();
  // The operation's end. tail: its last bytes, all that the other side may lack.
  void settle(std::string tail);

  // Gives the sockets up. Takes what has come over them, and returns the position in the stream up to which
  // that is. Idempotent.
  uint64_t detach();
  bool is_detached() const { return is_detached_; }
  // Whether what follows a position can be sent again.
  bool can_resume(uint64_t position) const {
    return position + tail_.size() >= settled_ && position <= sent_;
  }
  // The sockets' descriptors stand for others now. position: up to which the other side has received.
  void attach(uint64_t position);

  // Seconds in which the network was what held up the bytes that were sent, by the kernel's account.
  double held_up() const;

  // Have a wait end once so many bytes are there.
  void wake_at(size_t bytes) { wake_at_ = bytes; }
  // Adds the sockets that poll(2) is to wait for. Returns whether something is there without a wait.
  bool add_to(std::vector<pollfd>& polled, short events);

 private:
  struct StripeHead {
    uint64_t position;
    uint64_t bytes;
  };
  struct Stripe {
    uint64_t end;       // in what the socket has sent
    uint64_t position;  // in the stream
  };
  struct Socket {
    int descriptor;
    int low_water = 1;  // as the kernel knows it
    bool is_full = false;
    bool is_closed = false;        // nothing more comes
    std::string left{};            // of a stripe, when the kernel has taken a part
    uint64_t sent = 0;             // bytes with heads, and with what is left
    std::deque<Stripe> stripes{};  // that may not be acknowledged
    StripeHead head{};             // of the stripe that comes
    size_t head_bytes = 0;         // of it that are here
    size_t got = 0;                // of the stripe's bytes
    bool has_head() const { return head_bytes == sizeof head; }
  };

  void prepare(Socket& socket) const;
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
  uint64_t sent_ = 0;      // bytes in all: the position of the next stripe
  uint64_t received_ = 0;  // bytes in all
  uint64_t settled_ = 0;   // where the current operation begins
  std::string tail_;       // the last bytes before it
  std::string early_;      // what came before the sockets were detached
  size_t early_at_ = 0;    // bytes of it that were received
  size_t turn_ = 0;        // the socket that is tried first
  size_t wake_at_ = 1;
  std::vector<iovec> parts_;
};

}  // namespace dadt
