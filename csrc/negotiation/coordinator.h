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
  double cycle = 1e-3;                     // seconds that a ready tensor may wait for others to be fused with
  size_t buffer_bytes = size_t{64} << 20;  // size of a fused operation; 0 if nothing is fused
  size_t group_buffer_bytes = size_t{64} << 20;  // size of a fused operation within a group
  double stall_warning = 60;     // seconds until a warning about a tensor that some ranks have not submitted
  size_t cache_capacity = 4096;  // most names with an id
};

// A tensor that some ranks have submitted and others have not, for a warning.
struct Stall {
  std::string name;
  double seconds = 0;
  std::vector<int> submitted;
  std::vector<int> missing;
  std::vector<int64_t> steps;  // the last known step of each rank
  // The group of a tensor, with the number of its members submitted by all ranks and its size, if the tensor
  // waits for the rest of its group; otherwise empty and 0.
  std::string group;
  uint64_t group_has = 0;
  uint64_t group_size = 0;
};

// Decides on rank 0 what runs next, from the reports of all ranks. It uses no threads, sockets or clock:
// times are passed to it. What is decided together has an order that does not depend on the order of the
// reports: groups first, then allreduces by id (new ones after them, by name), then all others.
class Coordinator {
 public:
  using Time = Clock::time_point;

  Coordinator(int world_size, const NegotiationOptions& options);

  void take(int rank, const Report& report, Time now);
  // Handles the normal end of a rank.
  void leave(int rank, Time now);

  // Returns whether some rank has still to submit to a round that was already decided to fail.
  bool owes() const;

  // Returns the operations to run now, if any.
  std::optional<Decision> decide(Time now);
  // Returns the time at which there may be something to decide or report even if no rank reports before.
  Time next() const;

  // Returns tensors that have waited for long. Each is returned again after twice as long.
  std::vector<Stall> stalls(Time now);

 private:
  // The time at which to warn about something that waits: after the stall warning's seconds, then after twice
  // as long, and so on.
  struct Patience {
    double seconds = 0;
    Time ends;

    Patience() = default;
    Patience(double first, Time now);
    // Returns whether the time has passed; if so, the next, longer wait begins.
    bool is_over(Time now);
  };
  struct Entry {
    std::string name;
    std::vector<std::shared_ptr<const Request>> requests;  // request of each rank; null if not submitted
    std::vector<uint64_t> rounds;                          // for each rank, the round of its group
    int count = 0;
    Time first;
    Patience patience;
    // The following fields are set once the entry is complete.
    bool complete = false;
    bool ready = false;  // whether the tensor's group is complete as well
    Time since;
    uint64_t id = 0;                // 0 while it has none
    std::vector<uint64_t> missing;  // ranks that have joined instead of submitting it

    size_t first_rank() const;  // first rank that has submitted it
    const Request& request() const { return *requests[first_rank()]; }
    uint64_t round() const { return rounds[first_rank()]; }
  };
  // Tensors that run together. An error of one is an error of all, including those that are submitted later.
  struct Round {
    std::vector<Entry*> complete;
    std::optional<std::pair<Code, std::string>> error;
  };
  // The rounds of one group name, counted separately for each rank: a fast rank may be in the next round
  // while others finish the last.
  struct Group {
    struct Progress {
      uint64_t round = 0;
      uint64_t members = 0;  // number of its tensors submitted in this round
    };
    std::vector<Progress> progress;  // progress of each rank
    std::map<uint64_t, Round>
        // Rounds in progress, and failed rounds to which some rank has still to come.
        rounds;
  };
  // what allreduces must have in common to be fused
  using Kin = std::tuple<DType, Reduction, std::vector<uint64_t>>;

  void submit(int rank, std::shared_ptr<const Request> request, Time now);
  uint64_t count_in(int rank, const Request& request);
  void review(Entry& entry, Time now);
  void review_all(Time now);
  void complete(Entry& entry, Time now);
  std::string difference(const Entry& entry) const;
  void fail(Entry& entry, Code code, const std::string& text);
  void fail_round(const std::string& name, uint64_t number, Code code, const std::string& text);
  void pass_over(int rank, const std::string& name, uint64_t number);
  void fail_unfinished_groups();
  void forget_groups();
  bool everybody_waits() const;
  Time due() const;
  void fuse(std::vector<Entry*> entries, size_t limit, bool all, Decision& decision);
  void emit(const std::vector<Entry*>& entries, Decision& decision);
  uint64_t identify(const Entry& entry, Decision& decision);
  Stall describe_stall(const Entry& entry, Time now) const;
  Stall describe_join(Time now) const;

  // Constant after construction.
  const int world_size_;
  const NegotiationOptions options_;

  std::unordered_map<std::string, Entry> pending_;
  std::unordered_map<std::string, Group> groups_;
  // Entries that are complete and not decided yet.
  std::vector<Entry*> fusible_;
  std::vector<Entry*> single_;
  std::vector<std::pair<std::string, std::vector<Entry*>>> full_groups_;
  std::vector<Decision::Failure> failures_;
  std::map<Kin, size_t> bytes_;  // bytes of the entries in fusible_, by kind
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
  // Set while some ranks have joined; restarted with each tensor that others submit.
  std::optional<Patience> join_patience_;
};

}  // namespace dadt
