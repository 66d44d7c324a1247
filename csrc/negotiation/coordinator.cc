#include "negotiation/coordinator.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace dadt {
namespace {

std::string quoted(const std::string& name) { return "\"" + name + "\""; }

// Describes a request in an error message: by its signature, and if `in_full` by all its properties.
std::string describe(const Request& request, bool in_full) {
  std::ostringstream text;
  text << request.signature;
  if (!in_full) return text.str();
  text << " (" << kind_name(request.kind);
  if (request.kind == Kind::kAllreduce) {
    text << " " << reduction_name(request.reduction) << " of " << request.bytes() << " bytes of "
         << dtype_name(request.dtype) << " in " << request.counts.size() << " tensors";
  }
  if (request.group.empty()) {
    text << ", in no group)";
  } else {
    text << ", in group " << quoted(request.group) << " of " << request.group_size << ")";
  }
  return text.str();
}

}  // namespace

Coordinator::Patience::Patience(double first, Time now) : seconds(first), ends(now + duration(first)) {}

bool Coordinator::Patience::is_over(Time now) {
  if (now < ends) return false;
  *this = Patience(2 * seconds, now);
  return true;
}

Coordinator::Coordinator(int world_size, const NegotiationOptions& options)
    : world_size_(world_size),
      options_(options),
      steps_(world_size),
      waits_(world_size),
      joined_(world_size),
      left_(world_size) {}

size_t Coordinator::Entry::first_rank() const {
  return std::ranges::find_if(requests, [](const auto& one) { return one != nullptr; }) - requests.begin();
}

void Coordinator::take(int rank, const Report& report, Time now) {
  steps_[rank] = report.step;
  bool understood = true;
  for (uint64_t id : report.ids) {
    if (auto request = cache_.find(id)) {
      submit(rank, std::move(request), now);
    } else {
      // The id was removed after the rank had used it. The decision that removed it makes the rank send the
      // request again, in full.
      understood = false;
    }
  }
  for (const Request& request : report.requests) {
    auto known = cache_.find(cache_.id_of(request));
    submit(rank, known ? std::move(known) : std::make_shared<const Request>(request), now);
  }
  waits_[rank] = report.waits && report.seen == decisions_;
  // A join counts only if all requests before it were understood. Otherwise the rank repeats the join when it
  // sends these requests in full.
  if (report.joined && understood && !joined_[rank]) {
    joined_[rank] = true;
    ++absent_;
    if (!join_patience_) first_joined_ = now;
    last_joined_ = rank;
    review_all(now);
  }
  if (last_joined_ >= 0 && (report.joined || !report.ids.empty() || !report.requests.empty())) {
    join_patience_ = Patience(options_.stall_warning, now);
    next_stall_ = std::min(next_stall_, join_patience_->ends);
  }
}

void Coordinator::leave(int rank, Time now) {
  if (left_[rank]) return;
  left_[rank] = true;
  absent_ += !joined_[rank];
  review_all(now);
}

// Reviews all pending tensors. A tensor that fails removes the rest of its group from pending_, so each name
// is looked up again.
void Coordinator::review_all(Time now) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : pending_) names.push_back(name);
  for (const auto& name : names) {
    if (const auto entry = pending_.find(name); entry != pending_.end()) review(entry->second, now);
  }
}

void Coordinator::submit(int rank, std::shared_ptr<const Request> request, Time now) {
  const uint64_t round = count_in(rank, *request);
  std::optional<Failed> error = settle_owed(rank, *request, round);
  if (error) return failures_.push_back({error->first, request->name, error->second, {rank}});
  if (!request->group.empty()) error = groups_[request->group].rounds[round].error;
  Entry& entry = pending_[request->name];
  if (entry.count == 0) {
    entry.name = request->name;
    entry.requests.resize(world_size_);
    entry.rounds.resize(world_size_);
    entry.first = now;
    entry.patience = Patience(options_.stall_warning, now);
    next_stall_ = std::min(next_stall_, entry.patience.ends);
  }
  if (entry.requests[rank] != nullptr)
    throw Error(Code::kInternal,
                "rank " + std::to_string(rank) + " submitted " + quoted(entry.name) + " twice");
  const auto is_of_group = [&](const auto& one) { return one != nullptr && one->group == request->group; };
  // Ranks that have it in a later round of a failed round's group do without this rank's.
  if (error && std::ranges::any_of(entry.requests, is_of_group))
    return failures_.push_back({error->first, request->name, error->second, {rank}});
  entry.requests[rank] = std::move(request);
  entry.rounds[rank] = round;
  ++entry.count;
  if (error) {
    fail(entry, error->first, error->second);
  } else {
    review(entry, now);
  }
}

