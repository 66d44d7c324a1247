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

// News for a rank besides results: stalls on rank 0, and orders of rank 0 on other ranks.
struct Notice {
  std::optional<Stall> stall;
  std::string order;
};

// A clock that is set by a test which simulates ranks.
class ToldTime {
 public:
  void set(double seconds) { seconds_ = seconds; }
  Clock::time_point now() const { return Clock::time_point(duration(seconds_)); }

 private:
  std::atomic<double> seconds_{0};
};

// Accepts named tensors in any order and from any thread, brings them into one order on all ranks, fuses
// them, and submits them to engines that have no other user. One thread does this, and sleeps while there is
// nothing to do.
//
// 1. All ranks are connected to rank 0, which decides (Coordinator). The thread never takes the GIL.
// 2. A mismatch is an error of that tensor only. Any other error is permanent, is sent to all ranks, and
// makes all pending and later tensors fail, including the engine's operations.
// 3. In a forked child it is inert: submit throws, and all other methods do nothing.
class Negotiation {
 public:
  // sockets: connected stream sockets, which this object takes over: on rank 0 one for each rank (-1 for
  // itself), on other ranks one to rank 0. broadcaster: the engine for broadcasts, which may be the same
  // engine. The engines must outlive this object. time: if set, there is no thread, and the test that
  // simulates ranks calls `turn` at the times of this clock.
  Negotiation(Engine& engine, Engine& broadcaster, int rank, int world_size, const std::vector<int>& sockets,
              const NegotiationOptions& options, std::shared_ptr<const ToldTime> time = nullptr);
  // Aborts all pending tensors and joins the thread.
  ~Negotiation();
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // May be called from any thread; does not block. operation.name: name of the tensor. signature: properties
  // that must be equal on all ranks, as text for users. group: tensors of one group, of which there are
  // group_size, are decided together; empty for no group. Throws std::invalid_argument, and
  // std::runtime_error once closed.
  std::shared_ptr<Ticket> submit(Operation operation, std::string signature, std::string group = {},
                                 uint64_t group_size = 0);

  // Ends this rank's submissions. Until all ranks have joined, it takes part in their allreduces without
  // data.
  std::shared_ptr<Ticket> join();

  // Sets the step that this rank is in. It is sent to rank 0 with the next report.
  void set_step(int64_t step);

  // Makes all tensors fail on all ranks. May be called from any thread; does not block.
  void abort(const Error& error);

  // Returns new notices. Blocks until there is one, at most `timeout` seconds. Returns none once closed.
  std::optional<std::vector<Notice>> notices(double timeout);

  // Called on rank 0: sends a notice to all other ranks.
  void order(const std::string& text);

  // Says goodbye to the peers once all pending tensors are decided. May be called from any thread; does not
  // block.
  void leave();

  // Blocks until all pending tensors are decided, then says goodbye to the peers. Idempotent. If that takes
  // longer than `timeout` seconds, aborts the remaining tensors and throws Error(kTimeout).
  void close(double timeout);

  bool closed() const;
  std::optional<Error> error() const;

  // Without a thread: does everything that is due now. Returns the seconds until more is due, unless a socket
  // or a call of this rank comes first; none at the end.
  std::optional<double> turn();

  // Closes the sockets in a forked child, since open copies would hide this process's end from its peers.
  void forsake();

 private:
  bool inert() const;
  void check_alive() const;

  // Constant after construction.
  const pid_t pid_;
  std::shared_ptr<NegotiationState> state_;
};

}  // namespace dadt
