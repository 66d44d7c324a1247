#include "negotiation/negotiation.h"

#include <unistd.h>

#include <cmath>

#include "base/thread.h"
#include "negotiation/negotiation_state.h"

namespace dadt {
namespace {

constexpr double kLongSleep = 3600;  // longest time in seconds that `await_break` sleeps at once

Request request_of(const Operation& operation, std::string signature, std::string group,
                   uint64_t group_size) {
  Request request{.name = operation.name,
                  .signature = std::move(signature),
                  .group = std::move(group),
                  .group_size = group_size,
                  .kind = operation.kind};
  if (operation.kind == Kind::kAllreduce) {
    request.dtype = operation.layout.dtype();
    request.reduction = operation.reduction;
    request.counts = operation.layout.counts();
  }
  return request;
}

}  // namespace

Negotiation::Negotiation(Engine& engine, Engine& broadcaster, int rank, int world_size,
                         const std::vector<int>& sockets, const NegotiationOptions& options,
                         std::shared_ptr<const ToldTime> time, double silence)
    : pid_(getpid()), state_(std::make_shared<NegotiationState>()) {
  check_rank(rank, world_size);
  const size_t expected = world_size == 1 ? sockets.size() : rank == 0 ? world_size : 1;
  if (sockets.size() != expected)
    throw std::invalid_argument(std::to_string(sockets.size()) + " sockets; rank " + std::to_string(rank) +
                                " needs " + std::to_string(expected));
  if (!(options.cycle >= 0)) throw std::invalid_argument("the cycle must be 0 seconds or more");
  if (!(options.stall_warning > 0)) throw std::invalid_argument("the stall warning must be above 0 seconds");
  state_->engine = &engine;
  state_->broadcaster = &broadcaster;
  state_->rank = rank;
  state_->world_size = world_size;
  state_->options = options;
  state_->time = std::move(time);
  state_->gone.resize(world_size);
  for (size_t i = 0; i < sockets.size(); ++i) {
    if (sockets[i] >= 0)
      state_->links.push_back(std::make_unique<Link>(sockets[i], static_cast<int>(i), silence));
  }
  if (rank == 0) state_->coordinator.emplace(world_size, options);
  if (state_->time != nullptr) return;
  state_->thread = start_thread("dadt-names", [state = state_.get()] { state->run(); });
}

Negotiation::~Negotiation() {
  if (inert()) {
    // The thread does not exist in a forked child, and may have been changing its data during the fork, so
    // the data is leaked instead of destroyed.
    new std::shared_ptr<NegotiationState>(std::move(state_));
    return;
  }
  if (!closed()) abort(Error(Code::kAborted, "the negotiation was destroyed before it was closed"));
  close(0);
}

bool Negotiation::inert() const { return getpid() != pid_; }

void Negotiation::check_alive() const {
  if (inert())
    throw std::runtime_error("named tensors belong to the parent process: a forked child cannot use them");
}

std::shared_ptr<Ticket> Negotiation::submit(Operation operation, std::string signature, std::string group,
                                            uint64_t group_size) {
  check_alive();
  const std::string name = operation.name;
  if (name.empty()) throw std::invalid_argument("a named tensor needs a name");
  if (operation.kind == Kind::kAllgather || operation.weight != 1 || !operation.lane.empty())
    throw std::invalid_argument("\"" + name + "\": a named tensor has neither weight nor lane");
  if (group.empty() != (group_size == 0))
    throw std::invalid_argument("\"" + name + "\": a group has a name and a size above 0");
  state_->engine->check(operation);
  auto ticket = std::make_shared<Ticket>(name, state_->alarm);
  Request request = request_of(operation, std::move(signature), std::move(group), group_size);
  const size_t bytes = request.bytes();
  NegotiationState& state = *state_;
  bool rings = false;
  bool is_refused = false;  // whether the negotiation has failed, and so the ticket fails at once
  {
    const std::lock_guard lock(state.mutex);
    if (state.closing) throw std::runtime_error("\"" + name + "\": the negotiation is closed");
    if (state.joining != nullptr)
      throw std::invalid_argument("\"" + name +
                                  "\": this rank has joined, and submits no more until all have");
    is_refused = state.giving_up.has_value();
    if (!is_refused) {
      const auto [entry, is_new] = state.pending.try_emplace(name);
      if (!is_new)
        throw std::invalid_argument("\"" + name + "\" is pending already: wait for it, or use another name");
      entry->second.ticket = ticket;
      entry->second.operation = std::move(operation);
      entry->second.request = std::move(request);
      const bool was_full = state.fresh_bytes >= state.options.buffer_bytes;
      rings = state.fresh.empty();
      if (rings) state.fresh_since = state.now();
      state.fresh.push_back(&entry->second);
      state.fresh_bytes += bytes;
      rings = rings || (!was_full && state.fresh_bytes >= state.options.buffer_bytes);
    }
  }
  if (rings) state.alarm->notify();
  if (is_refused) ticket->fail(*state.first_error());
  return ticket;
}

std::shared_ptr<Ticket> Negotiation::join() {
  check_alive();
  auto ticket = std::make_shared<Ticket>("join", state_->alarm);
  bool is_refused = false;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) throw std::runtime_error("join: the negotiation is closed");
    if (state_->joining != nullptr) throw std::invalid_argument("this rank has joined already");
    is_refused = state_->giving_up.has_value();
    if (!is_refused) {
      state_->joining = ticket;
      state_->join_is_fresh = true;
    }
  }
  state_->alarm->notify();
  if (is_refused) ticket->fail(*state_->first_error());
  return ticket;
}