// Completes a pending tensor if every rank has submitted it or joined, or makes it fail if it can never be
// complete.
void Coordinator::review(Entry& entry, Time now) {
  if (entry.complete || (absent_ == 0 && entry.count < world_size_)) return;
  std::vector<uint64_t> missing;
  bool waits = false;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (entry.requests[rank] != nullptr) continue;
    if (left_[rank]) {
      return fail(entry, Code::kPeerLost,
                  quoted(entry.name) + ": rank " + std::to_string(rank) + " has ended and submits no more");
    }
    if (joined_[rank]) missing.push_back(rank);
    waits = waits || !joined_[rank];
  }
  if (waits) return;
  if (!missing.empty() && entry.request().kind != Kind::kAllreduce) {
    return fail(entry, Code::kMismatch,
                quoted(entry.name) + ": rank " + std::to_string(missing[0]) +
                    " has joined and takes part in " + "allreduces only; " +
                    describe(entry.request(), false) + " needs all ranks");
  }
  entry.missing = std::move(missing);
  complete(entry, now);
}

void Coordinator::complete(Entry& entry, Time now) {
  const std::string text = difference(entry);
  if (!text.empty()) return fail(entry, Code::kMismatch, text);
  const Request& request = entry.request();
  entry.complete = true;
  entry.since = now;
  entry.id = cache_.id_of(request);
  if (!request.group.empty()) {
    // The round was removed already if its members stated different group sizes, and it was complete by a
    // smaller size than this one.
    Group& group = groups_[request.group];
    group.progress.resize(world_size_);
    auto& rounds = group.rounds;
    const auto round = rounds.try_emplace(entry.round()).first;
    std::vector<Entry*>& members = round->second.complete;
    members.push_back(&entry);
    if (members.size() < request.group_size) return;
    for (Entry* member : members) member->ready = true;
    full_groups_.emplace_back(request.group, std::move(members));
    rounds.erase(round);
    return;
  }
  entry.ready = true;
  if (request.kind == Kind::kAllreduce) {
    fusible_.push_back(&entry);
    size_t& bytes = bytes_[{request.dtype, request.reduction, entry.missing}];
    bytes += request.bytes();
    has_full_buffer_ = has_full_buffer_ || bytes >= options_.buffer_bytes;
  } else {
    single_.push_back(&entry);
  }
}

// Describes how one rank's request differs from that of the first rank that has submitted the tensor; empty
// if all requests are equal.
std::string Coordinator::difference(const Entry& entry) const {
  int first = -1;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (entry.requests[rank] == nullptr) continue;
    if (first < 0) first = rank;
    const auto& one = entry.requests[first];
    const auto& other = entry.requests[rank];
    if ((one == other || *one == *other) && entry.rounds[first] == entry.rounds[rank]) continue;
    if (*one == *other) {
      return quoted(entry.name) + ": rank " + std::to_string(first) + " and rank " + std::to_string(rank) +
             " have it in different rounds of group " + quoted(one->group) +
             ": the same tensors must make up the group on all ranks";
    }
    const bool in_full = one->signature == other->signature;
    return quoted(entry.name) + ": rank " + std::to_string(first) + " has " + describe(*one, in_full) +
           ", rank " + std::to_string(rank) + " has " + describe(*other, in_full);
  }
  return {};
}

bool Coordinator::everybody_waits() const {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!waits_[rank] && !joined_[rank] && !left_[rank]) return false;
  }
  return true;
}

std::optional<Decision> Coordinator::decide(Time now) {
  const bool all_joined = absent_ == world_size_ && last_joined_ >= 0;
  const bool all = !fusible_.empty() && (everybody_waits() || now >= due());
  if (!all && !has_full_buffer_ && single_.empty() && full_groups_.empty() && failures_.empty() &&
      !all_joined)
    return std::nullopt;
  if (all_joined) fail_unfinished_groups();
  Decision decision;
  decision.number = ++decisions_;
  decision.failures = std::move(failures_);
  failures_.clear();
  std::ranges::stable_sort(full_groups_, {}, &decltype(full_groups_)::value_type::first);
  for (auto& [key, members] : std::exchange(full_groups_, {}))
    fuse(std::move(members), options_.group_buffer_bytes, true, decision);
  if (all || has_full_buffer_) {
    bytes_.clear();
    has_full_buffer_ = false;
    fuse(std::exchange(fusible_, {}), options_.buffer_bytes, all, decision);
  }
  fuse(std::exchange(single_, {}), 0, true, decision);
  // Ids of pending tensors are kept. Otherwise a rank that has used such an id would have to repeat its
  // request.
  const auto is_pending = [this](const std::string& name) { return pending_.contains(name); };
  cache_.trim(options_.cache_capacity, is_pending, decision);
  forget_groups();
  if (all_joined) {
    decision.last_joined = std::exchange(last_joined_, -1);
    join_patience_.reset();
    absent_ = static_cast<int>(std::count(left_.begin(), left_.end(), true));
    joined_.assign(world_size_, false);
  }
  waits_.assign(world_size_, false);
  return decision;
}

