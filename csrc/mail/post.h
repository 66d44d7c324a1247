#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "mail/byte_ring.h"
#include "mail/transit.h"

namespace dadt {

enum class FrameType : uint32_t { kMessage, kOffer, kAccept, kRefuse, kData };

// The header of a frame, which precedes its payload.
struct Frame {
  FrameType type;
  uint32_t payload;  // number of payload bytes after the header
  uint64_t id;       // number of the message, chosen by its sender and the same in all its frames
  int64_t tag;
  uint64_t bytes;  // bytes of the whole message; in a refusal, bytes that the receiver expects
};

using Handle = std::shared_ptr<Transit>;

// The interface by which a Post uses the transport that carries its frames to other ranks.
class Carrier {
 public:
  virtual ~Carrier() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Wakes a rank that may be asleep, since frames for it have arrived or there is room for its own frames.
  virtual void wake(int peer) = 0;
  // Makes all messages of all ranks fail with this reason.
  virtual void abort(const Error& reason) = 0;
  // Returns the error for a peer that has died, or has closed its connection while it lives. title: the
  // operation in which this rank waited for it.
  virtual Error lost(int peer, bool lives, const std::string& title) const = 0;
};

// A frame that waits for room to be written. Its payload is the message of `transit`, which is done once the
// payload is written; without a transit it has no payload.
struct Outgoing {
  Frame frame;
  Handle transit;
};

// A long message that the receiver has accepted, with the number of bytes transferred so far.
struct Course {
  uint64_t id;
  Handle transit;
  size_t offset;
};

// A message, or the offer of a message, for which no receive was posted yet.
struct Stray {
  Frame frame;
  int source;
  std::unique_ptr<uint8_t[]> data;
};

// The state of messages between this rank and one other. The owner of the Post guards it by a mutex, except
// for atomic fields.
struct Line {
  Line(const ByteRing& incoming, const ByteRing& outgoing) : in(incoming), out(outgoing) {}

  ByteRing in;
  ByteRing out;
  std::deque<Outgoing> frames;         // frames to send before the chunks of long messages
  std::map<uint64_t, Handle> offered;  // sends that wait for the receiver's acceptance, by id
  std::deque<Course> sending;
  std::map<uint64_t, Course> receiving;
  uint64_t last_id = 0;          // highest id of the messages and offers received
  bool lost = false;             // whether nothing can be sent to or received from the rank any more
  bool lives = true;             // whether a lost rank has only closed its connection, and not died
  std::atomic<size_t> needs{0};  // bytes of room that the next waiting frame needs
};

// Manages all messages between this rank and the others. Only one thread may use it at a time, except for
// `has_frames`, `pending` and waiting in a Transit.
class Post {
 public:
  static size_t memory_bytes(int world_size, size_t pipe_bytes) {
    return static_cast<size_t>(world_size) * ByteRing::memory_bytes(pipe_bytes);
  }

  Post(Carrier& carrier, size_t pipe_bytes);

  // Sets the rings of bytes from and to each rank, by rank. Call it once all ranks are connected.
  void open(std::vector<std::pair<ByteRing, ByteRing>> rings);
  bool is_open() const { return !lines_.empty(); }

  // Starts to transfer a message, which may be done within this call.
  void start(const Handle& transit);

  // Reads one frame from a rank. Returns false if there is none.
  bool read_frame(int peer);
  // Writes frames for a rank while there is room, but only a few in one call. Returns whether any was
  // written.
  bool flush(int peer);

  // Handles a rank that has died, or has closed its connection while it lives. Messages that have already
  // arrived from it can still be received; all other messages from or to it fail. A receive from any rank
  // fails if one rank has died, or no other rank is left.
  void lose(int peer, bool lives);
  bool has_lost(int peer) const { return lines_[peer]->lost; }
  // Makes all current and future messages fail.
  void fail(const Error& reason);
  bool has_failed() const { return error_.has_value(); }

  // Returns whether a frame can be read, or there is room to write a waiting frame.
  bool has_frames() const;
  // Returns the bytes of the longest message that is sent in one frame, without an offer: several such frames
  // fit into a pipe.
  size_t longest_message() const { return pipe_bytes_ / 8; }
  size_t chunk() const { return pipe_bytes_ / 4; }
  // Returns the number of messages that are not done.
  size_t pending() const { return pending_; }

 private:
  void start_send(const Handle& transit);
  void start_receive(const Handle& transit);
  void accept(const Handle& receive, int source, const Frame& offer);
  bool is_sound(const Line& line, const Frame& frame) const;
  void refuse(int peer);
  bool fits(const Handle& receive, int source, const Frame& frame);
  Handle take_posted(int source, int64_t tag);
  void take_message(int peer, const Frame& frame);
  void take_offer(int peer, const Frame& frame);
  void take_answer(int peer, const Frame& frame);
  void take_data(int peer, const Frame& frame);
  size_t next_size(const Line& line) const;
  void write_next(int peer);
  void drop(Line& line, const std::function<Error(const Transit&)>& reason);
  void finish(Transit& transit, int source);
  void end(Transit& transit, const Error& reason);
  Error lost(const Transit& transit, int peer) const;
  std::optional<int> nobody_for(const Transit& receive) const;

  // The following fields are constant after construction.
  Carrier& carrier_;
  const int rank_;
  const size_t pipe_bytes_;

  // The following field is constant after `open`.
  std::vector<std::unique_ptr<Line>> lines_;  // one line per rank, including this rank itself

  // Any thread may use the following field.
  std::atomic<size_t> pending_{0};

  // Used by one thread at a time, which the owner of the Post must ensure.
  std::deque<Handle> posted_;  // receives that wait for a message, in the order of their calls
  std::deque<Stray> strays_;   // messages without a receive, in the order of their arrival
  uint64_t last_id_ = 0;
  std::optional<Error> error_;  // the error with which all messages fail, if any
};

}  // namespace dadt
