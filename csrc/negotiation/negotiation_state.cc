#include "negotiation/negotiation_state.h"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace dadt {
namespace {

// kEngineCheck: seconds between two checks of the engines while a tensor is pending or an operation is
// running. kFarewell: longest time in seconds to wait for the peers' goodbyes after this rank's own.
constexpr double kEngineCheck = 0.1;
constexpr double kFarewell = 1.0;

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

// The thread ------------------------------------------------------------------------------------------

void NegotiationState::run() {
  while (turn(true)) {
  }
}

// Runs the body of the thread's loop once; with `sleeps`, sleeps first until there is something to do.
// Returns false once the negotiation has ended.
bool NegotiationState::turn(bool sleeps) {
  if (is_finished) return false;
  std::unique_lock lock(links_mutex, std::defer_lock);
  try {
    if (sleeps) sleep();
    lock.lock();
    if (look_round()) return true;
  } catch (const Error& reason) {
    fail({rank, reason.code(), reason.what()});
  } catch (const std::exception& reason) {
    fail({rank, Code::kInternal, reason.what()});
  }
  if (has_error) give_up();
  for (const auto& link : links) link->close();
  is_finished = true;
  event.notify();
  return false;
}

bool NegotiationState::look_round() {
  for (const auto& link : links) receive(*link);
  for (const Engine* each : {engine, broadcaster}) {
    if (const auto error = each->error()) fail({rank, error->code(), error->what()});
  }
  check_rank_0();
  if (has_error) {
    give_up();
  } else {
    report();
    if (coordinator) decide();
    give_orders();
  }
  take_leave();
  for (const auto& link : links) link->flush();
  const bool all_closed = std::ranges::none_of(links, [](const auto& link) { return link->open(); });
  return !is_stopping && !(farewell && (all_closed || now() >= *farewell));
}

void NegotiationState::sleep() {
  std::vector<pollfd> polled{{alarm->fd(), POLLIN, 0}};
  bool is_ready = false;
  {
    const std::lock_guard lock(links_mutex);
    for (const auto& link : links) is_ready = link->add_to(polled) || is_ready;
  }
  const Clock::time_point until = is_ready ? Clock::time_point::min() : wake_at();
  timespec left{};
  if (until != Clock::time_point::max()) {
    const auto now = Clock::now();
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::max(until, now) - now).count();
    left = {ns / 1'000'000'000, ns % 1'000'000'000};
  }
  ppoll(polled.data(), polled.size(), until == Clock::time_point::max() ? nullptr : &left, nullptr);
  alarm->reset();
}

Clock::time_point NegotiationState::wake_at() {
  Clock::time_point at = farewell.value_or(Clock::time_point::max());
  if (has_error) return at;
  if (is_due(now())) return now();
  if (coordinator) at = std::min(at, coordinator->next());
  while (!running.empty() && running.front()->done()) running.pop_front();
  if (!running.empty()) at = std::min(at, now() + duration(kEngineCheck));
  // An engine that has failed since the last check has also ended its operations, so the error must be
  // handled at once.
  if (engine->error() || broadcaster->error()) return now();
  const std::lock_guard lock(mutex);
  if (!pending.empty()) at = std::min(at, now() + duration(kEngineCheck));
  if (!fresh.empty()) at = std::min(at, fresh_since + duration(options.cycle / 2));
  return at;
}

void NegotiationState::receive(Link& link) {
  if (!link.open()) return;
  const bool alive = link.receive();
  // Messages after a goodbye are ignored.
  for (auto message = link.next(); message && link.open(); message = link.next()) hear(link, *message);
  if (!alive && link.open()) lose(link);
}

