// Methods of Links that detect connections which break while both ranks are alive, and replace them.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <map>

#include "tcp/links.h"
#include "tcp/tcp_info.h"

namespace dadt {
namespace {

// Longest time to wait for a rank's notice after one of its connections has ended.
constexpr auto kGoodbyeWait = std::chrono::milliseconds(200);
constexpr auto kLook = std::chrono::milliseconds(1000);

// Detects connections on which the kernel resends bytes because nothing is acknowledged. The kernel itself
// closes such a connection only after a quarter of an hour. A shorter limit in the kernel would also close
// connections whose receiver reads slowly.
class Silences {
 public:
  explicit Silences(double most) : most_(duration(most)) {}

  // Returns the milliseconds between two checks of all connections.
  int pause() const {
    return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(most_ / 8).count());
  }

  bool is_silent(int socket) {
    const TcpInfo info = tcp_info_of(socket);
    const uint8_t resent = info.state[2], probes = info.state[3];
    if (resent == 0 && probes < 2) {
      since_.erase(socket);
      return false;
    }
    const auto now = Clock::now();
    const auto heard = now - std::chrono::milliseconds(info.since[3]);
    auto& since = since_.try_emplace(socket, now).first->second;
    since = std::max<Clock::time_point>(since, heard);
    return now - since > most_;
  }

 private:
  const Clock::duration most_;
  std::map<int, Clock::time_point> since_;  // for each socket, the time at which its silence began
};

bool is_broken(int socket) {
  pollfd polled{socket, POLLRDHUP, 0};
  return poll(&polled, 1, 0) > 0;
}

}  // namespace

std::optional<int> Links::await_break() {
  if (inert() || silence_ == 0) return std::nullopt;
  Silences silences(silence_);
  std::vector<pollfd> polled;
  std::vector<int> ranks;  // the rank of each polled socket, except the first
  while (!has_told()) {
    polled.assign(1, {watch_, POLLIN, 0});
    ranks.clear();
    {
      const std::lock_guard lock(streams_mutex_);
      for (int rank = 0; rank < world_size(); ++rank) {
        if (rank == rank_ || is_over(rank) || streams_[rank].is_detached()) continue;
        for (int socket : sockets_[rank]) polled.push_back({socket, POLLRDHUP, 0});
        ranks.resize(polled.size() - 1, rank);
      }
    }
    poll(polled.data(), polled.size(), silences.pause());
    if (polled[0].revents != 0) {
      uint64_t rung;
      (void)!read(watch_, &rung, sizeof rung);
    }
    for (size_t i = 1; i < polled.size(); ++i) {
      const bool is_sure = (polled[i].revents & POLLERR) != 0 || silences.is_silent(polled[i].fd);
      if ((is_sure || polled[i].revents != 0) && breaks(ranks[i - 1], is_sure)) return ranks[i - 1];
    }
  }
  return std::nullopt;
}

// Returns whether the connections with a rank are broken although the rank has not ended; if so, detaches
// them. is_sure: whether a connection is known to be broken. If false, the other side has closed it, and its
// notice may still arrive.
bool Links::breaks(int rank, bool is_sure) {
  const auto deadline = Clock::now() + kGoodbyeWait;
  while (true) {
    {
      const std::lock_guard lock(streams_mutex_);
      if (streams_[rank].is_detached() || given_up_[rank]) return false;
      // The connections may have been replaced since the event was detected, so they are checked again.
      if (!is_sure && !std::ranges::any_of(sockets_[rank], is_broken)) return false;
      read_notice(rank);
      const Heard& heard = heard_[rank];
      if (heard.closed || heard.reason) {
        ring(bell_);
        return false;
      }
      if (is_sure || heard.ended || Clock::now() >= deadline) return detach_held(rank).has_value();
    }
    pollfd notice{notices(rank), POLLIN, 0};
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    poll(&notice, 1, static_cast<int>(std::max<int64_t>(rest, 0)));
  }
}

std::optional<Positions> Links::detach(int rank) {
  if (inert()) return std::nullopt;
  const std::lock_guard lock(streams_mutex_);
  return detach_held(rank);
}

std::optional<Positions> Links::detach_held(int rank) {
  if (is_over(rank) || has_told()) return std::nullopt;
  std::optional<Positions> received;
  try {
    const std::lock_guard lock(mail_mutex_);
    received = {streams_[rank].detach(), mail_[rank].detach()};
  } catch (const Error& error) {  // the rank has sent invalid data
    heard_[rank].reason = error;
  }
  ring_all();
  return received;
}

bool Links::is_detached(int rank) {
  if (inert()) return false;
  const std::lock_guard lock(streams_mutex_);
  return streams_[rank].is_detached() && !is_over(rank);
}

bool Links::has_left(int rank) {
  if (inert()) return false;
  const std::lock_guard lock(streams_mutex_);
  read_notice(rank);
  return heard_[rank].ended;
}

bool Links::attach(int rank, const std::vector<int>& sockets, Positions received) {
  if (inert() || sockets.size() != sockets_[rank].size()) return false;
  {
    const std::scoped_lock lock(streams_mutex_, mail_mutex_);
    Stream &stream = streams_[rank], &mail = mail_[rank];
    read_notice(rank);
    if (is_over(rank) || !stream.is_detached() || has_told()) return false;
    if (!stream.can_resume(received.data) || !mail.can_resume(received.mail)) return false;
    for (size_t i = 0; i < sockets.size(); ++i) {
      fcntl(sockets[i], F_SETFL, fcntl(sockets[i], F_GETFL) | O_NONBLOCK);
      dup3(sockets[i], sockets_[rank][i], O_CLOEXEC);
    }
    heard_[rank] = {};
    stream.attach(received.data);
    mail.attach(received.mail);
  }
  ring_all();
  // This thread sends the remaining bytes itself, since the engine's thread may not run an operation now.
  std::vector<pollfd> polled;
  while (true) {
    {
      const std::lock_guard lock(streams_mutex_);
      if (streams_[rank].flush() || streams_[rank].has_ended() || has_told()) return true;
      polled.clear();
      streams_[rank].add_to(polled, POLLOUT);
    }
    poll(polled.data(), polled.size(), kLook.count());
  }
}

void Links::give_up(int rank) {
  if (inert()) return;
  {
    const std::lock_guard lock(streams_mutex_);
    given_up_[rank] = true;
  }
  ring_all();
}

bool Links::has_told() {
  const std::lock_guard lock(mutex_);
  return told_;
}

}  // namespace dadt