void Negotiation::set_step(int64_t step) {
  if (!inert()) state_->step = step;
}

void Negotiation::abort(const Error& error) {
  if (inert()) return;
  state_->fail({state_->rank, error.code(), error.what()});
  if (const auto first = state_->first_error()) state_->abort_engines(*first);
}

std::optional<std::vector<Notice>> Negotiation::notices(double timeout) {
  check_alive();
  state_->event.wait([this] { return state_->has_notices || state_->is_closed; }, deadline_after(timeout));
  const std::lock_guard lock(state_->mutex);
  if (state_->notices.empty() && state_->is_closed) return std::nullopt;
  std::vector<Notice> taken(std::make_move_iterator(state_->notices.begin()),
                            std::make_move_iterator(state_->notices.end()));
  state_->notices.clear();
  state_->has_notices = false;
  return taken;
}

void Negotiation::order(const std::string& text) {
  check_alive();
  if (state_->rank != 0) throw std::invalid_argument("orders are rank 0's");
  {
    const std::lock_guard lock(state_->mutex);
    state_->orders.push_back(text);
  }
  state_->alarm->notify();
}

void Negotiation::leave() {
  if (inert()) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->alarm->notify();
}

void Negotiation::close(double timeout) {
  if (inert()) return;
  NegotiationState& state = *state_;
  const auto deadline = deadline_after(timeout);
  if (state.is_closing.exchange(true)) {  // another thread is closing the negotiation, or has closed it
    state.event.wait([&] { return state.is_closed.load(); }, deadline);
    return;
  }
  leave();
  const auto settled = [&] { return state.is_finished.load(); };
  while (!settled() && Clock::now() < deadline) state.event.wait(settled, deadline);
  std::optional<Error> late;
  const std::string pending = state.title_of_pending();
  if (!settled() && !pending.empty() && !state.has_error) {
    late = Error(Code::kTimeout, pending + " was not decided when the negotiation closed");
    state.fail({state.rank, Code::kAborted, late->what()});
  }
  state.is_stopping = true;
  state.alarm->notify();
  if (state.time != nullptr) state.turn();
  if (state.thread.joinable()) state.thread.join();
  state.is_closed = true;
  state.event.notify();
  if (late) throw *late;
}

bool Negotiation::closed() const { return state_->is_closed; }

std::optional<Error> Negotiation::error() const {
  if (inert()) return std::nullopt;
  return state_->first_error();
}

std::optional<double> Negotiation::turn() {
  check_alive();
  if (state_->time == nullptr) throw std::runtime_error("the negotiation's own thread takes its turns");
  state_->alarm->reset();
  if (!state_->turn()) return std::nullopt;
  const auto at = state_->wake_at();
  return at == Clock::time_point::max() ? HUGE_VAL : seconds_between(state_->now(), at);
}

// Replacing connections -------------------------------------------------------------------------------

std::optional<int> Negotiation::await_break() {
  NegotiationState& state = *state_;
  while (!inert() && !state.is_finished) {
    state.event.wait([&] { return state.has_broken || state.is_finished; }, deadline_after(kLongSleep));
    const std::lock_guard lock(state.links_mutex);
    if (state.broken.empty()) continue;
    const int rank = state.broken.front();
    state.broken.pop_front();
    state.has_broken = !state.broken.empty();
    if (const Link* link = state.link_with(rank); link != nullptr && link->is_detached()) return rank;
  }
  return std::nullopt;
}

std::optional<uint64_t> Negotiation::detach(int rank) {
  if (inert()) return std::nullopt;
  std::optional<uint64_t> received;
  {
    const std::lock_guard lock(state_->links_mutex);
    Link* link = state_->link_with(rank);
    if (link == nullptr || !link->lasts() || state_->farewell) return std::nullopt;
    // Whoever shuts a connection down on this side may fail to replace it.
    if (!link->is_detached()) state_->break_off(*link);
    received = link->detach();
  }
  state_->alarm->notify();
  return received;
}

bool Negotiation::is_detached(int rank) {
  if (inert()) return false;
  const std::lock_guard lock(state_->links_mutex);
  const Link* link = state_->link_with(rank);
  return link != nullptr && link->is_detached();
}

bool Negotiation::has_left(int rank) {
  if (inert()) return false;
  const std::lock_guard lock(state_->links_mutex);
  const Link* link = state_->link_with(rank);
  return link != nullptr && link->has_ended();
}

bool Negotiation::attach(int rank, int socket, uint64_t received) {
  if (inert()) return false;
  {
    const std::lock_guard lock(state_->links_mutex);
    Link* link = state_->link_with(rank);
    if (link == nullptr || !link->attach(socket, received)) return false;
  }
  state_->alarm->notify();
  return true;
}

void Negotiation::give_up(int rank) {
  if (inert()) return;
  const std::lock_guard lock(state_->links_mutex);
  if (Link* link = state_->link_with(rank)) state_->lose_for_good(*link);
}

void Negotiation::forsake() {
  if (!inert()) return;
  for (const auto& link : state_->links) link->close();
}

}  // namespace dadt
