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

// How named tensors are brought together. Rank 0's sizes count.
struct NegotiationOptions {
  double cycle = 1e-3;                           // seconds that a ready tensor may wait for company
  size_t buffer_bytes = size_t{64} << 20;        // of a fused operation; 0: none are fused
  size_t group_buffer_bytes = size_t{64} << 20;  // the same within a group
  double stall_warning = 60;                     // seconds until a tensor that some ranks lack is told of
  size_t cache_capacity = 4096;                  // names that have an id
};

// A tensor that some ranks have submitted and others have not.
struct Stall {
  std::string name;
  double seconds = 0;
  std::vector<int> submitted;
  std::vector<int> missing;
  std::vector<int64_t> steps;  // the last known of each rank
  // The group of a tensor that all ranks have submitted while others of it are missing; else empty and 0.
  std::string group;
  uint64_t group_has = 0;
  uint64_t group_size = 0;
};

// Decides on rank 0 what runs next, from what the ranks report. Knows neither threads nor sockets, and no
// time but what it is told. What it decides together comes in an order that does not depend on who came when:
// groups, then allreduces by id (new ones by name, behind), then the rest.
class Coordinator {
 public:
  using Time = Clock::time_point;

  Coordinator(int world_size, const NegotiationOptions& options);

  void take(int rank, const Report& report, Time now);
  // A rank has come to its orderly end.
  void leave(int rank, Time now);

  // Whether somebody is still to come to a round of which it is decided that it fails.
  bool owes() const;

  // The operations to run now; none if there are none.
  std::optional<Decision> decide(Time now);
  // When there may be something to decide or to tell though no rank reports.
  Time next() const;

  // Tensors that have been waiting for long; each is told again after twice as long.
  std::vector<Stall> stalls(Time now);

 private:
  // When to tell of something that waits: after the stall warning, twice as long, and so on.
  struct Patience {
    double seconds = 0;
    Time ends;

    Patience() = default;
    Patience(double first, Time now);
    // Whether it has ended; then it starts anew.
    bool is_over(Time now);
  };
  struct Entry {
    std::string name;
    std::vector<std::shared_ptr<const Request>> requests;  // by rank; null: not submitted
    std::vector<uint64_t> rounds;                          // by rank: of its group
    int count = 0;
    Time first;
    Patience patience;
    // Once complete.
    bool complete = false;
    bool ready = false;  // its group is, too
    Time since;
    uint64_t id = 0;                // 0: none yet
    std::vector<uint64_t> missing;  // ranks that have joined instead

    size_t first_rank() const;  // that has submitted it
    const Request& request() const { return *requests[first_rank()]; }
    uint64_t round() const { return rounds[first_rank()]; }
  };
  // Tensors that run together. What has gone wrong with one goes wrong with all, those still to come
  // included.
  struct Round {
    std::vector<Entry*> complete;
    std::optional<std::pair<Code, std::string>> error;
  };
  // The rounds of one name, counted by each rank: a quick one may be in the next while others finish the
  // last.
  struct Group {
    struct Progress {
      uint64_t round = 0;
      uint64_t members = 0;  // submitted of this round
    };
    std::vector<Progress> progress;  // by rank
    std::map<uint64_t, Round>
        rounds;  // those under way, and the failed ones that somebody is still to come to
  };
  using Kin = std::tuple<DType, Reduction, std::vector<uint64_t>>;  // those that can be fused

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
  // Complete, and not decided yet.
  std::vector<Entry*> fusible_;
  std::vector<Entry*> single_;
  std::vector<std::pair<std::string, std::vector<Entry*>>> full_groups_;
  std::vector<Decision::Failure> failures_;
  std::map<Kin, size_t> bytes_;  // of fusible_
  bool has_full_buffer_ = false;
  Time next_stall_ = Time::max();

  NameCache cache_;
  uint64_t decisions_ = 0;
  std::vector<int64_t> steps_;
  std::vector<bool> waits_;
  std::vector<bool> joined_;
  std::vector<bool> left_;
  int absent_ = 0;  // ranks that have joined or left
  int64_t last_joined_ = -1;
  Time first_joined_;
  std::optional<Patience> join_patience_;  // while some have joined; anew with each tensor that others submit
};

}  // namespace dadt