void NegotiationState::hear(Link& link, const Link::Message& message) {
  const bool is_from_rank_0 = !coordinator;
  switch (message.type) {
    case MessageType::kReport:
      if (is_from_rank_0) break;
      if (!has_error) coordinator->take(link.peer(), decode_report(message.body), now());
      return;
    case MessageType::kDecision:
      if (!is_from_rank_0) break;
      if (!has_error) follow(decode_decision(message.body));
      return;
    case MessageType::kGivingUp:
      // Rank 0 forwards the first error that it receives to all ranks. These send it back, which changes
      // nothing.
      return fail(decode_giving_up(message.body));
    case MessageType::kGoodbye:
      gone[link.peer()] = true;
      link.close();
      if (coordinator) coordinator->leave(link.peer(), now());
      return;
    case MessageType::kOrder:
      if (!is_from_rank_0) break;
      return notify({{std::nullopt, message.body}});
  }
  throw Error(Code::kComm, "rank " + std::to_string(link.peer()) + " sent what is no message of DADT's");
}

void NegotiationState::lose(Link& link) {
  if (farewell) {
    link.close();
  } else if (link.lasts()) {
    break_off(link);
  } else {
    lose_for_good(link);
  }
}

void NegotiationState::lose_for_good(Link& link) {
  link.close();
  if (farewell) return;
  const std::string who = "rank " + std::to_string(link.peer());
  fail({-1, Code::kPeerLost, who + " is gone: its connection has ended without a goodbye"});
}

// Has `await_break` return the rank, so that somebody replaces its connection.
void NegotiationState::break_off(Link& link) {
  broken.push_back(link.peer());
  has_broken = true;
  event.notify();
}

// Returns the open connection with a rank; null if there is none.
Link* NegotiationState::link_with(int peer) {
  for (const auto& link : links) {
    if (link->peer() == peer && link->open()) return link.get();
  }
  return nullptr;
}

// Fails if rank 0 has ended while something is pending, since without rank 0 nothing can be decided.
void NegotiationState::check_rank_0() {
  if (!gone[0] || title_of_pending().empty()) return;
  fail({-1, Code::kPeerLost, title_of_pending() + ": rank 0 has ended and submits no more"});
}

// Returns the quoted name of one undecided tensor, or `join` for an undecided join; empty if nothing is
// undecided.
std::string NegotiationState::title_of_pending() {
  const std::lock_guard lock(mutex);
  if (!pending.empty()) return "\"" + pending.begin()->first + "\"";
  return joining != nullptr ? "join" : "";
}

// Returns whether this rank must report to rank 0 now, instead of collecting more requests.
bool NegotiationState::is_due(Clock::time_point at) {
  const std::lock_guard lock(mutex);
  const bool waits = alarm->waiters > 0 || (closing && !pending.empty());
  if (join_is_fresh || (waits && told_to_wait != followed + 1)) return true;
  if (fresh.empty()) return false;
  return waits || fresh_bytes >= options.buffer_bytes ||
         seconds_between(fresh_since, at) >= options.cycle / 2;
}

// Reports the requests that were submitted on this rank to rank 0, if a report is due.
void NegotiationState::report() {
  if (!is_due(now())) return;
  Report report;
  std::vector<Pending*> told;
  {
    const std::lock_guard lock(mutex);
    told.swap(fresh);
    fresh_bytes = 0;
    report.joined = std::exchange(join_is_fresh, false);
    // Checked after `fresh` was emptied, so that a thread that waits for one of its tensors counts.
    report.waits = alarm->waiters > 0 || closing;
  }
  report.seen = followed;
  report.step = step;
  for (Pending* one : told) {
    one->sent = true;
    const auto found = known.find(one->request.name);
    if (found != known.end() && found->second.request == one->request) {
      one->sent_as = found->second.id;
      report.ids.push_back(one->sent_as);
    } else {
      report.requests.push_back(one->request);
    }
  }
  if (report.waits) told_to_wait = followed + 1;
  if (coordinator) {
    coordinator->take(rank, report, now());
  } else {
    links[0]->send(encode(report));
  }
}

void NegotiationState::decide() {
  const auto at = now();
  while (const auto decision = coordinator->decide(at)) {
    send_to_all(encode(*decision));
    follow(*decision);
  }
  std::vector<Notice> news;
  for (Stall& stall : coordinator->stalls(at)) news.push_back({std::move(stall), {}});
  notify(std::move(news));
}

