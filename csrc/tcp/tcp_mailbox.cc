#include "tcp/tcp_mailbox.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <system_error>

#include "base/thread.h"
#include "engine/executor.h"
#include "mail/post.h"
#include "tcp/address.h"

namespace dadt {
namespace {

constexpr size_t kPipe = 256 * 1024;
constexpr double kCloseSeconds = 5;
constexpr size_t kLongestReason = 1024;

// Types of frames in addition to those of a Post.
constexpr FrameType kGoodbye = static_cast<FrameType>(100);  // sent by a rank that ends normally
// Sent by a rank that fails: `bytes` of the frame is the error's code, and the payload its text.
constexpr FrameType kGiveUp = static_cast<FrameType>(101);

}  // namespace

struct TcpMailboxState final : Carrier {
  // The connection between this rank and another one.
  struct Pipe {
    RingMemory in_memory{kPipe}, out_memory{kPipe};
    ByteRing in = in_memory.ring(), out = out_memory.ring();
    Frame frame{};   // frame that is being received
    size_t got = 0;  // bytes received of the frame, including its payload
    std::vector<uint8_t> payload;
    bool ended = false;   // whether nothing more can be received
    bool closed = false;  // whether the rank has sent a goodbye
    bool broken = false;  // whether nothing can be sent any more
  };

