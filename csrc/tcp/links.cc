#include "tcp/links.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <system_error>

#include "engine/executor.h"
#include "tcp/address.h"

namespace dadt {
namespace {

// Longest time to wait for a rank's notice after its data connections have ended.
constexpr auto kGrace = std::chrono::milliseconds(200);

// Bytes that all ranks together may have in flight to or from one: twice what its link carries in a round
// trip, so that a speed that was measured under the limit can grow; and what may wait in a queue, which is as
// much as the link carries in kQueued seconds, but kLeastQueued at least.
constexpr double kRoundTrips = 2;
constexpr double kQueued = 0.01;
constexpr double kLeastQueued = 224 * 1024;
constexpr double kAssumedRate = 125e6;  // speed of a link in bytes per second before it is known
// Bytes of the smallest and the largest limit of one connection.
constexpr double kLeastWindow = 14 * 1024, kLargestWindow = 64 << 20;
// A window of fewer packets makes a sender wait for a timer before each of them. Within a host a packet has
// 64 KiB.
constexpr size_t kLeastPackets = 2;

}  // namespace

Links::Links(int rank, const std::vector<std::vector<int>>& sockets, double silence)
    : rank_(rank),
      sockets_(sockets),
      data_(sockets.size()),
      mail_sockets_(sockets.size()),
      addresses_(sockets.size()),
      pid_(getpid()),
      silence_(silence),
      meter_(static_cast<int>(sockets.size())),
      heard_(sockets.size()),
      given_up_(sockets.size()),
      released_(sockets.size()) {
  check_rank(rank, world_size());
  for (int* bell : {&bell_, &watch_, &mail_bell_}) {
    *bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (*bell < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::vector<int>& own = sockets_[peer];
    if (peer != rank_) {
      if (own.size() <= kData) throw std::invalid_argument("a rank has too few connections");
      data_[peer].assign(own.begin() + kData, own.end());
      mail_sockets_[peer] = {own[kMail]};
      addresses_[peer] = address_of(notices(peer));
      for (int socket : own) fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    }
    streams_.emplace_back(peer, data_[peer]);
    mail_.emplace_back(peer, mail_sockets_[peer]);
  }
  meter_.begin(data_);
  share_windows(std::vector<uint64_t>(sockets_.size()), world_size() - 1);
}

Links::~Links() {
  if (inert()) return;
  close();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (released_[rank]) continue;
    for (int socket : sockets_[rank]) ::close(socket);
  }
  for (int bell : {bell_, watch_, mail_bell_}) ::close(bell);
}

bool Links::inert() const { return getpid() != pid_; }

void Links::send_notices(uint32_t code, const std::string& text) {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank_) send_notice(notices(peer), code, text);
  }
}

void Links::abort(const Error& error) {
  if (inert()) return;
  {
    const std::lock_guard lock(mutex_);
    if (told_) return;
    told_ = true;
    error_ = error;
    is_aborted_ = true;
    send_notices(static_cast<uint32_t>(error.code()), error.what());
  }
  ring_all();
}

void Links::ring(int bell) const {
  const uint64_t one = 1;
  (void)!write(bell, &one, sizeof one);
}

void Links::ring_all() const {
  for (int bell : {bell_, watch_, mail_bell_}) ring(bell);
}

void Links::close() {
  if (inert()) return;
  const std::lock_guard lock(mutex_);
  if (is_closed_) return;
  if (!told_) send_notices(kBye, {});
  told_ = is_closed_ = true;
  meter_.read(data_);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank_ && !is_aborted_) hang_up(peer);
  }
  ring_all();
}

void Links::hang_up(int rank) {
  shutdown(notices(rank), SHUT_WR);
  for (int socket : data_[rank]) shutdown(socket, SHUT_WR);
}

