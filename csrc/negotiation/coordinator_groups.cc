// The part of Coordinator that follows groups of tensors, and lets all tensors of a group fail together.

#include <algorithm>
#include <utility>

#include "negotiation/coordinator.h"

namespace dadt {

// Counts a rank's request as a member of its group, and returns the number of the group's round; 0 if it is
// in no group.
uint64_t Coordinator::count_in(int rank, const Request& request) {
  if (request.group.empty()) return 0;
  Group& group = groups_[request.group];
  group.progress.resize(world_size_);
  auto& [round, members, passed] = group.progress[rank];
  const uint64_t number = round;
  passed = false;
  if (++members >= request.group_size) {
    ++round;
    members = 0;
  }
  return number;
}

// Returns the error of a rank's request if the tensor has failed already on other ranks; with it fails the
// group that this rank has it in. number: the rank's round of this group.
std::optional<Coordinator::Failed> Coordinator::settle_owed(int rank, const Request& request,
                                                            uint64_t number) {
  std::optional<Failed> error;
  if (!has_failed_rounds_) return error;
  for (auto& [name, group] : groups_) {
    for (auto& [other, round] : group.rounds) {
      const bool is_own = name == request.group;
      if (is_own && other > number) break;
      const auto owed = round.owed.find(request.name);
      if (owed == round.owed.end() || !owed->second[rank]) continue;
      owed->second[rank] = false;
      if (is_own ? other < number : group.progress[rank].is_beyond(other)) continue;
      if (!is_own) pass_over(rank, group, other);
      error = round.error;
      break;
    }
  }
  if (error && !request.group.empty()) fail_round(request.group, number, error->first, error->second);
  return error;
}

// Makes a pending tensor fail, and with it all groups to which it belongs, since a group succeeds or fails as
// a whole.
void Coordinator::fail(Entry& entry, Code code, const std::string& text) {
  std::vector<int> ranks;
  std::vector<std::pair<std::string, uint64_t>> rounds;
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto& request = entry.requests[rank];
    if (request == nullptr) continue;
    ranks.push_back(rank);
    if (!request->group.empty()) rounds.emplace_back(request->group, entry.rounds[rank]);
  }
  const std::string name = entry.name;
  const auto requests = std::move(entry.requests);
  pending_.erase(name);
  failures_.push_back({code, name, text, std::move(ranks)});
  for (const auto& [group, number] : rounds) {
    if (const auto found = groups_.find(group); found != groups_.end()) {
      for (int rank = 0; rank < world_size_; ++rank) {
        if (requests[rank] != nullptr && requests[rank]->group != group)
          pass_over(rank, found->second, number);
      }
    }
    fail_round(group, number, code, text);
    if (const auto found = groups_.find(group); found != groups_.end()) {
      const auto [owed, is_new] = found->second.rounds[number].owed.try_emplace(name, world_size_);
      for (int rank = 0; is_new && rank < world_size_; ++rank) {
        owed->second[rank] = requests[rank] == nullptr && !found->second.progress[rank].is_beyond(number);
      }
    }
  }
}

void Coordinator::fail_round(const std::string& name, uint64_t number, Code code, const std::string& text) {
  // The error is stored for ranks that still submit to this round. If all ranks have finished the group, it
  // is no longer in groups_.
  if (const auto group = groups_.find(name); group != groups_.end()) {
    Round& round = group->second.rounds[number];
    if (round.error) return;
    round = {{}, {{code, text}}, {}};
    has_failed_rounds_ = true;
  }
  std::vector<std::string> members;
  for (const auto& [other, entry] : pending_) {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (entry.requests[rank] == nullptr || entry.requests[rank]->group != name ||
          entry.rounds[rank] != number)
        continue;
      members.push_back(other);
      break;
    }
  }
  for (const std::string& member : members) {
    if (const auto other = pending_.find(member); other != pending_.end()) fail(other->second, code, text);
  }
}

// Marks a group's round as finished for a rank that has not begun it and has submitted one of its tensors in
// another group, so that the rank will never submit the round.
void Coordinator::pass_over(int rank, Group& group, uint64_t number) {
  Group::Progress& progress = group.progress[rank];
  if (progress.round != number || progress.members > 0) return;
  ++progress.round;
  progress.passed = true;
}

// Makes all tensors fail that wait for the rest of their groups, since all ranks have joined or left.
void Coordinator::fail_unfinished_groups() {
  std::vector<std::string> names;
  for (const auto& [name, entry] : pending_) {
    if (!entry.ready) names.push_back(name);
  }
  for (const std::string& name : names) {
    const auto entry = pending_.find(name);
    if (entry == pending_.end()) continue;
    const Stall stall = describe_stall(entry->second, entry->second.first);
    fail(entry->second, Code::kMismatch,
         "\"" + name + "\": its group \"" + stall.group + "\" has " + std::to_string(stall.group_has) +
             " of " + std::to_string(stall.group_size) + " members, and all ranks have joined");
  }
  groups_.clear();
}

// Deletes failed rounds to which no rank submits a tensor any more, and groups in which no round is
// unfinished on any rank.
void Coordinator::forget_groups() {
  has_failed_rounds_ = false;
  for (auto item = groups_.begin(); item != groups_.end();) {
    Group& group = item->second;
    uint64_t least = UINT64_MAX, most = 0;
    bool is_between = true;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (joined_[rank] || left_[rank]) continue;
      least = std::min(least, group.progress[rank].round);
      most = std::max(most, group.progress[rank].round);
      is_between = is_between && group.progress[rank].members == 0;
    }
    std::erase_if(group.rounds, [&](const auto& round) {
      const bool has_failed = round.second.error.has_value();
      const bool is_over = has_failed && !is_owed(group, round.first);
      has_failed_rounds_ = has_failed_rounds_ || (has_failed && !is_over);
      return is_over;
    });
    const bool is_idle = group.rounds.empty() && is_between && least >= most;
    item = is_idle ? groups_.erase(item) : std::next(item);
  }
}

// Returns whether some rank still submits tensors that belong to this failed round.
bool Coordinator::is_owed(const Group& group, uint64_t number) const {
  const auto& owed = group.rounds.at(number).owed;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Group::Progress& progress = group.progress[rank];
    if (joined_[rank] || left_[rank] || progress.is_beyond(number)) continue;
    if (progress.round <= number || std::ranges::any_of(owed, [&](auto& one) { return one.second[rank]; }))
      return true;
  }
  return false;
}

bool Coordinator::owes() const {
  for (const auto& [name, group] : groups_) {
    for (const auto& [number, round] : group.rounds) {
      if (round.error && is_owed(group, number)) return true;
    }
  }
  return false;
}

}  // namespace dadt
