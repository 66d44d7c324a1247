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

// A notice for Python: a stalled tensor, on rank 0, or a text that rank 0 has sent by `order`, on other
// ranks.
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
// them, and submits them to engines that nothing else may use. One thread does this, and sleeps while there
// is nothing to do.
//
// 1. All ranks are connected to rank 0, which decides (Coordinator). The thread never takes the GIL.
// 2. Requests that do not match make only their tensor fail. Any other error is permanent, is sent to all
// ranks, and makes all pending and later tensors fail, including the engine's operations.
// 3. In a forked child the negotiation is inert: submit throws, and all other methods do nothing.
class Negotiation {
 public:
  // sockets: descriptors of connected stream sockets, which this object then owns. Rank 0 passes one for each
  // rank, with -1 for itself; other ranks pass one that leads to rank 0. broadcaster: the engine for
  // broadcasts, which may be `engine`. The engines must outlive this object. time: null except in tests that
  // simulate ranks; with a clock there is no thread, and the test calls `turn`. silence: seconds without an
  // acknowledgement after which a connection counts as broken, if somebody waits in `await_break` and
  // replaces connections; if 0, a rank whose connection breaks is lost.
  Negotiation(Engine& engine, Engine& broadcaster, int rank, int world_size, const std::vector<int>& sockets,
              const NegotiationOptions& options, std::shared_ptr<const ToldTime> time = nullptr,
              double silence = 0);
  // Aborts all pending tensors and joins the thread.
  ~Negotiation();
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // Submits a named tensor. May be called from any thread; does not block. operation.name: name of the
  // tensor. signature: properties that must be equal on all ranks, as text for users. group: name of a group
  // of group_size tensors, which are decided together; empty for no group. Throws std::invalid_argument for
  // an invalid operation, and std::runtime_error once the negotiation is closed.
  std::shared_ptr<Ticket> submit(Operation operation, std::string signature, std::string group = {},
                                 uint64_t group_size = 0);

  // Ends this rank's submissions. Until all ranks have joined, this rank takes part in the others' allreduces
  // with weight 0.
  std::shared_ptr<Ticket> join();

  // Sets the number of this rank's current training step, which is sent to rank 0 with the next report.
  void set_step(int64_t step);

  // Makes all tensors fail on all ranks. May be called from any thread; does not block.
  void abort(const Error& error);

  // Returns new notices. Blocks until there is one, at most `timeout` seconds. Returns nullopt once the
  // negotiation is closed.
  std::optional<std::vector<Notice>> notices(double timeout);

  // Called on rank 0: sends the text to all other ranks, where `notices` returns it.
  void order(const std::string& text);

  // Informs the peers that this rank ends normally, once all its pending tensors are decided. May be called
  // from any thread; does not block.
  void leave();

  // Blocks until all pending tensors are decided, then informs the peers that this rank ends normally.
  // Idempotent. If that takes longer than `timeout` seconds, aborts the remaining tensors and throws
  // Error(kTimeout).
  void close(double timeout);

  bool closed() const;
  std::optional<Error> error() const;

  // For a negotiation without a thread: does everything that is due now. Returns the seconds until the next
  // call is due if no bytes arrive and no method is called before; nullopt once the negotiation has ended.
  std::optional<double> turn();

  // The following methods may be called from any thread; see Links.

  // Blocks until the connection with a rank breaks, and returns the rank. Returns nullopt once the
  // negotiation has ended.
  std::optional<int> await_break();
  // Shuts down the connection with a rank, and returns how many bytes have arrived over it and those before
  // it. Returns nullopt if the rank has ended, or there is no such connection.
  std::optional<uint64_t> detach(int rank);
  bool is_detached(int rank);
  bool has_left(int rank);
  bool attach(int rank, int socket, uint64_t received);
  void give_up(int rank);

  // Closes the sockets in a forked child, since open copies would hide the parent's end from its peers.
  void forsake();

 private:
  bool inert() const;
  void check_alive() const;

  // The following fields are constant after construction.
  const pid_t pid_;
  std::shared_ptr<NegotiationState> state_;
};

}  // namespace dadt