std::vector<std::unique_ptr<KeptLink>> Links::release() {
  std::vector<std::unique_ptr<KeptLink>> kept(sockets_.size());
  if (inert() || !is_aborted_) return kept;
  const std::scoped_lock lock(streams_mutex_, mail_mutex_);
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_ || released_[rank]) continue;
    const Heard& heard = heard_[rank];
    const bool is_between = heard.ended ? heard.reason && heard.speaks : heard.notice.is_empty();
    const bool stands =
        is_between && !given_up_[rank] && !streams_[rank].has_ended() && !mail_[rank].has_ended();
    std::vector<UsedSocket> sockets{{notices(rank)}};
    for (Stream* stream : {&mail_[rank], &streams_[rank]})
      std::ranges::copy(stream->release(), std::back_inserter(sockets));
    // Other threads of this object may still hold the descriptors.
    heard_[rank].ended = given_up_[rank] = true;
    if (stands) {
      kept[rank] = std::make_unique<KeptLink>(rank, std::move(sockets));
      released_[rank] = true;
    } else {
      hang_up(rank);
      shutdown(mail_sockets_[rank][0], SHUT_WR);
    }
  }
  return kept;
}

void Links::end_mail() {
  // Before this rank has told that it ends, other ranks would take the end of a connection for a break.
  if (!has_told() || is_aborted_) return;
  const std::lock_guard lock(mail_mutex_);
  for (const auto& each : mail_sockets_) {
    for (int socket : each) shutdown(socket, SHUT_WR);
  }
}

std::vector<LinkCounts> Links::counts() const {
  return inert() ? std::vector<LinkCounts>(data_.size()) : meter_.counts();
}

void Links::measure() {
  if (meter_.is_due()) meter_.read(data_);
}

void Links::check_aborted() {
  if (is_aborted_) {
    const std::lock_guard lock(mutex_);
    throw *error_;
  }
  check_reasons();
  std::vector<Interest> none;
  wait(none, Clock::time_point::min());
}

// Reads the notice in which a peer reports its end, as far as it has arrived.
void Links::read_notice(int rank) {
  Heard& heard = heard_[rank];
  if (heard.ended) return;
  const LinkNotice::Came came = heard.notice.read(notices(rank));
  if (came == LinkNotice::Came::kPart) return;
  heard.ended = true;
  if (came == LinkNotice::Came::kEnd) return;
  const uint32_t code = came == LinkNotice::Came::kAll ? heard.notice.code() : 0;
  const std::string who = "rank " + std::to_string(rank);
  const std::string text = heard.notice.text();
  if (came == LinkNotice::Came::kInvalid || (code == kBye ? !text.empty() : text.empty() || code >= kCodes)) {
    heard.reason = Error(Code::kComm, who + " sent what is no notice of DADT's");
    heard.speaks = false;
  } else if (code == kBye) {
    heard.closed = true;
  } else {
    // All ranks report a mismatch in the same words, so the rank that sent the notice is not named.
    const bool is_mismatch = static_cast<Code>(code) == Code::kMismatch;
    heard.reason = Error(static_cast<Code>(code), is_mismatch ? text : who + " gave up: " + text);
  }
  ring(mail_bell_);
}

void Links::check_reasons() const {
  for (const Heard& heard : heard_) {
    if (heard.reason) throw *heard.reason;
  }
}

void Links::wait(std::vector<Interest>& interests, Clock::time_point deadline) {
  if (!interests.empty()) measure();
  std::vector<pollfd> polled;
  std::vector<size_t> ends;  // for each interest, the end of its sockets in `polled`
  bool is_ready = false;
  for (const Interest& each : interests) {
    is_ready = streams_[each.rank].add_to(polled, each.events) || is_gone(each.rank) || is_ready;
    ends.push_back(polled.size());
  }
  polled.push_back({bell_, POLLIN, 0});
  std::vector<int> peers;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_ || heard_[rank].ended) continue;
    peers.push_back(rank);
    polled.push_back({notices(rank), POLLIN, 0});
  }
  int left = 0;
  if (deadline != Clock::time_point::min() && !is_ready) {
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    left = static_cast<int>(std::clamp<int64_t>(rest, 0, 3'600'000));
  }
  streams_mutex_.unlock();
  const int found = poll(polled.data(), polled.size(), left);
  streams_mutex_.lock();
  // If bell_ was notified, connections may have been replaced or closed.
  const bool is_rung = found > 0 && polled[polled.size() - peers.size() - 1].revents != 0;
  for (size_t i = 0, at = 0; i < interests.size(); ++i) {
    interests[i].found = is_ready || is_rung ? interests[i].events : short{0};
    for (; at < ends[i] && found > 0; ++at) interests[i].found |= polled[at].revents;
  }
  if (found <= 0) return;
  if (is_rung) {
    uint64_t rung;
    (void)!read(bell_, &rung, sizeof rung);
  }
  if (is_aborted_) {
    const std::lock_guard lock(mutex_);
    throw *error_;
  }
  for (size_t i = 0; i < peers.size(); ++i) {
    if (polled[polled.size() - peers.size() + i].revents != 0) read_notice(peers[i]);
  }
  check_reasons();
}

