#include "tcp/tcp_mailbox.h"

#include <poll.h>
#include <unistd.h>

#include <cstring>
#include <mutex>

#include "base/thread.h"
#include "engine/executor.h"
#include "mail/post.h"
#include "tcp/address.h"

namespace dadt {
namespace {

constexpr size_t kPipe = 256 * 1024;
constexpr size_t kMostPushed = 64 * 1024;
constexpr double kCloseSeconds = 5;
constexpr size_t kLongestReason = 1024;

// Types of frames in addition to those of a Post.
constexpr FrameType kGoodbyeFrame = static_cast<FrameType>(100);  // sent by a rank that ends normally
// Sent by a rank that fails: `bytes` of the frame is the error's code, and the payload its text.
constexpr FrameType kGiveUp = static_cast<FrameType>(101);

}  // namespace

struct TcpMailboxState final : Carrier {
  // The frames between this rank and another one.
  struct Pipe {
    RingMemory in_memory{kPipe}, out_memory{kPipe};
    ByteRing in = in_memory.ring(), out = out_memory.ring();
    Frame frame{};   // frame that is being received
    size_t got = 0;  // bytes received of the frame, including its payload
    std::vector<uint8_t> payload;
    bool last = false;    // whether the connection will not be replaced if it ends
    bool closed = false;  // whether the rank has ended normally
    bool ended = false;   // whether nothing more comes, or can be sent
  };

  explicit TcpMailboxState(std::shared_ptr<Links> connected)
      : links(std::move(connected)),
        own(links->rank()),
        pid(getpid()),
        mutex(links->mail()),
        meter(links->world_size()),
        post(*this, kPipe) {
    meter.begin(links->mail_sockets());
  }

  // The following fields are constant after construction.
  const std::shared_ptr<Links> links;
  const int own;
  const pid_t pid;
  std::mutex& mutex;

  // Any thread may use the following field.
  LinkMeter meter;

  // This mutex guards the following fields, except for methods of `post` that any thread may call.
  std::vector<std::unique_ptr<Pipe>> pipes;  // pipe of each rank; empty until the first use
  Post post;
  bool told = false;                          // whether the other ranks were informed why this rank fails
  std::optional<Clock::time_point> close_at;  // time at which it closes even if bytes are still unsent
  std::thread thread;

  int rank() const override { return own; }
  int world_size() const override { return links->world_size(); }
  void wake(int) override {}  // does nothing, as the calling thread moves all data itself
  void abort(const Error& reason) override { give_up(reason); }
  Error lost(int peer, bool lives, const std::string& title) const override;