  TcpMailboxState(int place, std::vector<int> handed)
      : own(place),
        sockets(std::move(handed)),
        pid(getpid()),
        bell(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        meter(static_cast<int>(sockets.size())),
        post(*this, kPipe) {
    if (bell < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (int rank = 0; rank < world_size(); ++rank) {
      if (rank == own) continue;
      fcntl(sockets[rank], F_SETFL, fcntl(sockets[rank], F_GETFL) | O_NONBLOCK);
      addresses.push_back(address_of(sockets[rank]));
    }
    addresses.insert(addresses.begin() + own, std::string());
  }
  ~TcpMailboxState() override {
    for (int socket : sockets) {
      if (socket >= 0) ::close(socket);
    }
    ::close(bell);
  }
  TcpMailboxState(const TcpMailboxState&) = delete;
  TcpMailboxState& operator=(const TcpMailboxState&) = delete;

  // The following fields are constant after construction.
  const int own;
  const std::vector<int> sockets;
  const pid_t pid;
  const int bell;
  std::vector<std::string> addresses;

  // Any thread may use the following field.
  LinkMeter meter;

  // This mutex guards the following fields, except for methods of `post` that any thread may call.
  std::mutex mutex;
  std::vector<std::unique_ptr<Pipe>> pipes;  // the pipe to each rank; empty until the first message
  Post post;
  bool told = false;                          // whether the other ranks were informed why this rank fails
  std::optional<Clock::time_point> close_at;  // time at which it closes even if bytes are still unsent
  std::thread thread;

  int rank() const override { return own; }
  int world_size() const override { return static_cast<int>(sockets.size()); }
  void wake(int) override {}  // does nothing, since the calling thread moves all data itself
  void abort(const Error& reason) override { give_up(reason); }
  Error lost(int peer, bool lives, const std::string& title) const override;

  void open();
  Handle submit(Handle transit);
  void run();
  void ring() const;
  void read_meter();
  void move();
  bool pull(int peer);
  bool push(int peer);
  void take(int peer);
  bool is_empty() const;
  void put(int peer, FrameType type, uint64_t bytes, const std::string& payload);
  void give_up(const Error& reason);
};

Error TcpMailboxState::lost(int peer, bool lives, const std::string& title) const {
  return lost_error(ranked(peer, addresses[peer]), lives, title);
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
  ring();
  return transit;
}

void TcpMailboxState::ring() const {
  const uint64_t one = 1;
  (void)!write(bell, &one, sizeof one);
}

void TcpMailboxState::read_meter() {
  std::vector<std::vector<int>> read(sockets.size());
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != own) read[peer] = {sockets[peer]};
  }
  meter.read(read);
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
  const ssize_t count = whole == pipe.got ? 0 : recv(sockets[peer], to, whole - pipe.got, MSG_DONTWAIT);
  if (count < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (count <= 0 && whole != pipe.got) {
    pipe.ended = true;
    return true;
  }
  pipe.got += static_cast<size_t>(count);
  if (pipe.got < whole) return true;
  if (is_head) {
    if (pipe.frame.payload > std::max({post.longest_message(), post.chunk(), kLongestReason})) {
      pipe.ended = true;
      post.lose(peer, false);
      give_up(Error(Code::kComm, "rank " + std::to_string(peer) + " sent what is no message of DADT's"));
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
  if (pipe.frame.type == kGoodbye) {
    pipe.closed = true;
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

// Sends waiting bytes to a rank, as far as the kernel accepts them. Returns whether anything was sent.
bool TcpMailboxState::push(int peer) {
  Pipe& pipe = *pipes[peer];
  uint8_t bytes[16 * 1024];
  const size_t count = std::min(pipe.out.unread(), sizeof bytes);
  if (count == 0) return false;
  if (pipe.broken) return pipe.out.pop(count);
  pipe.out.peek(bytes, 0, count);
  const ssize_t sent = send(sockets[peer], bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    // A rank to which nothing can be sent counts as gone only once everything that it has sent is read.
    pipe.broken = errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK;
    return pipe.broken;
  }
  pipe.out.pop(static_cast<size_t>(sent));
  return sent > 0;
}

bool TcpMailboxState::is_empty() const {
  return std::ranges::all_of(pipes, [](const auto& pipe) { return pipe->out.unread() == 0 || pipe->broken; });
}

// Appends a goodbye or an error frame for a rank, after all waiting frames, if there is room.
void TcpMailboxState::put(int peer, FrameType type, uint64_t bytes, const std::string& payload) {
  Pipe& pipe = *pipes[peer];
  const Frame frame{type, static_cast<uint32_t>(payload.size()), 0, 0, bytes};
  if (pipe.broken || !pipe.out.has_room(sizeof frame + payload.size())) return;
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
  while (true) {
    polled.assign(1, {bell, POLLIN, 0});
    int patience = -1;
    {
      const std::lock_guard lock(mutex);
      move();
      const bool is_over = close_at && (is_empty() || Clock::now() >= *close_at);
      if (is_over || meter.is_due()) read_meter();
      if (is_over) return;
      if (close_at) patience = 100;  // milliseconds between two checks of close_at
      for (int peer = 0; peer < world_size(); ++peer) {
        if (peer == own) continue;
        const Pipe& pipe = *pipes[peer];
        const short in = pipe.ended ? short{0} : short{POLLIN};
        const short out = !pipe.broken && pipe.out.unread() > 0 ? short{POLLOUT} : short{0};
        if (in != 0 || out != 0) polled.push_back({sockets[peer], static_cast<short>(in | out), 0});
      }
    }
    if (poll(polled.data(), polled.size(), patience) > 0 && polled[0].revents != 0) {
      uint64_t rung;
      (void)!read(bell, &rung, sizeof rung);
    }
  }
}

TcpMailbox::TcpMailbox(int rank, std::vector<int> sockets) {
  check_rank(rank, static_cast<int>(sockets.size()));
  state_ = std::make_unique<TcpMailboxState>(rank, std::move(sockets));
}

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
  state_->ring();
}

std::vector<LinkCounts> TcpMailbox::counts() const {
  return inert() ? std::vector<LinkCounts>(state_->sockets.size()) : state_->meter.counts();
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
      if (peer != state.own) state.put(peer, kGoodbye, 0, {});
    }
    state.ring();
    ended = std::move(state.thread);
  }
  if (ended.joinable()) ended.join();
  const std::lock_guard lock(state.mutex);
  state.post.fail(Error(Code::kAborted, "the mailbox was closed before the message had arrived"));
  for (int socket : state.sockets) {
    if (socket >= 0) shutdown(socket, SHUT_WR);
  }
}

}  // namespace dadt