// Fuses allreduces of one dtype, reduction and set of missing ranks into operations of up to `limit` bytes.
// If `all` is false, tensors whose operation is not full wait for more.
void Coordinator::fuse(std::vector<Entry*> entries, size_t limit, bool all, Decision& decision) {
  // A tensor without an id (0) is ordered last, since 0 - 1 wraps around.
  const auto place = [](const Entry* entry) {
    return std::tuple<uint64_t, const std::string&>(entry->id - 1, entry->name);
  };
  std::ranges::sort(entries, {}, place);
  std::map<Kin, std::pair<std::vector<Entry*>, size_t>> open;
  for (Entry* entry : entries) {
    const Request& request = entry->request();
    const size_t bytes = request.bytes();
    if (request.kind != Kind::kAllreduce || bytes >= limit) {
      emit({entry}, decision);
      continue;
    }
    auto& [buffer, filled] = open[{request.dtype, request.reduction, entry->missing}];
    if (filled + bytes > limit) {
      emit(buffer, decision);
      buffer.clear();
      filled = 0;
    }
    buffer.push_back(entry);
    filled += bytes;
  }
  for (auto& [kin, buffer] : open) {
    if (all || buffer.second >= limit) {
      emit(buffer.first, decision);
      continue;
    }
    bytes_[kin] = buffer.second;
    fusible_.insert(fusible_.end(), buffer.first.begin(), buffer.first.end());
  }
}

void Coordinator::emit(const std::vector<Entry*>& entries, Decision& decision) {
  Batch batch;
  const Request& first = entries[0]->request();
  batch.missing = entries[0]->missing;
  for (const Entry* entry : entries) batch.ids.push_back(identify(*entry, decision));
  if (!batch.missing.empty()) {
    batch.name = fused_name(first.name, entries.size());
    batch.dtype = first.dtype;
    batch.reduction = first.reduction;
    for (const Entry* entry : entries) {
      const auto& counts = entry->request().counts;
      batch.counts.insert(batch.counts.end(), counts.begin(), counts.end());
    }
  }
  decision.batches.push_back(std::move(batch));
  for (const Entry* entry : entries) pending_.erase(std::string(entry->name));
}

// Returns the id by which ranks report this request from now on; gives it a new id if it has none.
uint64_t Coordinator::identify(const Entry& entry, Decision& decision) {
  if (entry.id == 0) return cache_.admit(entry.requests[entry.first_rank()], decision);
  cache_.use(entry.id);
  return entry.id;
}

Coordinator::Time Coordinator::due() const {
  Time first = Time::max();
  for (const Entry* entry : fusible_) first = std::min(first, entry->since);
  return first == Time::max() ? first : first + duration(options_.cycle / 2);
}

Coordinator::Time Coordinator::next() const { return std::min(due(), next_stall_); }

std::vector<Stall> Coordinator::stalls(Time now) {
  std::vector<Stall> found;
  if (now < next_stall_) return found;
  next_stall_ = Time::max();
  for (auto& [name, entry] : pending_) {
    if (entry.ready) continue;
    if (entry.patience.is_over(now)) found.push_back(describe_stall(entry, now));
    next_stall_ = std::min(next_stall_, entry.patience.ends);
  }
  if (join_patience_) {
    if (join_patience_->is_over(now)) found.push_back(describe_join(now));
    next_stall_ = std::min(next_stall_, join_patience_->ends);
  }
  std::ranges::sort(found, {}, &Stall::name);
  return found;
}

Stall Coordinator::describe_stall(const Entry& entry, Time now) const {
  Stall stall{entry.name, seconds_between(entry.first, now), {}, {}, steps_, {}, 0, 0};
  if (entry.complete) {
    const Request& request = entry.request();
    stall.group = request.group;
    if (const auto group = groups_.find(request.group); group != groups_.end()) {
      const auto round = group->second.rounds.find(entry.round());
      if (round != group->second.rounds.end()) stall.group_has = round->second.complete.size();
    }
    stall.group_size = request.group_size;
  }
  for (int rank = 0; rank < world_size_; ++rank) {
    if (entry.requests[rank] != nullptr) {
      stall.submitted.push_back(rank);
    } else if (!joined_[rank]) {
      stall.missing.push_back(rank);
    }
  }
  return stall;
}

Stall Coordinator::describe_join(Time now) const {
  Stall stall{"join", seconds_between(first_joined_, now), {}, {}, steps_, {}, 0, 0};
  for (int rank = 0; rank < world_size_; ++rank) {
    if (joined_[rank]) {
      stall.submitted.push_back(rank);
    } else if (!left_[rank]) {
      stall.missing.push_back(rank);
    }
  }
  return stall;
}

}  // namespace dadt
