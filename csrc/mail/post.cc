#include "mail/post.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

namespace dadt {
namespace {

std::string mismatch(int from, int to, int64_t tag, size_t sent, size_t expected) {
  std::ostringstream text;
  text << "rank " << from << " sends a message of " << sent << " bytes with tag " << tag << " to rank " << to
       << ", which expects " << expected;
  return text.str();
}

bool matches(const Transit& receive, int source, int64_t tag) {
  return receive.tag == tag && (receive.peer == source || receive.peer == Transit::kAny);
}

}  // namespace

Post::Post(Carrier& carrier, size_t pipe_bytes)
    : carrier_(carrier), rank_(carrier.rank()), pipe_bytes_(pipe_bytes) {}

void Post::open(std::vector<std::pair<ByteRing, ByteRing>> rings) {
  for (const auto& [in, out] : rings) lines_.push_back(std::make_unique<Line>(in, out));
}

void Post::start(const Handle& transit) {
  ++pending_;
  if (error_) return end(*transit, *error_);
  if (transit->side == Transit::kSend) return start_send(transit);
  start_receive(transit);
}

void Post::start_send(const Handle& transit) {
  Line& line = *lines_[transit->peer];
  if (line.lost) return end(*transit, lost(*transit, transit->peer));
  Frame frame{FrameType::kMessage, 0, ++last_id_, transit->tag, transit->bytes};
  if (transit->bytes <= longest_message()) {
    frame.payload = static_cast<uint32_t>(transit->bytes);
    line.frames.push_back({frame, transit});
  } else {
    frame.type = FrameType::kOffer;
    line.offered[frame.id] = transit;
    line.frames.push_back({frame, nullptr});
  }
  flush(transit->peer);
}

void Post::start_receive(const Handle& transit) {
  const auto stray = std::ranges::find_if(
      strays_, [&](const Stray& one) { return matches(*transit, one.source, one.frame.tag); });
  if (stray == strays_.end()) {
    if (const auto peer = nobody_for(*transit)) return end(*transit, lost(*transit, *peer));
    posted_.push_back(transit);
    return;
  }
  const Stray found = std::move(*stray);
  strays_.erase(stray);
  if (found.frame.type == FrameType::kOffer) return accept(transit, found.source, found.frame);
  if (!fits(transit, found.source, found.frame)) return;
  if (transit->bytes > 0) std::memcpy(transit->data, found.data.get(), transit->bytes);
  finish(*transit, found.source);
}

// Returns whether the message is as long as the receive expects, and otherwise makes the receive fail.
bool Post::fits(const Handle& receive, int source, const Frame& frame) {
  if (receive->bytes == frame.bytes) return true;
  end(*receive, Error(Code::kMismatch, mismatch(source, rank_, frame.tag, frame.bytes, receive->bytes)));
  return false;
}

void Post::accept(const Handle& receive, int source, const Frame& offer) {
  Line& line = *lines_[source];
  Frame answer{FrameType::kAccept, 0, offer.id, offer.tag, receive->bytes};
  if (line.lost) return end(*receive, lost(*receive, source));
  if (fits(receive, source, offer)) {
    line.receiving[offer.id] = {offer.id, receive, 0};
  } else {
    answer.type = FrameType::kRefuse;
  }
  line.frames.push_back({answer, nullptr});
  flush(source);
}

Handle Post::take_posted(int source, int64_t tag) {
  const auto found =
      std::ranges::find_if(posted_, [&](const Handle& one) { return matches(*one, source, tag); });
  if (found == posted_.end()) return nullptr;
  Handle transit = std::move(*found);
  posted_.erase(found);
  return transit;
}

bool Post::read_frame(int peer) {
  Line& line = *lines_[peer];
  if (line.in.unread() == 0) return false;
  Frame frame;
  line.in.peek(&frame, 0, sizeof frame);
  if (!is_sound(line, frame)) {
    refuse(peer);
    return true;
  }
  switch (frame.type) {
    case FrameType::kMessage:
      take_message(peer, frame);
      break;
    case FrameType::kOffer:
      take_offer(peer, frame);
      break;
    case FrameType::kAccept:
    case FrameType::kRefuse:
      take_answer(peer, frame);
      break;
    case FrameType::kData:
      take_data(peer, frame);
      break;
  }
  if (line.in.pop(sizeof frame + frame.payload)) carrier_.wake(peer);
  return true;
}

// Returns whether a correct peer may send this frame now. Lengths from a peer are not trusted before this
// check.
bool Post::is_sound(const Line& line, const Frame& frame) const {
  const size_t unread = line.in.unread();
  if (unread > pipe_bytes_ || unread < sizeof frame || unread - sizeof frame < frame.payload) return false;
  switch (frame.type) {
    case FrameType::kMessage:
      return frame.payload == frame.bytes && frame.bytes <= longest_message() && frame.id > line.last_id;
    case FrameType::kOffer:
      return frame.payload == 0 && frame.bytes > longest_message() && frame.id > line.last_id;
    case FrameType::kAccept:
    case FrameType::kRefuse:
      return frame.payload == 0;
    case FrameType::kData: {
      if (frame.payload == 0 || frame.payload > chunk()) return false;
      const auto found = line.receiving.find(frame.id);
      if (found == line.receiving.end()) return true;  // the message has failed meanwhile
      const Course& course = found->second;
      return frame.payload <= course.transit->bytes - course.offset;
    }
  }
  return false;
}

// Makes all messages of all ranks fail, since a peer has sent an invalid frame, after which its bytes cannot
// be interpreted.
void Post::refuse(int peer) {
  const Error reason(Code::kComm, "rank " + std::to_string(peer) + " sent what is no message of DADT's");
  lines_[peer]->in.pop(lines_[peer]->in.unread());
  if (error_) return;
  fail(reason);
  carrier_.abort(reason);
}

void Post::take_message(int peer, const Frame& frame) {
  lines_[peer]->last_id = frame.id;
  if (error_) return;  // all receives have failed, so none can get this message
  ByteRing& in = lines_[peer]->in;
  const Handle receive = take_posted(peer, frame.tag);
  if (receive == nullptr) {
    Stray stray{frame, peer, std::unique_ptr<uint8_t[]>(new uint8_t[frame.payload])};
    in.peek(stray.data.get(), sizeof frame, frame.payload);
    strays_.push_back(std::move(stray));
  } else if (fits(receive, peer, frame)) {
    in.peek(receive->data, sizeof frame, frame.payload);
    finish(*receive, peer);
  }
}

void Post::take_offer(int peer, const Frame& frame) {
  lines_[peer]->last_id = frame.id;
  if (error_) return;
  const Handle receive = take_posted(peer, frame.tag);
  if (receive == nullptr) {
    strays_.push_back({frame, peer, nullptr});
  } else {
    accept(receive, peer, frame);
  }
}

void Post::take_answer(int peer, const Frame& frame) {
  Line& line = *lines_[peer];
  const auto found = line.offered.find(frame.id);
  if (found == line.offered.end()) return;  // the message has failed meanwhile
  const Handle send = std::move(found->second);
  line.offered.erase(found);
  if (frame.type == FrameType::kAccept) {
    line.sending.push_back({frame.id, send, 0});
    line.needs = next_size(line);
  } else {
    end(*send, Error(Code::kMismatch, mismatch(rank_, peer, send->tag, send->bytes, frame.bytes)));
  }
}

void Post::take_data(int peer, const Frame& frame) {
  Line& line = *lines_[peer];
  const auto found = line.receiving.find(frame.id);
  if (found == line.receiving.end()) return;  // the message has failed meanwhile
  Course& course = found->second;
  line.in.peek(course.transit->data + course.offset, sizeof frame, frame.payload);
  course.offset += frame.payload;
  if (course.offset < course.transit->bytes) return;
  finish(*course.transit, peer);
  line.receiving.erase(found);
}

// Returns the bytes of the next frame to be sent to a rank, including the header; 0 if there is none.
size_t Post::next_size(const Line& line) const {
  if (!line.frames.empty()) return sizeof(Frame) + line.frames.front().frame.payload;
  if (line.sending.empty()) return 0;
  const Course& course = line.sending.front();
  return sizeof(Frame) + std::min(chunk(), course.transit->bytes - course.offset);
}

void Post::write_next(int peer) {
  Line& line = *lines_[peer];
  if (!line.frames.empty()) {
    const Outgoing next = std::move(line.frames.front());
    line.frames.pop_front();
    line.out.put(&next.frame, sizeof next.frame);
    if (next.transit != nullptr) line.out.put(next.transit->data, next.transit->bytes);
    line.out.publish();
    if (next.transit != nullptr) finish(*next.transit, rank_);
    return;
  }
  Course& course = line.sending.front();
  const size_t bytes = std::min(chunk(), course.transit->bytes - course.offset);
  const Frame frame{FrameType::kData, static_cast<uint32_t>(bytes), course.id, course.transit->tag,
                    course.transit->bytes};
  line.out.put(&frame, sizeof frame);
  line.out.put(course.transit->data + course.offset, bytes);
  line.out.publish();
  course.offset += bytes;
  if (course.offset < course.transit->bytes) return;
  finish(*course.transit, rank_);
  line.sending.pop_front();
}

bool Post::flush(int peer) {
  constexpr int kFrames = 4;
  Line& line = *lines_[peer];
  int written = 0;
  size_t size = next_size(line);
  for (; size > 0 && written < kFrames; ++written, size = next_size(line)) {
    if (!line.out.has_room(size)) {
      line.out.want_room();
      if (!line.out.has_room(size)) break;
    }
    write_next(peer);
  }
  line.needs = size;
  if (written > 0) carrier_.wake(peer);
  return written > 0;
}

bool Post::has_frames() const {
  return std::any_of(lines_.begin(), lines_.end(), [](const auto& line) {
    const size_t needs = line->needs;
    return line->in.unread() > 0 || (needs > 0 && line->out.has_room(needs));
  });
}

void Post::lose(int peer, bool lives) {
  Line& line = *lines_[peer];
  line.lost = true;
  line.lives = lives;
  drop(line, [&](const Transit& transit) { return lost(transit, peer); });
  std::erase_if(posted_, [&](const Handle& transit) {
    if (!nobody_for(*transit)) return false;
    end(*transit, lost(*transit, peer));
    return true;
  });
}

// Returns a lost rank that keeps the receive from ever being done, or nullopt if it may still be done. For a
// receive from one rank, this is its peer. For a receive from any rank, it is a rank that has died, or if all
// other ranks are lost, the last of these.
std::optional<int> Post::nobody_for(const Transit& receive) const {
  if (receive.peer != Transit::kAny) {
    return lines_[receive.peer]->lost ? std::optional(receive.peer) : std::nullopt;
  }
  std::optional<int> gone;
  bool last = true;
  for (int rank = 0; rank < static_cast<int>(lines_.size()); ++rank) {
    const Line& line = *lines_[rank];
    if (line.lost && !line.lives) return rank;
    if (line.lost) gone = rank;
    last = last && (line.lost || rank == rank_);
  }
  return last ? gone : std::nullopt;
}

// Makes all messages fail that are under way to or from one rank.
void Post::drop(Line& line, const std::function<Error(const Transit&)>& reason) {
  std::vector<Handle> dropped;
  for (Outgoing& outgoing : line.frames) {
    if (outgoing.transit != nullptr) dropped.push_back(std::move(outgoing.transit));
  }
  for (auto& [id, transit] : line.offered) dropped.push_back(std::move(transit));
  for (Course& course : line.sending) dropped.push_back(std::move(course.transit));
  for (auto& [id, course] : line.receiving) dropped.push_back(std::move(course.transit));
  line.frames.clear();
  line.offered.clear();
  line.sending.clear();
  line.receiving.clear();
  line.needs = 0;
  for (const Handle& transit : dropped) end(*transit, reason(*transit));
}

void Post::fail(const Error& reason) {
  error_ = reason;
  for (const auto& line : lines_) {
    drop(*line, [&](const Transit&) { return reason; });
  }
  for (const Handle& transit : std::exchange(posted_, {})) end(*transit, reason);
  strays_.clear();
}

void Post::finish(Transit& transit, int source) {
  --pending_;
  transit.finish(source);
}

void Post::end(Transit& transit, const Error& reason) {
  --pending_;
  transit.fail(reason);
}

Error Post::lost(const Transit& transit, int peer) const {
  return carrier_.lost(peer, lines_[peer]->lives, transit.title());
}

}  // namespace dadt