  void open();
  Handle submit(Handle transit);
  void run();
  bool settle(const std::vector<int>& peers);
  void move();
  bool pull(int peer);
  bool push(int peer);
  void take(int peer);
  bool is_empty();
  void put(int peer, FrameType type, uint64_t bytes, const std::string& payload);
  void give_up(const Error& reason);
};

Error TcpMailboxState::lost(int peer, bool lives, const std::string& title) const {
  return lost_error(ranked(peer, links->address(peer)), lives, title);
}

void TcpMailboxState::open() {
  std::vector<std::pair<ByteRing, ByteRing>> rings;
  for (int peer = 0; peer < world_size(); ++peer) {
    pipes.push_back(std::make_unique<Pipe>());
    rings.emplace_back(pipes.back()->in, peer == own ? pipes.back()->in : pipes.back()->out);
  }
  post.open(std::move(rings));
  thread = start_thread("dadt-mail", [this] { run(); });
}

Handle TcpMailboxState::submit(Handle transit) {
  if (getpid() != pid) {
    throw std::runtime_error("the mailbox belongs to the parent process: a forked child cannot use it");
  }
  const std::lock_guard lock(mutex);
  if (close_at) throw std::runtime_error("the mailbox is closed");
  if (pipes.empty()) open();
  post.start(transit);
  move();
  links->ring_mail();
  return transit;
}

// Sends and receives all data that can be transferred without blocking.
void TcpMailboxState::move() {
  for (int peer = 0; peer < world_size(); ++peer) {
    bool moved = true;
    while (moved) {
      moved = peer != own && pull(peer);
      while (post.read_frame(peer)) moved = true;
      moved |= post.flush(peer);
      moved |= peer != own && push(peer);
    }
    Pipe& pipe = *pipes[peer];
    pipe.ended |= pipe.last && links->mail(peer).has_ended();
    if (pipe.ended && !post.has_lost(peer) && !post.has_failed()) post.lose(peer, pipe.closed);
  }
}

// Reads one frame, or a part of it, that has arrived. Returns whether anything was read.
bool TcpMailboxState::pull(int peer) {
  Pipe& pipe = *pipes[peer];
  if (pipe.ended) return false;
  const bool is_head = pipe.got < sizeof(Frame);
  uint8_t* to = is_head ? reinterpret_cast<uint8_t*>(&pipe.frame) + pipe.got
                        : pipe.payload.data() + (pipe.got - sizeof(Frame));
  const size_t whole = sizeof(Frame) + (is_head ? 0 : pipe.frame.payload);
  if (!is_head && !pipe.in.has_room(whole)) return false;
  const size_t count = links->mail(peer).receive({{to, whole - pipe.got}});
  pipe.got += count;
  if (pipe.got < whole) return count > 0;
  if (is_head) {
    if (pipe.frame.payload > std::max({post.longest_message(), post.chunk(), kLongestReason})) {
      post.lose(peer, false);
      give_up(Error(Code::kComm, "rank " + std::to_string(peer) + " sent what is no message of DADT's"));
      pipe.ended = true;
      return true;
    }
    pipe.payload.resize(pipe.frame.payload);
    if (pipe.frame.payload > 0) return true;
  }
  take(peer);
  pipe.got = 0;
  return true;
}

// Handles a complete frame.
void TcpMailboxState::take(int peer) {
  Pipe& pipe = *pipes[peer];
  if (pipe.frame.type == kGoodbyeFrame) {
    pipe.closed = pipe.ended = true;
  } else if (pipe.frame.type == kGiveUp) {
    const std::string text(pipe.payload.begin(), pipe.payload.end());
    const Code code = pipe.frame.bytes < kCodes ? static_cast<Code>(pipe.frame.bytes) : Code::kComm;
    if (!post.has_failed()) post.fail(Error(code, "rank " + std::to_string(peer) + " gave up: " + text));
  } else {
    pipe.in.put(&pipe.frame, sizeof pipe.frame);
    pipe.in.put(pipe.payload.data(), pipe.payload.size());
    pipe.in.publish();
  }
}

// Sends waiting bytes to a rank, as far as the kernel accepts them. Returns whether there is room for more
// frames.
bool TcpMailboxState::push(int peer) {
  Pipe& pipe = *pipes[peer];
  Stream& stream = links->mail(peer);
  const size_t count = std::min(pipe.out.unread(), pipe.ended ? kPipe : kMostPushed);
  if (!pipe.ended && !stream.flush()) return false;
  if (count == 0) return false;
  if (!pipe.ended) {
    pipe.out.visit(count, [&](const uint8_t* at, size_t some) { stream.append(at, some); });
    stream.flush();
  }
  pipe.out.pop(count);
  return true;
}

bool TcpMailboxState::is_empty() {
  for (int peer = 0; peer < world_size() && !pipes.empty(); ++peer) {
    const Pipe& pipe = *pipes[peer];
    if (peer != own && !pipe.ended && (pipe.out.unread() > 0 || !links->mail(peer).flush())) return false;
  }
  return true;
}

// Appends a goodbye or an error frame for a rank, after all waiting frames, if there is room.
void TcpMailboxState::put(int peer, FrameType type, uint64_t bytes, const std::string& payload) {
  Pipe& pipe = *pipes[peer];
  const Frame frame{type, static_cast<uint32_t>(payload.size()), 0, 0, bytes};
  if (pipe.ended || !pipe.out.has_room(sizeof frame + payload.size())) return;
  pipe.out.put(&frame, sizeof frame);
  pipe.out.put(payload.data(), payload.size());
  pipe.out.publish();
  push(peer);
}

// Makes all messages of this rank fail, and sends the error to the other ranks.
void TcpMailboxState::give_up(const Error& reason) {
  if (told) return;
  told = true;
  if (!post.has_failed()) post.fail(reason);
  if (pipes.empty()) open();
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == own) continue;
    put(peer, kGiveUp, static_cast<uint64_t>(reason.code()),
        std::string(reason.what()).substr(0, kLongestReason));
  }
}

