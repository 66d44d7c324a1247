#include "shm/mailbox.h"

#include <mutex>

#include "base/thread.h"
#include "engine/executor.h"
#include "mail/post.h"
#include "shm/neighbours.h"

namespace dadt {

struct MailboxState final : Carrier {
  MailboxState(int rank, int world_size, size_t bytes)
      : neighbours(rank, world_size, Post::memory_bytes(world_size, bytes), false),
        pipe_bytes(bytes),
        pid(getpid()),
        post(*this, bytes) {}

  // The following fields are constant after construction.
  Neighbours neighbours;
  const size_t pipe_bytes;
  const pid_t pid;

  // Any thread may use the following fields. is_looking: whether the thread regularly checks that the peers
  // are alive.
  std::atomic<bool> is_looking{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<int> ends_seen{0};  // number of closed or aborted ranks that the thread has handled

  // This mutex guards the following fields, except for methods of `post` that any thread may call.
  std::mutex mutex;
  Post post;
  bool closing = false;
  std::thread thread;

  int rank() const override { return neighbours.rank(); }
  int world_size() const override { return neighbours.world_size(); }
  void wake(int peer) override { neighbours.head(peer).event.notify_if_waiting(); }
  void abort(const Error& reason) override { neighbours.abort(reason); }
  Error lost(int peer, bool lives, const std::string& title) const override {
    return neighbours.lost(peer, lives, title);
  }

  void open();
  Handle submit(Handle transit);
  void run();
  void look(bool at_lives);
  int ends() const;
  bool has_news() const;
};

// Opens the rings to and from all ranks. The ring from rank r is the r-th one in the reader's segment.
void MailboxState::open() {
  const size_t stride = ByteRing::memory_bytes(pipe_bytes);
  std::vector<std::pair<ByteRing, ByteRing>> rings;
  for (int peer = 0; peer < world_size(); ++peer) {
    rings.emplace_back(ByteRing(neighbours.body(rank()) + peer * stride, pipe_bytes),
                       ByteRing(neighbours.body(peer) + rank() * stride, pipe_bytes));
  }
  post.open(std::move(rings));
}

Handle MailboxState::submit(Handle transit) {
  if (getpid() != pid) {
    throw std::runtime_error("the mailbox belongs to the parent process: a forked child cannot use it");
  }
  {
    const std::lock_guard lock(mutex);
    if (!post.is_open()) throw std::runtime_error("the mailbox is not connected: call connect() first");
    if (closing) throw std::runtime_error("the mailbox is closed");
    if (!thread.joinable()) thread = start_thread("dadt-mail", [this] { run(); });
    try {  // the mailbox's thread may not have noticed a peer's abort yet
      if (!post.has_failed()) neighbours.check_aborted();
    } catch (const Error& reason) {
      post.fail(reason);
    }
    post.start(transit);
  }
  if (post.has_frames() || (!transit->done() && !is_looking)) wake(rank());
  return transit;
}

int MailboxState::ends() const {
  int count = 0;
  for (int rank = 0; rank < neighbours.world_size(); ++rank) {
    const State state = neighbours.state(rank);
    count += state == State::kClosed || state == State::kAborted;
  }
  return count;
}

// Returns whether the mailbox's thread has something to do; reads atomics only.
bool MailboxState::has_news() const {
  return post.has_frames() || is_stopping || (post.pending() > 0 && !is_looking) || ends() != ends_seen;
}

void MailboxState::run() {
  auto next_look = Clock::now();
  while (!is_stopping) {
    bool moved = false;
    for (int peer = 0; peer < neighbours.world_size(); ++peer) {
      const std::lock_guard lock(mutex);
      moved |= post.read_frame(peer);
      moved |= post.flush(peer);
    }
    const bool at_lives = Clock::now() >= next_look;
    if (at_lives) next_look = Clock::now() + Neighbours::kLook;
    is_looking = post.pending() > 0;
    for (int i = 0; !moved && is_looking && i < Neighbours::kSpins && !has_news(); ++i) spin_pause();
    moved |= post.has_frames();
    if (!moved || at_lives) {
      const std::lock_guard lock(mutex);
      look(at_lives);
    }
    if (moved) continue;
    const auto slice = is_looking ? Clock::duration(Neighbours::kLook) : std::chrono::hours(1);
    neighbours.head(neighbours.rank()).event.wait([this] { return has_news(); }, Clock::now() + slice);
  }
}

// Makes messages fail if a rank has aborted or ended. Does nothing while no message is pending. at_lives:
// whether to check that the peers' processes are alive.
void MailboxState::look(bool at_lives) {
  ends_seen = ends();
  if (post.has_failed() || post.pending() == 0) return;
  try {
    neighbours.check_aborted();
  } catch (const Error& reason) {
    return post.fail(reason);
  }
  for (int peer = 0; peer < neighbours.world_size(); ++peer) {
    if (peer == neighbours.rank() || post.has_lost(peer)) continue;
    const bool lives = !at_lives || neighbours.alive(peer);
    if (lives && neighbours.state(peer) != State::kClosed) continue;
    while (post.read_frame(peer)) {
    }
    post.lose(peer, lives);
  }
}

Mailbox::Mailbox(int rank, int world_size, size_t pipe_bytes) {
  check_rank(rank, world_size);
  state_ = std::make_unique<MailboxState>(rank, world_size, pipe_bytes);
}

Mailbox::~Mailbox() {
  if (inert()) {
    // The thread does not exist in a forked child, and may have been changing its data during the fork, so
    // the data is leaked instead of destroyed.
    state_.release();
    return;
  }
  close();
}

bool Mailbox::inert() const { return getpid() != state_->pid; }

std::string Mailbox::endpoint() const { return state_->neighbours.endpoint(); }

void Mailbox::connect(const std::vector<std::string>& endpoints, double timeout) {
  state_->neighbours.connect(endpoints, timeout);
  state_->open();
}

std::shared_ptr<Transit> Mailbox::send(const void* data, size_t bytes, int peer, int64_t tag) {
  check_rank(peer, state_->neighbours.world_size());
  // A Transit also serves receives, which write to the memory; a send only reads it.
  auto* from = const_cast<uint8_t*>(static_cast<const uint8_t*>(data));
  return state_->submit(std::make_shared<Transit>(Transit::kSend, from, bytes, peer, tag));
}

std::shared_ptr<Transit> Mailbox::receive(void* data, size_t bytes, int peer, int64_t tag) {
  if (peer != Transit::kAny) check_rank(peer, state_->neighbours.world_size());
  auto* to = static_cast<uint8_t*>(data);
  return state_->submit(std::make_shared<Transit>(Transit::kReceive, to, bytes, peer, tag));
}

void Mailbox::abort(const Error& error) {
  if (!inert()) state_->neighbours.abort(error);
}

void Mailbox::close() {
  if (inert()) return;
  std::thread ended;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    state_->is_stopping = true;
    ended = std::move(state_->thread);
  }
  state_->wake(state_->rank());
  if (ended.joinable()) ended.join();
  const std::lock_guard lock(state_->mutex);
  state_->post.fail(Error(Code::kAborted, "the mailbox was closed before the message had arrived"));
  state_->neighbours.close();
}

}  // namespace dadt