void NegotiationState::follow(const Decision& decision) {
  if (decision.number != followed + 1)
    throw Error(Code::kComm, "rank 0 has sent decision " + std::to_string(decision.number) + " after " +
                                 std::to_string(followed));
  followed = decision.number;
  for (const auto& [id, name] : decision.admitted) {
    names[id] = name;
    known[name] = {id, std::nullopt};
  }
  for (const Batch& batch : decision.batches) start(batch);
  for (const auto& failure : decision.failures) {
    if (std::ranges::find(failure.ranks, rank) == failure.ranks.end()) continue;
    std::shared_ptr<Ticket> ticket;
    {
      const std::lock_guard lock(mutex);
      const auto found = pending.find(failure.name);
      if (found == pending.end())
        throw Error(Code::kInternal, "rank 0 has failed \"" + failure.name + "\", which is not pending here");
      ticket = found->second.ticket;
      pending.erase(found);
    }
    ticket->fail(Error(failure.code, failure.text));
  }
  for (uint64_t id : decision.evicted) drop(id);
  if (decision.last_joined >= 0) finish_join(decision.last_joined);
}

// Removes the tensors with these ids from `pending` and returns them. Throws Error if one is not pending.
std::vector<NegotiationState::Pending> NegotiationState::take(const std::vector<uint64_t>& ids) {
  std::vector<Pending> taken;
  taken.reserve(ids.size());
  const std::lock_guard lock(mutex);
  for (uint64_t id : ids) {
    const auto named = names.find(id);
    auto node = named == names.end() ? decltype(pending)::node_type() : pending.extract(named->second);
    if (node.empty()) {
      const std::string what = named == names.end() ? std::to_string(id) : "\"" + named->second + "\"";
      const Error error(Code::kInternal, "rank 0 has decided " + what + ", which is not pending here");
      for (Pending& one : taken) one.ticket->fail(error);  // nothing else could end them any more
      throw error;
    }
    taken.push_back(std::move(node.mapped()));
  }
  return taken;
}

// Submits the tensors of a batch to an engine as one operation.
void NegotiationState::start(const Batch& batch) {
  if (batch.ids.empty() || batch.missing.size() >= static_cast<size_t>(world_size))
    throw Error(Code::kComm, "rank 0 has decided on an operation without tensors or ranks");
  const bool is_missing =
      std::ranges::find(batch.missing, static_cast<uint64_t>(rank)) != batch.missing.end();
  Operation operation;
  std::vector<Pending> taken;
  if (is_missing) {
    operation.name = batch.name;
    operation.reduction = batch.reduction;
    operation.layout = Layout(batch.dtype, batch.counts);
    operation.inputs.assign(batch.counts.size(), nullptr);
    operation.outputs.assign(batch.counts.size(), nullptr);
    operation.weight = 0;
  } else {
    taken = take(batch.ids);
    operation = std::move(taken[0].operation);
  }
  if (taken.size() > 1) {
    std::vector<size_t> counts = operation.layout.counts();
    for (size_t i = 1; i < taken.size(); ++i) {
      append(counts, taken[i].operation.layout.counts());
      append(operation.inputs, taken[i].operation.inputs);
      append(operation.outputs, taken[i].operation.outputs);
    }
    operation.layout = Layout(operation.layout.dtype(), std::move(counts));
    operation.name = fused_name(operation.name, taken.size());
  }
  if (!batch.missing.empty()) operation.participants = world_size - static_cast<int>(batch.missing.size());
  Engine* to = operation.kind == Kind::kBroadcast ? broadcaster : engine;
  std::shared_ptr<Work> work;
  try {
    work = to->submit(std::move(operation));
  } catch (const std::exception& reason) {
    for (Pending& one : taken) one.ticket->fail(Error(Code::kInternal, reason.what()));
    throw;
  }
  running.push_back(work);
  const auto decided = Clock::now();
  Timeline* timeline = to->timeline();
  for (size_t i = 0; i < taken.size(); ++i) {
    Pending& one = taken[i];
    Known& known_as = known[one.request.name];
    if (!known_as.request) known_as = {batch.ids[i], std::move(one.request)};
    if (timeline != nullptr) timeline->negotiated(one.ticket->name(), one.ticket->submitted(), decided);
    one.ticket->run(work);
  }
}