void TcpMailboxState::run() {
  std::vector<pollfd> polled;
  std::vector<int> broken;  // ranks whose connection has ended, and may be replaced
  while (true) {
    polled.assign(1, {links->mail_bell(), POLLIN, 0});
    broken.clear();
    int patience = -1;
    {
      const std::lock_guard lock(mutex);
      move();
      // If the ranks have failed, the others may read nothing more of what is unsent.
      const bool is_over = close_at && (links->is_aborted() || is_empty() || Clock::now() >= *close_at);
      if (is_over || meter.is_due()) meter.read(links->mail_sockets());
      if (is_over) return;
      if (close_at) patience = 100;  // milliseconds between two checks of close_at
      for (int peer = 0; peer < world_size(); ++peer) {
        if (peer == own || pipes[peer]->ended) continue;
        Stream& stream = links->mail(peer);
        if (stream.has_ended()) broken.push_back(peer);
        stream.add_to(polled, POLLIN | POLLOUT);
      }
    }
    if (settle(broken)) continue;
    if (poll(polled.data(), polled.size(), patience) > 0 && polled[0].revents != 0) {
      uint64_t rung;
      (void)!read(polled[0].fd, &rung, sizeof rung);
    }
  }
}

// Finds out about ranks whose connections have ended. Returns whether one of these connections will not be
// replaced, so that only bytes that have arrived over it are left to read.
bool TcpMailboxState::settle(const std::vector<int>& peers) {
  bool is_settled = false;
  for (int peer : peers) {
    const auto ended_well = links->fate(peer);
    if (!ended_well) continue;
    const std::lock_guard lock(mutex);
    links->mail(peer).detach();
    pipes[peer]->last = is_settled = true;
    pipes[peer]->closed |= *ended_well;
  }
  return is_settled;
}

TcpMailbox::TcpMailbox(std::shared_ptr<Links> links)
    : state_(std::make_unique<TcpMailboxState>(std::move(links))) {}

TcpMailbox::~TcpMailbox() {
  if (inert()) {
    // The thread does not exist in a forked child, and may have been changing its data during the fork, so
    // the data is leaked instead of destroyed.
    state_.release();
    return;
  }
  close();
}

bool TcpMailbox::inert() const { return getpid() != state_->pid; }

std::shared_ptr<Transit> TcpMailbox::send(const void* data, size_t bytes, int peer, int64_t tag) {
  check_rank(peer, state_->world_size());
  // A Transit also serves receives, which write to the memory; a send only reads it.
  auto* from = const_cast<uint8_t*>(static_cast<const uint8_t*>(data));
  return state_->submit(std::make_shared<Transit>(Transit::kSend, from, bytes, peer, tag));
}

std::shared_ptr<Transit> TcpMailbox::receive(void* data, size_t bytes, int peer, int64_t tag) {
  if (peer != Transit::kAny) check_rank(peer, state_->world_size());
  auto* to = static_cast<uint8_t*>(data);
  return state_->submit(std::make_shared<Transit>(Transit::kReceive, to, bytes, peer, tag));
}

void TcpMailbox::abort(const Error& error) {
  if (inert()) return;
  const std::lock_guard lock(state_->mutex);
  if (!state_->close_at) state_->give_up(error);
  state_->links->ring_mail();
}

std::vector<LinkCounts> TcpMailbox::counts() const {
  return inert() ? std::vector<LinkCounts>(state_->world_size()) : state_->meter.counts();
}

void TcpMailbox::close() {
  if (inert()) return;
  TcpMailboxState& state = *state_;
  std::thread ended;
  {
    const std::lock_guard lock(state.mutex);
    if (state.close_at) return;
    state.close_at = deadline_after(kCloseSeconds);
    for (int peer = 0; peer < static_cast<int>(state.pipes.size()); ++peer) {
      if (peer != state.own) state.put(peer, kGoodbyeFrame, 0, {});
    }
    state.links->ring_mail();
    ended = std::move(state.thread);
  }
  if (ended.joinable()) ended.join();
  {
    const std::lock_guard lock(state.mutex);
    state.post.fail(Error(Code::kAborted, "the mailbox was closed before the message had arrived"));
  }
  state.links->end_mail();
}

}  // namespace dadt
