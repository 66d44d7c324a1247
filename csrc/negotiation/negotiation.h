#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "negotiation/coordinator.h"
#include "negotiation/ticket.h"

namespace dadt {

struct NegotiationState;

// News for a rank besides results: stalls on rank 0, orders of rank 0 elsewhere.
struct Notice {
  std::optional<Stall> stall;
  std::string order;
};

// The time as whoever simulates ranks tells it.
class ToldTime {
 public:
  void set(double seconds) { seconds_ = seconds; }
  Clock::time_point now() const { return Clock::time_point(duration(seconds_)); }

 private:
  std::atomic<double> seconds_{0};
};

// Named tensors in any order, from any thread: brings them into one order on all ranks, fuses them and gives
// them to engines that have no other user. One thread, which sleeps while there is nothing to do.
//
// 1. The ranks are connected to rank 0, which decides (Coordinator). The thread never takes the GIL.
// 2. An error of one tensor, a mismatch, is that tensor's. Any other sticks, is told to all ranks, and fails
//    whatever is pending and whatever comes later, the engine's operations included.
// 3. In a forked child it is inert: submit throws, all else does nothing.
class Negotiation {
 public:
  // sockets: connected streams, taken over. On rank 0 that of each rank (its own: -1), elsewhere that of rank
  // 0. broadcaster: the engine for broadcasts, the same one or another. The engines must live longer.
  // time: where it is given, there is no thread: whoever simulates ranks calls `turn`, at the time that it
  // tells.
  Negotiation(Engine& engine, Engine& broadcaster, int rank, int world_size, const std::vector<int>& sockets,
              const NegotiationOptions& options, std::shared_ptr<const ToldTime> time = nullptr);
  // Aborts what is pending and joins the thread.
  ~Negotiation();
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // Any thread; does not block. operation.name is the tensor's. signature: what must be equal on all ranks,
  // as users may read it. group: tensors of the same are decided together, group_size of them; empty: none.
  // Throws std::invalid_argument, and std::runtime_error once closed.
  std::shared_ptr<Ticket> submit(Operation operation, std::string signature, std::string group = {},
                                 uint64_t group_size = 0);

  // This rank submits no more, and takes part in the others' allreduces with nothing, until all have joined.
  std::shared_ptr<Ticket> join();

  // The step that this rank is in; told to rank 0 with whatever is told it next.
  void set_step(int64_t step);

  // Any thread; does not block. Reaches all ranks.
  void abort(const Error& error);

  // Blocks until there is a notice, for `timeout` seconds at most. None once closed.
  std::optional<std::vector<Notice>> notices(double timeout);

  // On rank 0: a notice for all other ranks.
  void order(const std::string& text);

  // Any thread; does not block: takes leave of the peers once what is pending is decided.
  void leave();

  // Blocks until what is pending is decided, then takes leave of the peers. Idempotent. Error(kTimeout) if
  // that took longer than `timeout` seconds; the rest was aborted, then.
  void close(double timeout);

  bool closed() const;
  std::optional<Error> error() const;

  // Without a thread: does what there is to do now. Returns the seconds until there is more, unless a socket
  // or a call of this rank's comes first; none at the end.
  std::optional<double> turn();

  // Closes the sockets in a forked child: they would hide this process's end from its peers.
  void forsake();

 private:
  bool inert() const;
  void check_alive() const;

  // Constant after construction.
  const pid_t pid_;
  std::shared_ptr<NegotiationState> state_;
};

}  // namespace dadt
