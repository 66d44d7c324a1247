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

// The head of a frame, before its payload.
struct Frame {
  FrameType type;
  uint32_t payload;  // bytes behind it
  uint64_t id;       // of the sender's, of an offer and what follows from it
  int64_t tag;
  uint64_t bytes;  // of the message; in a refusal: of what it was to fill
};

using Handle = std::shared_ptr<Transit>;

// What carries the frames of a Post to other ranks, as it needs it.
class Carrier {
 public:
  virtual ~Carrier() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Wakes a rank that may sleep: frames for it are there, or room for its own.
  virtual void wake(int peer) = 0;
  // Has all ranks give up.
  virtual void abort(const Error& reason) = 0;
  // What to say of a peer that has died, or has closed though it lives. title: what it was waited for in.
  virtual Error lost(int peer, bool lives, const std::string& title) const = 0;
};

// A frame that waits for room. The payload is the transit's, which is done when it is written.
struct Outgoing {
  Frame frame;
  Handle transit;
};

// A long message that both sides have agreed upon; how far it has got.
struct Course {
  uint64_t id;
  Handle transit;
  size_t offset;
};

// A message, or the offer of one, that nobody has asked for yet.
struct Stray {
  Frame frame;
  int source;
  std::unique_ptr<uint8_t[]> data;
};

// The state between this rank and one other. Guarded by whoever owns the Post, but for what
// is atomic.
struct Line {
  Line(const ByteRing& incoming, const ByteRing& outgoing) : in(incoming), out(outgoing) {}

  ByteRing in;
  ByteRing out;
  std::deque<Outgoing> frames;         // go before the long messages
  std::map<uint64_t, Handle> offered;  // sends, by id
  std::deque<Course> sending;
  std::map<uint64_t, Course> receiving;
  uint64_t last_id = 0;          // of the messages and offers that have come
  bool lost = false;             // nothing can be sent to it any more, and nothing more will come
  bool lives = true;             // lost: it has closed, but not died
  std::atomic<size_t> needs{0};  // room for the next frame that waits
};

// All messages under way between this rank and the others, and their progress. One thread at a time, but for
// `has_frames`, `pending` and a wait in a Transit.
class Post {
 public:
  static size_t memory_bytes(int world_size, size_t pipe_bytes) {
    return static_cast<size_t>(world_size) * ByteRing::memory_bytes(pipe_bytes);
  }

  Post(Carrier& carrier, size_t pipe_bytes);

  // Once all ranks are connected: the rings from and to a rank, by rank.
  void open(std::vector<std::pair<ByteRing, ByteRing>> rings);
  bool is_open() const { return !lines_.empty(); }

  // Takes a message on. Some are done at once.
  void start(const Handle& transit);

  // Reads one frame of what a rank has sent; false if there is none.
  bool read_frame(int peer);
  // Writes what a rank is to get, as far as there is room, but not for ever; true if there was something.
  bool flush(int peer);

  // A rank has died, or has closed though it lives: what it sent before counts, what waits for it fails. Who
  // waits for anybody waits for all: that fails where one has died, or none is left.
  void lose(int peer, bool lives);
  bool has_lost(int peer) const { return lines_[peer]->lost; }
  // All fails, now and later.
  void fail(const Error& reason);
  bool has_failed() const { return error_.has_value(); }

  // Whether there is something to read, or room for what is to be written.
  bool has_frames() const;
  // Bytes behind the head of a frame, at most. Short enough that several fit into a pipe.
  size_t longest_message() const { return pipe_bytes_ / 8; }
  size_t chunk() const { return pipe_bytes_ / 4; }
  // Messages that are not done.
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

  // Constant after construction.
  Carrier& carrier_;
  const int rank_;
  const size_t pipe_bytes_;

  // Constant after open.
  std::vector<std::unique_ptr<Line>> lines_;  // by rank, this one included

  // Any thread.
  std::atomic<size_t> pending_{0};

  // The caller's.
  std::deque<Handle> posted_;  // receives, in their order
  std::deque<Stray> strays_;   // in the order of their arrival
  uint64_t last_id_ = 0;
  std::optional<Error> error_;  // the first
};

}  // namespace dadt
