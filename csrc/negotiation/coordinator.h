#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/event_count.h"
#include "negotiation/message.h"
#include "negotiation/name_cache.h"

namespace dadt {

// Options for the negotiation of named tensors. The values of rank 0 apply.
struct NegotiationOptions {
  double cycle = 1e-3;                     // seconds that a ready tensor waits for others to be fused with
  size_t buffer_bytes = size_t{64} << 20;  // most bytes of a fused operation; 0: no fusion
  size_t group_buffer_bytes = size_t{64} << 20;  // most bytes of a fused operation within a group
  double stall_warning = 60;     // seconds until a warning about a tensor that some ranks have not submitted
  size_t cache_capacity = 4096;  // most names that have an id (NameCache)
};

// A tensor to warn about, because some ranks have submitted it and others have not.
struct Stall {
  std::string name;
  double seconds = 0;
  std::vector<int> submitted;
  std::vector<int> missing;
  std::vector<int64_t> steps;  // the last known step of each rank
  // If the tensor waits for the rest of its group: the group's name, how many of its tensors all ranks have
  // submitted, and how many tensors it has; otherwise empty and 0.
  std::string group;
  uint64_t group_has = 0;
  uint64_t group_size = 0;
};

// Decides on rank 0 which operations run next, from the reports of all ranks. It uses no threads, sockets or
// clock; the caller passes the time. The order within a decision does not depend on the order of the reports:
// groups come first, then allreduces by id (those without an id last, by name), then all other operations.
class Coordinator {
 public:
  using Time = Clock::time_point;

  Coordinator(int world_size, const NegotiationOptions& options);

  void take(int rank, const Report& report, Time now);
  // Handles the normal end of a rank.
  void leave(int rank, Time now);

  // Returns whether some rank must still submit tensors of a group's round that has already failed.
  bool owes() const;

  // Returns the next decision; nullopt if there is nothing to decide now.
  std::optional<Decision> decide(Time now);
  // Returns the time at which `decide` and `stalls` must be called even if no rank sends a report before.
  Time next() const;

  // Returns the tensors that a warning is due for. After each warning, the time until the next one doubles.
  std::vector<Stall> stalls(Time now);

 private:
  // The time of the next warning about something that waits. After each warning, the time until the next one
  // doubles.
  struct Patience {
    double seconds = 0;
    Time ends;

    Patience() = default;
    Patience(double first, Time now);
    // Returns whether the warning is due; if so, sets the time of the next one.
    bool is_over(Time now);
  };
  struct Entry {
    std::string name;
    std::vector<std::shared_ptr<const Request>> requests;  // request of each rank; null if not submitted
    std::vector<uint64_t> rounds;                          // for each rank, its round of the tensor's group
    int count = 0;
    Time first;
    Patience patience;
    // The following fields are set once all ranks have submitted the tensor or joined.
    bool complete = false;
    bool ready = false;  // whether the tensor's group, if any, is complete as well
    Time since;
    uint64_t id = 0;                // id in the NameCache; 0 if it has none
    std::vector<uint64_t> missing;  // ranks that have joined instead of submitting the tensor

    size_t first_rank() const;  // first rank that has submitted the tensor
    const Request& request() const { return *requests[first_rank()]; }
    uint64_t round() const { return rounds[first_rank()]; }
  };
  using Failed = std::pair<Code, std::string>;
  // One round of a group, whose tensors run together. If one fails, all fail, including those that are
  // submitted later.
  struct Round {
    std::vector<Entry*> complete;
    std::optional<Failed> error;
    // Each failed tensor, with the ranks that had not submitted it: theirs fails as well, though they may
    // have it in another group or in none.
    std::unordered_map<std::string, std::vector<bool>> owed;
  };
  // The rounds of one group name, counted separately for each rank, since a fast rank may be in the next
  // round while others finish the previous one.
  struct Group {
    struct Progress {
      uint64_t round = 0;
      uint64_t members = 0;  // number of tensors that the rank has submitted in this round
      bool passed = false;   // whether it was passed over in the round before, and has not begun this one

      // Returns whether the rank submits no tensor any more that belongs to this round.
      bool is_beyond(uint64_t number) const { return round - passed > number; }
    };
    std::vector<Progress> progress;  // one entry for each rank
    std::map<uint64_t, Round>
        // Rounds in progress, and failed rounds that some rank has not finished.
        rounds;
  };
  // What allreduces must have in common to be fused: dtype, reduction, and the ranks that have joined.
  using Kin = std::tuple<DType, Reduction, std::vector<uint64_t>>;

  void submit(int rank, std::shared_ptr<const Request> request, Time now);
  uint64_t count_in(int rank, const Request& request);
  std::optional<Failed> settle_owed(int rank, const Request& request, uint64_t number);
  void review(Entry& entry, Time now);
  void review_all(Time now);
  void complete(Entry& entry, Time now);
  std::string difference(const Entry& entry) const;
  void fail(Entry& entry, Code code, const std::string& text);
  void fail_round(const std::string& name, uint64_t number, Code code, const std::string& text);
  void pass_over(int rank, Group& group, uint64_t number);
  bool is_owed(const Group& group, uint64_t number) const;
  void fail_unfinished_groups();
  void forget_groups();
  bool everybody_waits() const;
  Time due() const;
  void fuse(std::vector<Entry*> entries, size_t limit, bool all, Decision& decision);
  void emit(const std::vector<Entry*>& entries, Decision& decision);
  uint64_t identify(const Entry& entry, Decision& decision);
  Stall describe_stall(const Entry& entry, Time now) const;
  Stall describe_join(Time now) const;

  // The following fields are constant after construction.
  const int world_size_;
  const NegotiationOptions options_;

  std::unordered_map<std::string, Entry> pending_;
  std::unordered_map<std::string, Group> groups_;
  bool has_failed_rounds_ = false;  // whether a group may have a failed round
  // Complete tensors that are not part of a decision yet.
  std::vector<Entry*> fusible_;
  std::vector<Entry*> single_;
  std::vector<std::pair<std::string, std::vector<Entry*>>> full_groups_;
  std::vector<Decision::Failure> failures_;
  std::map<Kin, size_t> bytes_;  // bytes of the tensors in fusible_, by what they have in common
  bool has_full_buffer_ = false;
  Time next_stall_ = Time::max();

  NameCache cache_;
  uint64_t decisions_ = 0;
  std::vector<int64_t> steps_;
  std::vector<bool> waits_;
  std::vector<bool> joined_;
  std::vector<bool> left_;
  int absent_ = 0;  // number of ranks that have joined or left
  int64_t last_joined_ = -1;
  Time first_joined_;
  // The time to warn that some ranks have joined and others have not; restarted by each report of a new
  // request.
  std::optional<Patience> join_patience_;
};

}  // namespace dadt