size_t Links::send(int rank, const std::vector<iovec>& from, const std::string& title) {
  const size_t count = streams_[rank].send(from);
  if (count == 0 && is_gone(rank)) throw lost(rank, title);
  return count;
}

size_t Links::receive(int rank, const std::vector<iovec>& to, const std::string& title) {
  const size_t count = streams_[rank].receive(to);
  if (count == 0 && is_gone(rank)) throw lost(rank, title);
  return count;
}

Traffic Links::traffic() const {
  Traffic all;
  for (const Stream& stream : streams_) {
    const Traffic traffic = stream.traffic();
    all.sent += traffic.sent;
    all.received += traffic.received;
  }
  return all;
}

void Links::share_windows(const std::vector<uint64_t>& rates, int senders) {
  if (world_size() < 3) return;  // the connection with a single other rank overflows its own queue alone
  std::vector<size_t> windows(sockets_.size());
  for (int rank = 0; rank < world_size(); ++rank) {
    if (data_[rank].size() != 1) continue;  // several connections are for links with long round trips
    const double rate = static_cast<double>(std::min(rates[rank_], rates[rank]));
    const double trip = streams_[rank].shortest_round_trip();
    const double travels = kRoundTrips * (rate > 0 ? rate : kAssumedRate) * trip;
    const double window = (travels + std::max(kLeastQueued, kQueued * rate)) / senders;
    const double least =
        std::max(kLeastWindow, static_cast<double>(kLeastPackets * streams_[rank].segment_bytes()));
    windows[rank] = static_cast<size_t>(std::clamp(window, least, kLargestWindow));
    streams_[rank].limit_window(windows[rank]);
  }
  meter_.limit(std::move(windows));
}

bool Links::flush(int rank, const std::string& title) {
  const bool is_flushed = streams_[rank].flush();
  if (!is_flushed && is_gone(rank)) throw lost(rank, title);
  return is_flushed;
}

// Returns whether connections with a rank that break will not be replaced.
bool Links::is_over(int rank) const { return given_up_[rank] || heard_[rank].closed || heard_[rank].reason; }

// Returns whether the connections with a rank have ended and will not be replaced.
bool Links::is_gone(int rank) const { return streams_[rank].has_ended() && (silence_ == 0 || is_over(rank)); }

std::optional<bool> Links::fate(int rank) {
  const std::scoped_lock lock(streams_mutex_, mutex_);
  if (silence_ > 0 && !is_over(rank) && !is_closed_) return std::nullopt;
  return heard_[rank].closed;
}

// Returns the error for a rank whose data connections have ended.
Error Links::lost(int rank, const std::string& title) {
  // The notice with the reason may arrive later than the end of the data connection, so it is awaited.
  const auto deadline = Clock::now() + kGrace;
  while (!heard_[rank].ended) {
    pollfd polled{notices(rank), POLLIN, 0};
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (rest <= 0 || (poll(&polled, 1, static_cast<int>(rest)) == 0)) break;
    read_notice(rank);
  }
  if (heard_[rank].reason) return *heard_[rank].reason;
  return lost_error(ranked(rank, addresses_[rank]), heard_[rank].closed, title);
}

}  // namespace dadt