// Forgets an id that rank 0 has removed. A tensor that this rank has reported by this id is reported again,
// in full.
void NegotiationState::drop(uint64_t id) {
  const auto named = names.find(id);
  if (named == names.end()) return;
  const std::string name = std::move(named->second);
  names.erase(named);
  if (const auto found = known.find(name); found != known.end() && found->second.id == id) known.erase(found);
  const std::lock_guard lock(mutex);
  const auto found = pending.find(name);
  if (found == pending.end() || !found->second.sent || found->second.sent_as != id) return;
  found->second.sent = false;
  found->second.sent_as = 0;
  if (fresh.empty()) fresh_since = now();
  fresh.push_back(&found->second);
  // Rank 0 counts a join only if it has understood all requests before it, so the join is repeated.
  join_is_fresh = joining != nullptr;
}

void NegotiationState::finish_join(int64_t last) {
  std::shared_ptr<Ticket> ticket;
  {
    const std::lock_guard lock(mutex);
    join_is_fresh = false;
    ticket.swap(joining);
  }
  if (ticket != nullptr) ticket->join(static_cast<int>(last));
}

// Failing ---------------------------------------------------------------------------------------------

// Makes this reason the permanent error, unless there is one already, and wakes the thread, which makes all
// tensors fail and informs the peers. May be called from any thread.
void NegotiationState::fail(GivingUp reason) {
  {
    const std::lock_guard lock(mutex);
    if (giving_up) return;
    giving_up = std::move(reason);
    has_error = true;
  }
  alarm->notify();
}

std::optional<Error> NegotiationState::first_error() {
  if (!has_error) return std::nullopt;
  const std::lock_guard lock(mutex);
  return giving_up->rank == rank ? Error(giving_up->code, giving_up->text) : giving_up->error();
}

void NegotiationState::give_up() {
  const Error error = *first_error();
  if (!std::exchange(told_error, true)) {
    std::string message;
    {
      const std::lock_guard lock(mutex);
      message = encode(*giving_up);
    }
    send_to_all(message);
    abort_engines(error);
  }
  settle_all(error);
}

// Makes all operations of both engines fail. May be called from any thread.
void NegotiationState::abort_engines(const Error& error) {
  engine->abort(error);
  if (broadcaster != engine) broadcaster->abort(error);
}

void NegotiationState::settle_all(const Error& error) {
  std::unordered_map<std::string, Pending> failed;
  std::shared_ptr<Ticket> join;
  {
    const std::lock_guard lock(mutex);
    failed.swap(pending);
    fresh.clear();
    join.swap(joining);
    join_is_fresh = false;
  }
  for (auto& [name, one] : failed) one.ticket->fail(error);
  if (join != nullptr) join->fail(error);
}

// Notices, orders, the end ----------------------------------------------------------------------------

void NegotiationState::notify(std::vector<Notice> news) {
  if (news.empty()) return;
  {
    const std::lock_guard lock(mutex);
    for (Notice& notice : news) notices.push_back(std::move(notice));
    has_notices = true;
  }
  event.notify();
}

void NegotiationState::give_orders() {
  std::vector<std::string> given;
  {
    const std::lock_guard lock(mutex);
    given.swap(orders);
  }
  for (const std::string& order : given) send_to_all(encode(MessageType::kOrder, order));
}

void NegotiationState::take_leave() {
  if (farewell) return;
  {
    const std::lock_guard lock(mutex);
    if (!closing || !pending.empty() || joining != nullptr) return;
  }
  if (coordinator && !has_error && !is_stopping) {
    coordinator->leave(rank, now());
    decide();
    if (coordinator->owes()) return;
  }
  send_to_all(encode(MessageType::kGoodbye, {}));
  for (const auto& link : links) link->finish();
  farewell = now() + duration(kFarewell);
}

void NegotiationState::send_to_all(const std::string& message) {
  for (const auto& link : links) link->send(message);
}

}  // namespace dadt
