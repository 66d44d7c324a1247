#pragma once

#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// Moves bytes between ranks. The order of calls: construction, endpoint and connect in one thread, then run
// and close in the engine's thread, while any thread may call abort. In a forked child the destructor does
// nothing.
class Executor {
 public:
  virtual ~Executor() = default;

  virtual const char* name() const = 0;

  // Returns the endpoint by which peers reach this rank; empty if no endpoint is needed, because the executor
  // does not connect to peers or was connected before. Does not block.
  virtual std::string endpoint() { return {}; }

  // Connects to all ranks, given their endpoints by rank. Blocks until every rank has connected;
  // Error(kTimeout) names the ranks that have not.
  virtual void connect(const std::vector<std::string>&, double /*timeout*/) {}

  // Prepares the engine's thread, such as by choosing its cores. Called once on this thread, before the first
  // operation.
  virtual void settle_thread(int rank, int world_size);

  // Runs one operation and blocks until it is done; no wait for a peer takes longer than `timeout` seconds.
  // Throws Error, after which only abort and close may be called.
  virtual Result run(const Operation& operation, double timeout) = 0;

  // Makes `run` throw `error` here and on the peers, both in a call that is in progress and in later calls.
  // Never blocks.
  virtual void abort(const Error& error) = 0;

  // Informs the peers that this rank ends normally. Idempotent.
  virtual void close() = 0;
};

// Runs an operation without communication, as if all `world_size` ranks had submitted this rank's values.
// Used for a single rank, and by the null executor on every rank.
Result run_alone(const Operation& operation, int world_size);

// Returns the error for a peer that has died, or has closed its connection while it lives. who: the peer,
// such as "rank 2 (pid 7)". title: the operation in which this rank waited for it.
Error lost_error(const std::string& who, bool lives, const std::string& title);

// Returns the error for ranks that did not begin the operation in time.
Error late_error(const std::vector<int>& ranks, const std::string& title, double timeout);

// Throws std::invalid_argument unless 0 <= rank < world_size.
void check_rank(int rank, int world_size);

}  // namespace dadt
